"""Instances from a file."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest

from policies.types import Role
from proxy.discovery import file as file_module
from proxy.discovery.file import FileInstances, parsed
from proxy.discovery.source import DiscoveryError, Wanted


async def names(sets: AsyncGenerator[Wanted, None]) -> list[str]:
    return [each.name for each in (await anext(sets)).instances]


def replace(path: Path, text: str) -> None:
    """As a deployment does it: readers see the old file or the new one."""
    other = path.with_suffix(".new")
    other.write_text(text)
    os.replace(other, path)


@pytest.mark.parametrize(
    "text",
    [
        "- http://127.0.0.1:1\n- {url: 'http://127.0.0.1:2', name: b, role: kv_consumer}\n",
        "instances:\n- url: http://127.0.0.1:1\n- url: http://127.0.0.1:2\n  name: b\n  role: kv_consumer\n",
        json.dumps(["http://127.0.0.1:1", {"url": "http://127.0.0.1:2", "name": "b", "role": "kv_consumer"}]),
        '{"instances": ["http://127.0.0.1:1", {"url": "http://127.0.0.1:2", "name": "b", "role": "kv_consumer"}]}',
        "[http://127.0.0.1:1, {url: 'http://127.0.0.1:2', name: b, role: kv_consumer}]",
    ],
)
def test_yaml_and_json_with_or_without_the_key_instances(text: str) -> None:
    first, second = parsed(text).instances
    assert (first.name, second.name, second.role) == ("127.0.0.1:1", "b", Role.KV_CONSUMER)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- http://127.0.0.1:1\n- ftp://b\n", "entry 1"),
        ("- {url: 'http://a', nmae: b}\n", "nmae"),
        ("- http://a:1\n- {url: 'http://a:1', name: other}\n", "share the same url: http://a:1"),
        ("- {url: 'http://a', name: n}\n- {url: 'http://b', name: n}\n", "share the same name: n"),
        ("a: [", "not YAML"),
        ("[a, {", "neither JSON nor YAML"),
        ("http://a", "give a list"),
        ("instances: {a: b}", "give a list"),
        ("fleet: []", "give a list"),
        ("- {url: 'http://a', role: kv_both}", "bootstrap_url"),
    ],
)
def test_a_bad_file_is_refused_as_a_whole_with_the_reason(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parsed(text)


def test_an_empty_list_is_an_empty_set() -> None:
    assert parsed("[]").instances == parsed("instances:\n").instances == ()


async def test_replaced_files_are_read_and_bad_ones_reported(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    source = FileInstances(path, interval_s=0.01, timeout_s=5)
    with pytest.raises(DiscoveryError, match="No such file"):
        await anext(source.sets())
    replace(path, "- http://127.0.0.1:1\n")
    async with aclosing(source.sets()) as sets:
        assert await names(sets) == ["127.0.0.1:1"]
        replace(path, "- http://127.0.0.1:2\n")
        assert await names(sets) == ["127.0.0.1:2"]
        replace(path, "- [\n")
        with pytest.raises(DiscoveryError, match=r"^not YAML"):
            await anext(sets)
    replace(path, "- http://127.0.0.1:3\n")
    async with aclosing(source.sets()) as sets:
        assert await names(sets) == ["127.0.0.1:3"]


async def test_a_file_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_module, "MAX_BYTES", 10)
    path = tmp_path / "fleet.yaml"
    path.write_text("- http://127.0.0.1:1\n")
    with pytest.raises(DiscoveryError, match="more than 10 bytes"):
        await anext(FileInstances(path, 1, 5).sets())
