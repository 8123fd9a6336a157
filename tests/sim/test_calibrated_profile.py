"""Profiles of a calibration: perhaps without KV transports, with constants for the cost models."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.costs.constants import CostConstants, PrefillConstants
from policies.costs.formulas import PrefillModel
from policies.registry import make_routing
from policies.types import Role
from sim.fit_report import profile_yaml
from sim.hardware import HardwareProfile, ProfileError, load_profile
from sim.offline.options import SimOptions
from sim.offline.simulate import OfflineRun
from sim.server.settings import ServerSettings
from tests.sim.offline.offline_runs import conversation, trace_of

COSTS = CostConstants(PrefillConstants(0.5, 1e-4, 1e-9), {}, 1_000.0)


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """Path of a profile that was measured on one engine alone."""
    measured = load_profile("h200").model_copy(
        update={"transports": {}, "default_transport": None, "costs": COSTS.as_mapping()}
    )
    path = tmp_path / "mine.yaml"
    path.write_text(profile_yaml(HardwareProfile.model_validate(measured.model_dump()), "warmroute calibrate"))
    return str(path)


def test_engines_without_a_connector_need_no_transport(profile: str) -> None:
    assert ServerSettings.resolve(port=1, profile=profile, role="none").engines()[0].config.role == "none"
    with pytest.raises(ProfileError, match="choose role none"):
        ServerSettings.resolve(port=1, profile=profile, role="kv_both")
    with pytest.raises(ProfileError, match="has no transport 'tcp'"):
        ServerSettings.resolve(port=1, profile=profile, role="none", transport="tcp")


def test_the_profile_says_which_command_wrote_it(profile: str) -> None:
    assert Path(profile).read_text().startswith("# Written by `warmroute calibrate` from h200_points.yaml")


def test_constants_that_cannot_be_used_are_refused(profile: str) -> None:
    path = Path(profile)
    path.write_text(path.read_text().replace("fixed_s: 0.5", "fixed_s: -0.5"))
    with pytest.raises(ProfileError, match=r"costs\.prefill\.fixed_s"):
        load_profile(profile)


def test_a_simulations_router_starts_from_the_constants(profile: str) -> None:
    trace = trace_of(conversation((0.0, 4, 8), (1.0, 6, 8)))

    def started(name: str) -> PrefillModel:
        options = SimOptions(instances=1, profile=name, role=Role.NONE)
        return OfflineRun.of_trace(trace, options, make_routing("warm"))._router.state.costs.prefill

    assert started(profile) == PrefillModel(*COSTS.prefill)
    assert started("h200") == PrefillModel()
