"""The setting ``hardware``: a calibrated profile gives the cost models their starting constants."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from policies.costs.constants import CostConstants, PrefillConstants
from policies.costs.formulas import PrefillModel
from policies.costs.transfer_constants import KV_BYTES_PER_TOKEN
from proxy.routing.router import Router
from proxy.settings import Settings, SettingsError, load_settings

COSTS = CostConstants(PrefillConstants(0.5, 1e-4, 1e-9), {}, 1_000.0)


def settings(hardware: str | None) -> Settings:
    return load_settings(instances=[{"url": "http://127.0.0.1:1"}], hardware=hardware)


def test_the_router_starts_from_the_profile(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"name": "mine", "costs": COSTS.as_mapping()}))
    state = Router(settings(str(path))).state
    assert state.costs.prefill.predict(1_000).seconds == pytest.approx(0.6005)
    assert state.costs.bytes_per_token == 1_000.0


def test_without_it_the_constants_are_the_built_in_ones() -> None:
    state = Router(settings(None)).state
    assert state.costs.prefill == PrefillModel()
    assert state.costs.bytes_per_token == KV_BYTES_PER_TOKEN


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "there is no .*mine.yaml"),
        ("name: [", "is not YAML"),
        ("name: mine", "has no section `costs`"),
        ("costs: {prefill: 3}", "costs: expected the keys"),
    ],
)
def test_profiles_that_cannot_be_used_are_refused(tmp_path: Path, content: str | None, expected: str) -> None:
    path = tmp_path / "mine.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SettingsError, match=f"(?s)hardware: .*{expected}"):
        settings(str(path))


def test_a_shipped_profile_that_was_not_calibrated_says_so() -> None:
    with pytest.raises(SettingsError, match="warmroute calibrate"):
        settings("h200")


@pytest.mark.parametrize("name", ["nope", "h200", "nope.yaml"])
def test_a_name_that_cannot_be_used_is_answered_with_those_that_can(name: str) -> None:
    with pytest.raises(SettingsError) as refused:
        settings(name)
    listed = str(refused.value).partition("with cost constants: " if "nope" in name else "these have one: ")[2]
    names = [each.strip() for each in listed.partition(";")[0].split(",")]
    assert {"h100-nvlink", "h200-nvlink-128"} <= set(names)
    for each in names:
        assert settings(each).hardware == each


def test_a_profile_that_cannot_be_read_is_no_missing_one(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(SettingsError, match=r"folder\.yaml cannot be read: Is a directory"):
        settings(str(tmp_path / "folder.yaml"))
