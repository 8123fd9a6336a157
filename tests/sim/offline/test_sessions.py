"""Sessions of simulated runs: 1 on an idle fleet, the same figures streamed and from the run file, bounded memory."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replayer.records.runs import Run, encode_line, read_run
from replayer.records.sessions import SessionTally, session_clocks, session_tally
from replayer.traces.formats import bailian
from replayer.traces.trace import Trace
from sim.offline.options import SimOptions
from sim.offline.outcome import SimulatedOutcome
from sim.offline.running import run_setup, run_streamed
from sim.offline.setup import Setup
from sim.offline.simulate import simulate
from sim.offline.streaming import StreamedLoop
from tests.sim.offline.offline_runs import ROOMY_TOKENS, agents, conversation, run, trace_of

AGENTS = agents(120)


def slowdowns(found: Run) -> list[float | None]:
    return [clock.slowdown for clock in session_clocks(found).values()]


@pytest.mark.parametrize("profile", ["h200", "h20"])
@pytest.mark.parametrize("think_s", [(), (None, 3.0, 0.0, 4.0)], ids=["gaps", "think times"])
def test_a_session_alone_on_the_fleet_is_not_slowed_down(profile: str, think_s: Any) -> None:
    turns = ((0.0, 100, 50), (10.0, 160, 200), (11.0, 400, 300), (40.0, 500, 1), (41.0, 500, 30))
    trace = trace_of(conversation(*turns, think_s=think_s))
    found = run(trace, instances=1, profile=profile, pool_tokens=ROOMY_TOKENS).run
    assert slowdowns(found) == [pytest.approx(1.0, abs=1e-9)]
    assert profile in found.header.idle_costs.source


def test_waiting_for_a_slot_and_for_others_is_slowdown() -> None:
    sessions = [conversation((0.0, 300, 20), session=f"s{n}", first_id=100 * (n + 1)) for n in range(3)]
    alone = run(trace_of(sessions[0]), instances=1).run
    queued = run(trace_of(*sessions), instances=1, max_inflight_sessions=1).run
    together = run(trace_of(*sessions), instances=1).run
    [took] = [clock.completion_s or 0.0 for clock in session_clocks(alone).values()]
    assert sorted(clock.completion_s or 0.0 for clock in session_clocks(queued).values()) == pytest.approx(
        [took, 2 * took, 3 * took], rel=0.01
    )
    assert slowdowns(queued) == [pytest.approx(each, rel=0.01) for each in (1.0, 2.0, 3.0)]
    assert min(each or 0.0 for each in slowdowns(together)) > 1.05


def test_idle_time_is_the_same_under_every_policy() -> None:
    idle = []
    for policy in ("round_robin", "session_sticky"):
        clocks = session_clocks(run(AGENTS, policy, pool_tokens=200_000).run)
        idle.append({name: (clock.completion_s or 0.0) / (clock.slowdown or 1.0) for name, clock in clocks.items()})
    assert idle[0].keys() == idle[1].keys()
    for name, seconds in idle[0].items():
        assert seconds == pytest.approx(idle[1][name])


def figures_of(setup: Setup, *, streamed: bool = False) -> tuple[dict[str, Any], Run, Path]:
    path = Path(setup.trace).with_suffix(".run.jsonl")
    output = io.BytesIO()
    ran = run_streamed(setup, 600.0, output) if streamed else run_setup(setup, output)
    path.write_bytes(output.getvalue())
    return dict(ran.outcome.figures()), read_run(path), path


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "agents.jsonl"
    bailian.write(path, AGENTS.requests)
    return path


def test_a_run_and_its_file_have_the_same_figures(stored: Path) -> None:
    setup = Setup(trace=str(stored), instances=2, arrival_jitter_s=1.0, pool_tokens=200_000)
    figures, written, _ = figures_of(setup)
    streamed, _, _ = figures_of(setup, streamed=True)
    assert streamed == {**figures, "span_s": streamed["span_s"]}
    found = session_tally([written]).figures()
    assert figures["sessions"] == figures["sessions_completed"] == found.completed == len(AGENTS.sessions())
    for share in ("mean", "p50", "p90"):
        assert figures[f"session_completion_{share}_s"] == pytest.approx(getattr(found.completion_s, share))
        assert figures[f"session_slowdown_{share}"] == pytest.approx(getattr(found.slowdown, share))
    assert figures["session_slowdown_mean"] > 1.0
    e2e = [record.e2e_s for record in written.records]
    assert figures["e2e_mean_s"] == pytest.approx(np.mean([each for each in e2e if each is not None]))
    assert figures["e2e_scheduled_mean_s"] >= figures["e2e_mean_s"]


def test_the_session_cut_by_the_limit_has_no_time(stored: Path) -> None:
    sizes = [len(turns) for turns in AGENTS.sessions().values()]
    limit = next(sum(sizes[:place]) + 1 for place in range(3, len(sizes)) if sizes[place] > 1)
    figures, written, _ = figures_of(Setup(trace=str(stored), instances=2, request_limit=limit))
    found = session_tally([written]).figures()
    assert written.header.offered["cut_sessions"] == 1
    assert (figures["sessions_cut"], found.cut) == (1, 1)
    assert figures["sessions_completed"] == found.completed == figures["sessions"] - 1


@pytest.mark.parametrize("limit", [41, 120])
def test_a_stream_cut_by_the_limit_has_the_session_times_of_a_simulation_in_memory(stored: Path, limit: int) -> None:
    setup = Setup(trace=str(stored), instances=2, request_limit=limit)
    whole, in_memory, _ = figures_of(setup)
    figures, written, _ = figures_of(setup, streamed=True)
    assert written.records == in_memory.records
    assert written.header.cut_session == in_memory.header.cut_session
    assert figures == pytest.approx(whole)  # sums in another order
    assert session_tally([written]).figures() == session_tally([in_memory]).figures()


def test_a_session_with_a_refused_turn_is_not_completed() -> None:
    sessions = (conversation((0.0, 10, 2), (1.0, 90, 2), session="long"), conversation((0.0, 10, 2), first_id=50))
    found = session_tally([run(trace_of(*sessions), instances=1, max_model_len=2_000).run]).figures()
    assert (found.sessions, found.completed, found.failed) == (2, 1, 1)


def hours(count: int) -> Trace:
    """A session of two turns every hour."""
    return trace_of(
        *(
            conversation((at * 3600.0, 3, 1), (at * 3600.0 + 60, 4, 1), session=f"s{at}", first_id=at * 10)
            for at in range(count)
        )
    )


def test_a_streams_tally_holds_recent_sessions_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    most = 0
    add = SessionTally.add

    def watched(tally: SessionTally, record: Any) -> None:
        nonlocal most
        add(tally, record)
        most = max(most, tally.in_progress)

    monkeypatch.setattr(SessionTally, "add", watched)
    path = tmp_path / "hours.jsonl"
    bailian.write(path, hours(50).requests)
    figures, _, _ = figures_of(Setup(trace=str(path), instances=1), streamed=True)
    assert most <= 7
    assert figures["sessions_completed"] == 50
    most = 0
    figures, _, _ = figures_of(Setup(trace=str(path), instances=1))
    assert most == 1
    assert figures["sessions_completed"] == 50


def test_each_session_is_over_once_and_after_its_last_turn() -> None:
    from policies.registry import make_routing
    from sim.offline.records import TraceSource
    from sim.offline.simulate import OfflineRun

    trace, seen = hours(12), list[str]()
    loop = StreamedLoop(iter(trace.requests), trace.sha256, SimOptions(instances=1))
    source = TraceSource(trace.name, trace.sha256, trace.block_tokens, [])
    OfflineRun(source, loop, None, SimOptions(instances=1), make_routing("lmetric")).run(
        lambda record: seen.append(f"{record.session_id} {record.turn}"), on_over=seen.append
    )
    over = [place for place, name in enumerate(seen) if " " not in name]
    assert [seen[place] for place in over] == [f"s{at}" for at in range(7)], "later ones may continue"
    assert all(seen.index(f"{seen[place]} 2") < place for place in over)


def test_an_outcome_without_sessions_has_no_figure() -> None:
    figures = SimulatedOutcome().figures()
    assert (figures["sessions"], figures["session_slowdown_p90"], figures["e2e_mean_s"]) == (0, None, None)


def test_equal_simulations_still_give_equal_bytes() -> None:
    from policies.registry import make_routing

    options = SimOptions(instances=2)
    first, again = (simulate(AGENTS, options, make_routing("lmetric")).run for _ in range(2))
    assert [encode_line(record) for record in first.records] == [encode_line(record) for record in again.records]
    assert encode_line(first.header) == encode_line(again.header)
