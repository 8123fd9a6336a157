"""Instances from Ray, by way of the reader's output; `make test-ray` has a real cluster."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from proxy.discovery.ray import RayInstances
from proxy.discovery.source import DiscoveryError
from proxy.settings import DiscoverySettings


@pytest.fixture
def source(tmp_path: Path) -> Callable[[str], RayInstances]:
    """A source whose reader is a script."""

    def of(script: str) -> RayInstances:
        path = tmp_path / "python"
        path.write_text(f"#!{sys.executable}\n{script}\n")
        path.chmod(0o755)
        settings = {"source": "ray", "ray": {"fleet": "a", "python": str(path)}, "interval_s": 0.1, "timeout_s": 0.2}
        return RayInstances(DiscoverySettings.model_validate(settings))

    return of


async def test_each_line_is_a_set(source: Callable[[str], RayInstances]) -> None:
    lines = [[{"url": "http://127.0.0.2:1", "name": "a"}], []]
    script = "\n".join(f"print({json.dumps(json.dumps(line))}, flush=True)" for line in lines)
    async with aclosing(source(f"{script}\nimport time; time.sleep(60)").sets()) as sets:
        assert [each.name for each in (await anext(sets)).instances] == ["a"]
        assert (await anext(sets)).instances == ()
        with pytest.raises(DiscoveryError, match="silent"):
            await anext(sets)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("""print('{"error": "no cluster"}')""", "no cluster"),
        ("pass", "the reader has ended"),
        ("print('hello')", "hello"),
        ("""print('[{"url": "ftp://x"}]')""", "invalid instance"),
    ],
)
async def test_a_reader_that_fails_is_an_error(source: Callable[[str], RayInstances], script: str, says: str) -> None:
    with pytest.raises(DiscoveryError, match=says):
        await anext(source(script).sets())


async def test_an_interpreter_that_is_missing_is_an_error() -> None:
    settings = {"source": "ray", "ray": {"fleet": "a", "python": "/nowhere/python"}}
    with pytest.raises(DiscoveryError, match="cannot be started"):
        await anext(RayInstances(DiscoverySettings.model_validate(settings)).sets())
