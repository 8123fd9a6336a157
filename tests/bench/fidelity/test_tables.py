"""Accuracy of the simulator: the tables of its page equal the command's output, and real time agrees."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from bench import simulator
from bench.fidelity import __main__ as fidelity
from bench.fidelity import profiles, real_time
from bench.fidelity.__main__ import PAGE, PAGES, SECTIONS, TRACES_OF, app, put, section
from replayer.replay.plan import PlanOptions
from replayer.traces.trace import Trace, TraceRequest
from sim.fidelity.recording import Recording
from sim.fidelity.resimulate import resimulate
from sim.offline.router import OfflineRouter
from sim.virtual import VirtualFleet
from tests.launch.conftest import free_base

REPOSITORY = Path(__file__).resolve().parents[3]


def published(name: str, mark: str = "fidelity: ") -> str:
    """A table of its page."""
    _, found, rest = PAGES.get(name, PAGE).read_text(encoding="utf-8").partition(f"<!-- {mark}{name} -->\n")
    assert found, name
    table, found, _ = rest.partition(f"<!-- end of {name} -->")
    assert found, name
    return table.strip()


@pytest.mark.parametrize("name", [name for name in SECTIONS if name not in TRACES_OF])
def test_the_page_holds_what_the_command_prints(name: str) -> None:
    assert published(name) == section(name).strip()


@pytest.fixture(scope="module")
def _recordings_read_and_simulated_once() -> Iterator[None]:
    """Three sections compare the same recordings, with `h200` each of them; two recordings are of the same trace."""
    made: dict[tuple[Any, ...], Any] = {}

    def once(recording: Recording, *options: Any) -> Any:
        key = (id(recording), *options)  # `recorded` keeps them alive
        if key not in made:
            made[key] = resimulate(recording, *options)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        for name in ("recorded", "load_trace"):
            patch.setattr(fidelity, name, functools.cache(getattr(fidelity, name)))
        for module in (fidelity, profiles):
            patch.setattr(module, "resimulate", once)
        yield


@pytest.mark.traces
@pytest.mark.usefixtures("_recordings_read_and_simulated_once")
@pytest.mark.parametrize("name", TRACES_OF)
def test_the_page_holds_what_the_command_computes_from_traces(name: str) -> None:
    folder = Path(os.environ.get("WARMROUTE_TRACES") or REPOSITORY.parent / "shared" / "traces") / "agentic"
    if not all((folder / trace).is_file() for trace in TRACES_OF[name]):
        pytest.skip(f"public traces not found at {folder}; set WARMROUTE_TRACES")
    assert published(name) == section(name, folder).strip()


def test_a_table_is_put_between_its_marks_only() -> None:
    page = "a\n<!-- fidelity: x -->\nold\n<!-- end of x -->\nb\n"
    assert put(page, "x", "new\n") == page.replace("old", "new")
    with pytest.raises(typer.BadParameter, match="no markers for y"):
        put(page, "y", "new")


def test_the_page_holds_the_kept_costs_and_a_small_run_makes_the_same_kind(tmp_path: Path) -> None:
    kept = json.loads((REPOSITORY / "docs" / "results" / "simulator-cost.json").read_text(encoding="utf-8"))
    assert published("cost", "") == simulator.markdown(kept)
    trace = simulator.conversations(40, 30, 2)
    assert [len(request.hash_ids) for request in trace.requests if request.session_id == "3"] == [16, 25, 34, 43]
    assert len(trace.requests) == 40
    cost = simulator.measure(simulator.TimedSimulation("few", None, 2, requests=40, blocks=30, repeats=1))
    assert cost.requests == 40
    assert min(cost.engines_us, cost.decision_us, cost.rest_us, cost.rss_mib) > 0
    # The meters are removed again.
    assert (OfflineRouter.route.__name__, VirtualFleet.advance.__name__) == ("route", "advance")
    assert "| few | 40 |" in simulator.markdown({"costs": [cost._asdict() | {"total_us": cost.total_us}]})


def test_the_command_names_its_tables_and_leaves_out_what_it_has_no_trace_for(tmp_path: Path) -> None:
    runner = CliRunner()
    done = runner.invoke(app, ["--only", "end-to-end", "--traces", str(tmp_path)])
    assert done.exit_code == 0
    assert "left out: " in done.output
    refused = runner.invoke(app, ["--only", "everything"])
    assert refused.exit_code == 2
    assert "interference, transfers" in refused.output


def spread_trace() -> Trace:
    """20 conversations of two turns, 10k to 39k tokens each: the result does not depend on the order of nearly
    simultaneous events."""
    made = []
    for session in range(20):
        blocks, first = 150 + session * 61 % 300, (session + 1) << 20
        for turn, size in enumerate((blocks, blocks + 160)):
            made.append(
                TraceRequest(
                    chat_id=2 * session + turn,
                    session_id=str(session),
                    turn=turn + 1,
                    timestamp_s=3.0 * session + 10.0 * turn,
                    input_length=64 * size + 5,
                    output_length=40 + session % 20,
                    hash_ids=list(range(first, first + size)),
                    think_time_s=2.0 if turn else None,
                )
            )
    made.sort(key=lambda request: request.timestamp_s)
    return Trace(requests=made, block_tokens=64, tail="floor", name="spread", sha256="0123456789abcdef" * 4)


@pytest.mark.fleet
@pytest.mark.quiet
@pytest.mark.timeout(300)
def test_real_time_and_virtual_time_agree(tmp_path: Path) -> None:
    base = free_base()
    ports = [f"base_port={base}", f"base_bootstrap_port={base + 10}", f"proxy.port={base + 20}"]
    compared = real_time.compare(spread_trace(), PlanOptions(), 4.0, "h20", 3, tmp_path, ports)
    assert compared.real.ok == compared.virtual.ok == compared.placed.ok == 40
    assert compared.alike, compared
    for name in ("ttft_p50_s", "ttft_p90_s"):
        assert getattr(compared.placed, name) == pytest.approx(getattr(compared.real, name), rel=real_time.TOLERANCE)
    assert compared.real.hit_rate == pytest.approx(compared.virtual.hit_rate, abs=0.03)
    assert compared.placed.hit_rate == pytest.approx(compared.real.hit_rate)
    assert compared.virtual.e2e_p50_s == pytest.approx(compared.real.e2e_p50_s, rel=0.1)
