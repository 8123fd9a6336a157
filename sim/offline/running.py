"""Runs one setup into a run file: read the trace, simulate, write every line as its request ends."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from replayer.records.counted import counted
from replayer.records.outputs import replacing
from replayer.records.runs import RequestRecord, RunEnd, encode_line
from replayer.replay.plan import Plan, PlanOptions, make_plan
from replayer.traces.loading import LoadOptions, load
from replayer.traces.trace import Trace
from sim.offline.fleet import InstanceTotals
from sim.offline.outcome import SimulatedOutcome
from sim.offline.reading import read_apart
from sim.offline.records import TraceSource
from sim.offline.setup import Setup
from sim.offline.simulate import OfflineRun
from sim.offline.streaming import StreamedLoop


class Ran(NamedTuple):
    """Results of a run other than its file."""

    outcome: SimulatedOutcome
    instances: list[InstanceTotals]
    end: RunEnd
    notes: list[str]
    """Notes on the trace and on how it was read."""


def run_setup(setup: Setup, output: IO[bytes], rows: IO[bytes] | None = None, trace: Trace | None = None) -> Ran:
    """Simulate a trace in memory. A trace that is loaded here is kept for the next setup.

    Args:
        setup: What to simulate.
        output: File for the run's lines.
        rows: File for breakdown rows; None: none are written.
        trace: The setup's trace, if it is already loaded.

    Raises:
        SimulationError, TraceError, UnknownPolicyError, PolicyParameterError, OSError: the message says what to change.
    """
    options = setup.options()
    plan: Plan | None = None
    if trace is None:
        trace = loaded(setup.trace, setup.load_options())
        plan = planned(setup.trace, setup.load_options(), setup.plan_options())
    run = OfflineRun.of_trace(trace, options, setup.routing(), setup.offload(), plan, setup.admission_rule())
    return _write(run, output, rows, trace.notes)


def run_streamed(
    setup: Setup,
    look_ahead_s: float,
    output: IO[bytes],
    rows: IO[bytes] | None = None,
) -> Ran:
    """Simulate a trace that is read by another process as it is used; arguments and errors as ``run_setup``."""
    options = setup.options()
    with read_apart(Path(setup.trace), setup.load_options(), setup.request_limit) as opened:
        turns = StreamedLoop(opened.requests, opened.sha256, options, look_ahead_s)
        source = TraceSource(
            opened.name, opened.sha256, opened.block_tokens, opened.notes, opened.cut_session, opened.read_with
        )
        rules = (setup.routing(), setup.offload(), setup.admission_rule())
        run = OfflineRun(source, turns, None, options, *rules)
        ran = _write(run, output, rows, list(opened.notes))
    ran.notes.append(f"at most {counted(turns.most_sessions, 'session')} known at once")
    if turns.late_turns:
        ran.notes.append(
            f"read after they were due: {counted(turns.late_turns, 'turn')}, up to {turns.most_late_s:,.1f} s: "
            "raise --look-ahead-s"
        )
    return ran


def _write(
    run: OfflineRun,
    output: IO[bytes],
    rows: IO[bytes] | None,
    notes: list[str],
) -> Ran:
    outcome = SimulatedOutcome(run.header.idle_costs)
    cut = run.header.cut_session
    encode = msgspec.json.Encoder().encode

    def record(each: RequestRecord) -> None:
        output.write(encode_line(each))
        outcome.add(each)

    output.write(encode_line(run.header))
    end, instances = run.run(
        record,
        None if rows is None else lambda row: rows.writelines((encode(row), b"\n")),
        lambda session_id: outcome.sessions.over(session_id, whole=session_id != cut),
    )
    if cut is not None:  # a stream may end before its sessions are known to be over
        outcome.sessions.over(cut, whole=False)
    outcome.sessions.all_over()
    output.write(encode_line(end))
    return Ran(outcome, instances, end, list(notes))


@lru_cache(maxsize=1)
def loaded(path: str, options: LoadOptions) -> Trace:
    """The trace, loaded once per process for all setups that simulate it in sequence."""
    return load(path, options)


@lru_cache(maxsize=2)
def planned(path: str, load_options: LoadOptions, options: PlanOptions) -> Plan:
    """The plan of a trace, made once for all setups with equal scales."""
    return make_plan(loaded(path, load_options), options)


@contextmanager
def new_files(*paths: Path | None) -> Iterator[list[IO[bytes] | None]]:
    """Open files for writing that must not exist yet; None stays None. They appear when the block succeeds.

    Raises:
        FileExistsError: one does, or was made by another process during the block.
        OSError: one cannot be written, with its path.
    """
    given = [path for path in paths if path is not None]
    for path in given:
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        files = [None if path is None else stack.enter_context(replacing(path, new=True)) for path in paths]
        try:
            yield files
        except OSError as error:
            if error.filename is not None:
                raise
            # An error of write() has no path, so that it is not known which of them it was.
            raise OSError(error.errno, error.strerror or str(error), ", ".join(map(str, given))) from error
