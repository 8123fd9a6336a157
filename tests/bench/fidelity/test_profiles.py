"""Comparison of profiles with recordings: each profile's own error, and one changed part at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.fidelity.profiles import PROFILES, parts, profile_table
from policies.registry import make_planner, make_routing
from replayer.replay.plan import PlanOptions
from replayer.traces.synth import SynthOptions, synthetic_trace
from sim.fidelity.recording import RecordedArm, Recording, Sent
from sim.hardware import load_profile
from sim.offline.simulate import SimOptions, simulate


@pytest.fixture(scope="module")
def recording() -> Recording:
    """A simulation with h200 engines, as if it had been recorded."""
    trace = synthetic_trace(SynthOptions(requests=40, seed=3))
    options = SimOptions(instances=2, profile="h200", plan=PlanOptions(time_scale=4.0))
    run = simulate(trace, options, make_routing("linear", {}), make_planner("never")).run
    keys = {each.chat_id: list(each.hash_ids) for each in trace.requests}
    sent = [
        Sent(
            each,
            each.sent_s or 0.0,
            each.instance or "",
            keys[each.chat_id],
            each.input_length,
            each.output_length,
            compared=True,
        )
        for each in sorted(run.records, key=lambda each: each.sent_s or 0.0)
    ]
    return Recording("made", trace.block_tokens, RecordedArm(), sent, 0)


def test_the_profile_that_timed_the_engines_has_no_error_and_another_has(recording: Recording) -> None:
    table = profile_table({"made": [recording, recording]}, {"here": "h200", "there": "h20"}).splitlines()
    assert table[0].startswith("| recordings, here / there | metric |")
    assert [line.split(" | ")[:2] for line in table[2:]] == [
        ["| made (2)", "TTFT"],
        ["| made (2)", "TPOT"],
        ["| made (2)", "E2E"],
    ]
    for line in table[2:]:
        *errors, within, rank = (cell.strip("| ").split(" / ") for cell in line.split(" | ")[2:])
        assert {here for here, _ in errors} == {"+0%"}
        assert any(abs(float(there.rstrip("%"))) > 10 for _, there in errors)
        assert (within[0], rank[0]) == ("x 1.00", "1.00")
        assert float(within[1]) > 1.1


def test_a_part_is_the_only_difference(tmp_path: Path) -> None:
    base, refit = map(load_profile, PROFILES)
    found = {name: load_profile(path) for name, path in parts(tmp_path).items()}
    assert list(found) == ["h200", "context", "prefill", "transfers"]
    assert found["h200"] == base
    assert found["context"].step == base.step.model_copy(update={"decode_context_s": refit.step.decode_context_s})
    assert found["transfers"].step == base.step
    assert found["transfers"].transports == refit.transports
    assert found["prefill"].transports == found["context"].transports == base.transports
    kept = {name for name in base.step.model_dump() if name.startswith(("decode_", "expert_"))}
    for name, value in found["prefill"].step.model_dump().items():
        assert value == getattr(base.step if name in kept else refit.step, name), name
