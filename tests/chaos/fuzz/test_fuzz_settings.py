"""The settings loader on arbitrary files: settings, or one error that names the problem."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.settings import Settings, SettingsError, load_settings
from tests.chaos.rig.profiles import EXAMPLES, fuzz

SECTIONS = {name: list(getattr(field.annotation, "model_fields", {})) for name, field in Settings.model_fields.items()}
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(string.printable, max_size=12)
    | st.sampled_from(["never", "linear", "http://127.0.0.1:1", "", "0", "1e9", "-1", "nan", ".inf"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def files(draw: st.DrawFn) -> dict[str, Any]:
    """Nearly valid settings files: real names, odd values."""
    content: dict[str, Any] = {"instances": [{"url": "http://127.0.0.1:8000"}]}
    for name in draw(st.lists(st.sampled_from(sorted(SECTIONS)), max_size=4)):
        keys = SECTIONS[name]
        by_key: bool = draw(st.booleans())
        if keys and by_key:
            content[name] = {key: draw(VALUES) for key in draw(st.lists(st.sampled_from(keys), max_size=3))}
        else:
            content[name] = draw(VALUES)
    return content


quick = settings(fuzz, max_examples=EXAMPLES or 40, suppress_health_check=list(HealthCheck))


def load(path: Path) -> None:
    refusal = ""
    try:
        assert load_settings(path).instances
    except SettingsError as error:
        refusal = str(error)
    assert not refusal or str(path) in refusal or "settings" in refusal


@quick
@given(files())
def test_odd_values_are_taken_or_refused(tmp_path_factory: pytest.TempPathFactory, content: dict[str, Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    load(path)


@quick
@given(st.binary(max_size=120) | st.text(max_size=120).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_file_is_settings_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    path.write_bytes(content)
    load(path)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "5",
        "null",
        "instances",
        "instances: [&a {url: 'http://127.0.0.1:1', name: *a}]",
        "&a [*a]",
        "instances: [{url: 'http://127.0.0.1:1'}]\n<<: {port: 1}",
        "instances: [{url: 'http://127.0.0.1:1'}]\nport: 1\nport: 2",
        "? [a, b]\n: c",
        "!!python/object/apply:os.system ['true']",
        "a: b: c",
        "\t",
        "instances: [{url: 'http://127.0.0.1:99999'}]",
        "instances: [{url: 'http://['}]",
        "instances: [{url: 'http://127.0.0.1:1\\u0000'}]",
        "{" * 500,
        "[" * 500 + "]" * 500,
    ],
    ids=lambda content: content[:40],
)
def test_a_pathological_file_is_settings_or_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text(content, encoding="utf-8")
    load(path)


def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError):
        load_settings(tmp_path)
