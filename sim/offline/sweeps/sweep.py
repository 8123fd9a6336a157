"""Parameter sweeps: every combination of some settings' values, simulated in parallel processes or on a Ray cluster."""

from __future__ import annotations

import importlib
import io
import itertools
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import zstandard

from policies.registry import PolicyParameterError, UnknownPolicyError
from policies.types import NoCandidateError, PolicyFailedError
from replayer.records.outputs import replacing
from replayer.records.version import installed_version
from replayer.traces.formats.source import file_sha256
from replayer.traces.trace import Trace, TraceError
from sim.offline.options import SimulationError
from sim.offline.running import loaded, run_setup
from sim.offline.setup import Setup, changed, parsed_value
from sim.offline.sweeps.journal import SweepJournal
from sim.worker_processes import worker_processes

SCHEMA = 1
"""Version of sweep.json."""
_EXPLAINED = (
    SimulationError,
    TraceError,
    UnknownPolicyError,
    PolicyParameterError,
    NoCandidateError,
    PolicyFailedError,
    OSError,
    MemoryError,
)
"""Errors whose message is enough; of others the place is recorded too."""
_BETWEEN_VALUES = re.compile(r",(?![^\[]*\])")
"""Commas outside brackets."""


class Point(NamedTuple):
    """One combination."""

    name: str
    """``policy=lmetric time_scale=2``, the label of its run."""
    file: str
    """Name of its run file."""
    values: dict[str, Any]
    setup: Setup


class PointResult(NamedTuple):
    """Result of a point: its figures and its run file's content (zstd), or its error."""

    figures: dict[str, Any]
    run: bytes = b""
    error: str | None = None


Execute = Callable[[Sequence[Point]], Iterator[tuple[Point, PointResult]]]
"""Runs all points and yields each result when it is done."""


def points_of(base: Setup, sweeps: Sequence[str]) -> list[Point]:
    """Every combination of ``KEY=V1,V2,...``; the last key changes fastest. A list is a value in brackets.

    A combination whose values only contradict each other is a point too; simulating it gives its error.

    Raises:
        SimulationError, UnknownPolicyError, PolicyParameterError: an unknown key, or a value that cannot be simulated
            in any combination; no point has been run then.
    """
    axes: dict[str, list[Any]] = {}
    for sweep in sweeps:
        key, found, listed = sweep.partition("=")
        if not found or not key or not listed:
            raise SimulationError(f"--sweep {sweep!r}: give KEY=VALUE1,VALUE2,...")
        if key in axes:
            raise SimulationError(f"--sweep {key}: given twice; put all values into one")
        axes[key] = [parsed_value(value, sweep) for value in _BETWEEN_VALUES.split(listed)]
    points: list[Point] = []
    refused: dict[str, Exception] = {}
    for combination in itertools.product(*axes.values()):
        values = dict(zip(axes, combination, strict=True))
        name = " ".join(f"{key}={_text(value)}" for key, value in values.items())
        setup = msgspec.structs.replace(changed(base, values), label=name)
        try:
            setup.check()
        except (SimulationError, UnknownPolicyError, PolicyParameterError) as error:
            refused[name] = error
        points.append(Point(name, f"{len(points):03d}-{_file_stem(name)}.jsonl", values, setup))
    names = [point.name for point in points]
    if len(set(names)) < len(names):
        raise SimulationError("--sweep: a value is given twice")
    _refuse_values(points, refused)
    return points


def _refuse_values(points: Sequence[Point], refused: Mapping[str, Exception]) -> None:
    """Raise the error of a value all of whose combinations are refused."""
    usable = {
        (key, _text(value)) for point in points if point.name not in refused for key, value in point.values.items()
    }
    for point in points:
        if any((key, _text(value)) not in usable for key, value in point.values.items()):
            raise refused[point.name]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _file_stem(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._=-]+", "_", name)[:100]


def simulate_point(setup: Setup, trace: Trace | None = None) -> PointResult:
    """Simulate one point, in any process or on any machine. An error is returned, so that other points continue.

    ``trace`` is the setup's trace, if it is already loaded.
    """
    run = io.BytesIO()
    try:
        ran = run_setup(setup, run, trace=trace)
    except Exception as error:  # noqa: BLE001 - a policy of a third party may raise any
        return PointResult({}, error=_described(error))
    figures: dict[str, Any] = dict(ran.outcome.figures())
    busy = [row.busy_s for row in ran.instances]
    figures["busy_share"] = sum(busy) / len(busy) / ran.end.finished_unix_s if ran.end.finished_unix_s else None
    figures["evictions"] = sum(row.evictions for row in ran.instances)
    figures["preemptions"] = sum(row.preemptions for row in ran.instances)
    return PointResult(figures, zstandard.ZstdCompressor(level=3).compress(run.getvalue()))


def _described(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, _EXPLAINED) or not frames:
        return text
    return f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno})"


def in_processes(jobs: int) -> Execute:
    """Run points in ``jobs`` processes of this machine."""

    def execute(points: Sequence[Point]) -> Iterator[tuple[Point, PointResult]]:
        if jobs == 1 or len(points) <= 1:
            for point in points:
                yield point, simulate_point(point.setup)
            return
        with worker_processes(min(jobs, len(points))) as executor:
            running = {executor.submit(simulate_point, point.setup): point for point in points}
            for future in as_completed(running):
                try:
                    result = future.result()
                except BrokenProcessPool:
                    result = PointResult({}, error="its process died; is there enough memory for this many --jobs?")
                except Exception as error:  # noqa: BLE001 - what a process cannot receive or send back
                    result = PointResult({}, error=_described(error))
                yield running[future], result

    return execute


def on_ray(base: Setup) -> Execute:
    """Run points on the Ray cluster that RAY_ADDRESS names, else on a temporary one on this machine.

    The trace goes to the nodes through Ray's object store, runs come back the same way: nodes need this package and
    no shared disk.

    Raises:
        SimulationError: Ray is not installed.
    """
    try:
        ray: Any = importlib.import_module("ray")
    except ModuleNotFoundError as error:
        raise SimulationError(
            "--ray needs Ray, which is not installed: pip install 'warmroute[ray]' here and on every node, "
            "or leave --ray out for processes of this machine (--jobs)"
        ) from error

    def execute(points: Sequence[Point]) -> Iterator[tuple[Point, PointResult]]:
        started = not ray.is_initialized()
        if started:
            ray.init(log_to_driver=False)
        try:
            trace = ray.put(loaded(base.trace, base.load_options()))
            task = ray.remote(_simulate_elsewhere)
            running = {task.remote(point.setup, trace): point for point in points}
            while running:
                done, _ = ray.wait(list(running))
                for reference in done:
                    point = running.pop(reference)
                    try:
                        result = PointResult(*ray.get(reference))
                    except ray.exceptions.RayError as error:
                        result = PointResult({}, error=f"{type(error).__name__}: {str(error).splitlines()[0]}")
                    yield point, result
        finally:
            if started:
                ray.shutdown()

    return execute


def _simulate_elsewhere(setup: Setup, trace: Trace) -> tuple[dict[str, Any], bytes, str | None]:
    """Simulate one point on another machine; the result is plain data, which any node can read."""
    return tuple(simulate_point(setup, trace))  # type: ignore[return-value]


def run_sweep(
    points: Sequence[Point],
    base: Setup,
    folder: Path,
    execute: Execute,
    on_done: Callable[[Point, PointResult], None],
    *,
    resume: bool = False,
) -> list[tuple[Point, PointResult]]:
    """Simulate all points into a new or empty folder: a run file for each, and ``sweep.json`` with all figures.

    The files do not depend on the executor or on the order in which points were run. With ``resume`` the folder may be
    that of a sweep that was stopped or killed: points that it has finished are kept.

    Raises:
        SimulationError: the folder is not empty, with ``resume`` has a sweep of something else, or a file has no room.
        OSError: the folder or its journal cannot be made.
    """
    journal = SweepJournal(folder, base, {point.name: point.setup for point in points}, resume=resume)
    results = {point.name: PointResult(journal.done[point.name]) for point in points if point.name in journal.done}
    for point, result in execute([point for point in points if point.name not in results]):
        if result.error is None:
            _write(folder / point.file, zstandard.ZstdDecompressor().decompress(result.run))
            with _naming(folder):
                journal.add(point.name, point.file, result.figures)
        results[point.name] = result._replace(run=b"")
        on_done(point, result)
    ordered = [(point, results[point.name]) for point in points]
    summary = msgspec.json.format(msgspec.json.encode(_summary(ordered, base)), indent=2) + b"\n"
    _write(folder / "sweep.json", summary)
    journal.close()
    return ordered


def _write(path: Path, content: bytes) -> None:
    with _naming(path), replacing(path) as file:
        file.write(content)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Raise SimulationError with path and remedy where the block cannot write."""
    try:
        yield
    except OSError as error:
        raise SimulationError(
            f"{path}: cannot be written ({error.strerror}); --resume continues the sweep once that is fixed"
        ) from error


def _summary(results: Iterable[tuple[Point, PointResult]], base: Setup) -> dict[str, Any]:
    trace = Path(base.trace)
    return {
        "schema": SCHEMA,
        "warmroute_version": installed_version(),
        "trace": trace.name,
        "trace_sha256": file_sha256(trace),
        "settings": {key: value for key, value in msgspec.to_builtins(base).items() if key != "trace"},
        "points": [
            {
                "name": point.name,
                "values": point.values,
                "run": None if result.error else point.file,
                "error": result.error,
                "figures": result.figures,
            }
            for point, result in results
        ],
    }
