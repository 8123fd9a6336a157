"""The one reader of settings: a key that is given twice is refused, whatever file it is in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.experiment.definition.file import load_experiment
from launch.fleet.file import FleetError, load_fleet, parse_fleet
from proxy.settings import load_settings
from sim.hardware import ProfileError, load_profile
from warmroute_yaml import hardware_file, hardware_names, load_yaml

ROOT = Path(__file__).parents[1]
TWICE = "port: 1\nadmin: {port: 2}\nport: 3\n"
READERS: list[Callable[[Path], Any]] = [
    load_settings,
    load_fleet,
    load_experiment,
    lambda path: load_profile(str(path)),
]


@pytest.mark.parametrize("read", READERS)
def test_a_key_given_twice_is_refused_with_its_place(read: Callable[[Path], Any], tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(TWICE)
    with pytest.raises(
        (ValueError, ProfileError), match=r"(?s)the key 'port' is there twice; keep one of the two.*line 3, column 1"
    ):
        read(path)


@pytest.mark.parametrize(
    "text",
    [
        "{a: 1, b: {c: 2, c: 3}}",
        "[{a: 1, a: 1}]",
        "a: &all {x: 1, x: 2}\nb: *all",
        '"a": 1\na: 2',
    ],
)
def test_it_is_refused_at_any_depth(text: str) -> None:
    with pytest.raises(yaml.YAMLError, match="is there twice"):
        load_yaml(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a: {b: 1}\nc: {b: 1}",
        "1: a\n'1': b",  # a number and a text
        "all: &all {x: 1, y: 2}\none: &one {<<: *all, x: 3}\ntwo: {<<: *one, y: 4}\nthree: {<<: [*all, *one]}",
    ],
)
def test_everything_else_is_read_as_before(text: str) -> None:
    assert load_yaml(text) == yaml.safe_load(text)


def test_every_file_of_the_project_is_read_alike_with_and_without_libyaml(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "configs").rglob("*.yaml"))]
    texts = [text for text in texts if "\n---" not in text and "{{" not in text]
    assert len(texts) > 20
    quickly = [load_yaml(text) for text in texts]
    monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    assert [load_yaml(text) for text in texts] == quickly


@pytest.mark.parametrize("text", [TWICE, "a: [1\nb: 2", "a: b: c", "\tx: 1", "a: !!python/none", "a: 1\n---\nb: 2"])
def test_a_message_is_the_same_with_and_without_libyaml(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(yaml.YAMLError) as quickly:
        load_yaml(text)
    monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    with pytest.raises(yaml.YAMLError) as slowly:
        load_yaml(text)
    assert str(quickly.value) == str(slowly.value)


def test_aliases_within_aliases_are_looked_at_once() -> None:
    levels = "\n".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60))
    found = load_yaml(f"a0: &a0 [1]\n{levels}\n")
    assert found["a59"][0] is found["a59"][1]
    own = load_yaml("&own {own: *own}")
    assert own["own"] is own


def test_no_settings_are_read_by_another_reader() -> None:
    others = [
        str(path.relative_to(ROOT))
        for folder in ("policies", "proxy", "launch", "replayer", "sim", "bench")
        for path in (ROOT / folder).rglob("*.py")
        if "yaml.safe_load" in path.read_text(encoding="utf-8")
    ]
    assert others == []


def test_simulator_and_fleets_know_the_same_hardware_profiles() -> None:
    names = hardware_names()
    assert {"h20", "h200", "h200-nvlink-128"} <= set(names)
    for name in names:
        assert load_profile(name).name == name
        fleet = {"kind": "sim", "model": "m", "base_port": 9101, "count": 1, "role": "none"}
        assert parse_fleet({**fleet, "sim": {"profile": name}}).sim.profile == name
    with pytest.raises(ProfileError, match=", ".join(names)):
        load_profile("h999")
    with pytest.raises(FleetError, match=", ".join(names)):
        parse_fleet({**fleet, "sim": {"profile": "h999"}})


def test_a_file_of_the_name_of_a_profile_is_not_the_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a name that ends with .yaml is a path, whoever asks."""
    (tmp_path / "h200").write_text("")
    monkeypatch.chdir(tmp_path)
    assert hardware_file("h200") == ROOT / "configs" / "hardware" / "h200.yaml"
    assert hardware_file("h200.yaml") == Path("h200.yaml")


def test_an_empty_list_is_refused_in_the_words_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("sessions: {headers: }\ninstances: [{name: a, url: http://a}]\n")
    with pytest.raises(ValueError, match=r"sessions\.headers: expected a list, found nothing"):
        load_settings(path)
