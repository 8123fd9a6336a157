"""The time of a step with a short prefill, learned in simulated fleets whose step times are known."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random

import pytest

from policies.costs.short_step import ShortStep
from policies.registry import make_routing
from replayer.traces.trace import Trace
from sim.fit_report import profile_yaml
from sim.hardware import HardwareProfile, StepCosts, load_profile
from sim.offline.options import SimOptions
from sim.offline.simulate import OfflineRun
from tests.sim.offline.offline_runs import conversation, trace_of

ASSUMED_S = 0.04


@cache
def short_prompts() -> Trace:
    """15 single requests a second of 70 to 1,600 tokens, most of them below 512."""
    random = Random(1)
    at_s, sessions = 0.0, []
    for number in range(900):
        at_s += random.expovariate(15.0)
        blocks = random.choice([1, 2, 3, 4, 5, 6, 15, 25])
        sessions.append(
            conversation((at_s, blocks, random.randint(20, 160)), session=f"s{number}", first_id=1_000 * (number + 1))
        )
    return trace_of(*sessions)


def learned(tmp_path: Path, **steps: float) -> ShortStep:
    """Estimate after those requests on two instances with these step times."""
    profile = load_profile("h200")
    path = tmp_path / "profile.yaml"
    changed = profile.model_copy(update={"step": StepCosts(**{**profile.step.model_dump(), **steps})})
    path.write_text(profile_yaml(HardwareProfile.model_validate(changed.model_dump()), "test"))
    run = OfflineRun.of_trace(short_prompts(), SimOptions(instances=2, profile=str(path)), make_routing("warm"))
    run.run(lambda _: None)
    fit = run._router.state.costs.steps
    assert 800 < fit.answers <= 900
    return fit.short_step


def test_on_the_hardware_of_the_constant_it_is_kept(tmp_path: Path) -> None:
    found = learned(tmp_path)
    assert found.known
    assert found.seconds == pytest.approx(ASSUMED_S, rel=0.35)
    assert found.instead_of(ASSUMED_S) == ASSUMED_S


def test_where_a_short_prefill_costs_little_it_is_replaced(tmp_path: Path) -> None:
    """A step of 12 ms with a prefill instead of 8 ms without, whatever decodes in it."""
    found = learned(
        tmp_path,
        decode_s=0.008,
        decode_experts_s=0.0,
        decode_context_s=0.0,
        prefill_s=0.0,
        prefill_floor_s=0.012,
        mixed_stream_s=0.0,
    )
    assert found.seconds == pytest.approx(0.004, abs=0.002)
    assert found.instead_of(ASSUMED_S) == max(0.0, found.seconds)
