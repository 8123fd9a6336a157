"""Run an experiment: every run of the plan that is not done, in order; the state is written after each of them."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from launch.arm import ArmError
from launch.experiment.definition.file import ExperimentError, LoadedExperiment
from launch.experiment.definition.inputs import Inputs, reading
from launch.experiment.definition.order import Slot, noise_seed
from launch.experiment.definition.sections import LiveBackend
from launch.experiment.records import state as states
from launch.experiment.records.environment import (
    ENVIRONMENT_FILE,
    Environment,
    Software,
    differences,
    engines_of,
    host_load,
    software,
)
from launch.experiment.records.expected import left_s
from launch.experiment.records.freshness import Known, known_engines, read_proof
from launch.experiment.records.record import ARM_FILE, KEPT_FILES, ArmRecord, Callbacks, Measured
from launch.experiment.records.state import CUT_FOLDER, ExperimentState, RunState
from launch.experiment.run.live import measure_live
from launch.experiment.run.simulated import measure_simulated
from launch.freshness.proof import StaleEngineError
from launch.run.processes import StartError, creation_time, marked
from launch.run.state import StateError, read_state
from policies.registry import parameters
from replayer.records.breakdown_rows import BreakdownError
from replayer.records.runs import RecordError, RequestRecord
from replayer.records.summary import failures
from replayer.replay.endpoint import EndpointError
from replayer.traces.loading import load
from replayer.traces.trace import Trace, TraceError

_LEFT_BEHIND_S = 30.0
_POLL_S = 0.2
_REASON_LINES = 12


class ExperimentObserver(Protocol):
    """Receiver of a runner's progress."""

    def started(self, run: RunState, total: int) -> None:
        """Called when a run begins."""

    def phase(self, run: RunState, phase: str) -> None:
        """Called at each phase of a run: starting, replaying, stopping, simulating."""

    def recorded(self, run: RunState, record: RequestRecord) -> None:
        """Called for each finished request of a live run."""

    def ended(self, run: RunState, left_s: float | None) -> None:
        """Called when a run has ended; the others need about ``left_s`` wall seconds (None: unknown)."""


class Runner:
    """Measure the remaining runs of an experiment.

    Args:
        experiment: the checked file.
        directory: the experiment's directory, locked by the caller.
        state: from `launch.experiment.run.opening`.
        inputs: likewise.
        observer: receives the progress.
        jobs: simulated runs in parallel; live runs are measured one by one.
    """

    def __init__(
        self,
        experiment: LoadedExperiment,
        directory: Path,
        state: ExperimentState,
        inputs: Inputs,
        observer: ExperimentObserver,
        jobs: int = 1,
    ) -> None:
        self._experiment = experiment
        self._directory = directory
        self._state = state
        self._inputs = inputs
        self._observer = observer
        self._live = isinstance(experiment.settings.backend, LiveBackend)
        self._jobs = 1 if self._live else jobs
        self._known = Known()
        self._before: Software | None = None
        self._trace: Trace | None = None
        self._stopped = False

    async def run(self) -> ExperimentState:
        """Measure every run that is not done; returns the final state.

        A cancelled experiment is left in state "interrupted", with all its processes stopped.

        Raises:
            ExperimentError: the state cannot be written; an experiment whose progress is not kept does not continue.
        """
        self._state.runner = states.RunnerProcess(pid=os.getpid(), created_unix_s=creation_time(os.getpid()) or 0.0)
        self._state.state = states.RUNNING
        self._state.finished_unix_s = None
        left = self._state.left
        await asyncio.to_thread(self._prepare)
        self._write()
        try:
            waiting = iter(left)  # shared: each worker takes the next
            async with asyncio.TaskGroup() as group:
                for number in range(min(self._jobs, len(left))):
                    group.create_task(self._work(waiting), name=f"experiment-{number}")
        except ExceptionGroup as group:
            self._interrupted()
            unwritten = group.subgroup(ExperimentError)
            if unwritten is None:
                raise
            raise unwritten.exceptions[0] from group
        except BaseException:
            self._interrupted()
            raise
        self._end(states.STOPPED if self._stopped else states.DONE)
        return self._state

    def _interrupted(self) -> None:
        with suppress(ExperimentError):  # what interrupted it is the error to report
            self._end(states.INTERRUPTED)

    def _end(self, state: str) -> None:
        self._state.state = state
        self._state.finished_unix_s = time.time()
        self._write()

    def _prepare(self) -> None:
        folders = [(run.name, self._directory / run.path) for run in self._state.runs]
        cut = self._directory / CUT_FOLDER
        folders += [(f"an earlier attempt ({one.name})", one) for one in sorted(cut.glob("*/*"))]
        self._known = known_engines(folders)
        environment = (self._directory / ENVIRONMENT_FILE).read_bytes()
        with suppress(msgspec.MsgspecError):
            self._before = msgspec.json.decode(environment, type=Environment).software
        if self._live:
            settings = self._experiment.settings
            self._trace = load(self._inputs.trace_path, reading(settings.trace, settings.replay))

    async def _work(self, waiting: Iterator[RunState]) -> None:
        for run in waiting:
            if self._stopped:
                return
            await self._measure(run)

    async def _measure(self, run: RunState) -> None:
        """Make one run, from clearing its folder to recording its files."""
        run.state, run.reasons, run.warnings, run.files = states.RUNNING, [], [], {}
        run.requests = run.ok = run.finished_unix_s = None
        run.attempts += 1
        run.started_unix_s = time.time()
        self._write()
        self._observer.started(run, len(self._state.runs))
        settings = self._experiment.settings
        try:
            await self._clear(run)
            await self._attempt(run)
            run.state = states.DONE
        except StaleEngineError as error:
            run.state, run.reasons = states.REFUSED, [str(error)]
            self._stopped |= settings.on_stale == "stop"
        except (
            StartError,
            ArmError,
            ExperimentError,
            RecordError,
            BreakdownError,
            EndpointError,
            TraceError,
            OSError,
        ) as error:
            run.state, run.reasons = states.FAILED, ["\n".join(str(error).splitlines()[:_REASON_LINES])]
            self._stopped |= settings.on_failure == "stop"
        except BaseException as error:
            run.state = states.INTERRUPTED
            cancelled = isinstance(error, asyncio.CancelledError)
            run.reasons = ["stopped before its end" if cancelled else f"{type(error).__name__}: {error}"]
            with suppress(ExperimentError):
                self._ended(run)
            raise
        self._ended(run)

    def _ended(self, run: RunState) -> None:
        run.finished_unix_s = time.time()
        self._remember(run)
        self._write()
        self._observer.ended(run, left_s(self._state, self._jobs))

    async def _attempt(self, run: RunState) -> None:
        slot = Slot(order=run.order, arm=run.arm, repeat=run.repeat, seed=run.seed)
        settings, folder = self._experiment.settings, self._directory / run.path
        arm = settings.arms[run.arm]
        now = await asyncio.to_thread(software, self._inputs.fleets.values())
        record = ArmRecord(
            arm=run.arm,
            repeat=run.repeat,
            seed=run.seed,
            noise_seed=noise_seed(settings, slot),
            order=run.order,
            attempt=run.attempts,
            backend=settings.backend.kind,
            policy={
                **arm.policy.model_dump(mode="json"),
                "resolved": parameters(arm.policy.make()),
            },
            offload={
                **arm.offload.model_dump(mode="json"),
                "resolved": parameters(arm.offload.make()),
            },
            admission={
                **arm.admission.model_dump(mode="json"),
                "resolved": parameters(arm.admission.make()),
            },
            instances=0,
            started_unix_s=run.started_unix_s or time.time(),
            load_before=await asyncio.to_thread(host_load),
            environment_changes=[] if self._before is None else differences(self._before, now),
            engines=engines_of(now, [self._inputs.fleets[run.arm]] if self._live else []),
            git_commit=None if now.git is None else now.git.commit,
            git_dirty=None if now.git is None else now.git.dirty,
        )
        callbacks = Callbacks(
            phase=lambda phase: self._observer.phase(run, phase),
            record=lambda found: self._observer.recorded(run, found),
        )
        if self._trace is not None:
            measured = await measure_live(self._experiment, slot, self._trace, folder, self._known, callbacks)
        else:
            measured = await measure_simulated(self._experiment, slot, self._inputs, folder, callbacks)
        self._refuse_stale(run)
        run.requests, run.ok = len(measured.run.records), sum(one.ok for one in measured.run.records)
        run.warnings = self._warnings(record, measured)
        record.instances, record.kv_capacity_tokens = measured.instances, measured.kv_capacity_tokens
        record.fleet, record.command = measured.fleet, measured.command
        record.warnings, record.finished_unix_s = run.warnings, time.time()
        await asyncio.to_thread(states.write_json, folder / ARM_FILE, record)
        run.files = await asyncio.to_thread(_marks, folder)

    def _refuse_stale(self, run: RunState) -> None:
        """Check that no engine of this run has served an earlier one."""
        proof = read_proof(self._directory / run.path)
        problems = ["there is no proof that its engines were fresh"] if proof is None else self._known.problems(proof)
        if problems:
            raise StaleEngineError(f"the fleet is not fresh: {'; '.join(problems)}")

    def _remember(self, run: RunState) -> None:
        proof = read_proof(self._directory / run.path)
        if proof is not None:
            self._known.add(run.name, proof)

    def _warnings(self, record: ArmRecord, measured: Measured) -> list[str]:
        found = list(measured.warnings)
        found += failed_requests(measured.run.records)
        if self._live and record.load_before is not None and record.load_before.warning:
            found.append(record.load_before.warning)
        return [*found, *(f"the environment changed: {change}" for change in record.environment_changes)]

    async def _clear(self, run: RunState) -> None:
        """Move the files of an earlier attempt away; its processes must have ended."""
        folder = self._directory / run.path
        if folder.exists():
            await _until_gone(folder)
            aside = self._directory / CUT_FOLDER / run.arm / f"{run.repeat}-{run.attempts - 1}"
            await asyncio.to_thread(_move, folder, aside)
        await asyncio.to_thread(folder.mkdir, parents=True)

    def _write(self) -> None:
        try:
            states.write_experiment(self._directory, self._state)
        except OSError as error:
            raise ExperimentError(f"{error.filename}: cannot be written ({error.strerror})") from error


def failed_requests(records: Sequence[RequestRecord]) -> list[str]:
    """Warning of a run with failed requests, with the reason of most of them; nothing if all succeeded."""
    reasons = failures(records)
    if not reasons:
        return []
    reason, count = next(iter(reasons.items()))
    which = "" if len(reasons) == 1 else f", {count} of them"
    return [f"{sum(reasons.values())} of {len(records)} requests failed{which}: {reason}"]


def _marks(folder: Path) -> dict[str, states.FileMark]:
    return {name: states.mark(folder / name) for name in KEPT_FILES if (folder / name).is_file()}


def _move(folder: Path, aside: Path) -> None:
    if aside.exists():
        shutil.rmtree(aside)
    aside.parent.mkdir(parents=True, exist_ok=True)
    folder.rename(aside)


async def _until_gone(folder: Path) -> None:
    """Wait until the guards have ended the processes of a killed runner.

    Raises:
        ExperimentError: some still run.
    """
    try:
        state = read_state(folder)
    except StateError:
        return
    deadline = asyncio.get_running_loop().time() + _LEFT_BEHIND_S
    while asyncio.get_running_loop().time() < deadline:
        if not state.running and not marked(state.marks):
            return
        await asyncio.sleep(_POLL_S)
    raise ExperimentError(
        f"processes of an interrupted run are still running; stop them first: warmroute down --run-dir {folder}"
    )
