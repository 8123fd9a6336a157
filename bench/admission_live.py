"""Admission rules on real engines: the same trace with each rule, caches reset in between, rules rotated over repeats.

``python -m bench.admission_live run TRACE --config PROXY.yaml --arm never_hold --arm working_set --output DIR`` needs
engines that run already (vLLM with VLLM_SERVER_DEV_MODE=1, for POST /reset_prefix_cache). Every arm has a proxy of its
own; an arm whose files exist is not run again. ``python -m bench.admission_live table DIR`` prints the comparison of
the kept records, without engines. `bench/gpu/admission_ab.sh` starts eight vLLM instances on two GPUs and runs both.
"""

from __future__ import annotations

import asyncio
import gzip
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import httpx
import msgspec
import numpy as np
import typer
import yaml

from replayer.compare.statistics.bootstrap import FloatArray
from replayer.records.runs import RequestRecord, read_run
from replayer.replay.plan import PlanOptions
from replayer.replay.replay import ReplayOptions, replay_trace
from replayer.traces.loading import load_trace
from replayer.traces.trace import TraceError
from sim.offline.setup import parsed_params

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, rich_markup_mode=None)

ARM_FILE = "arm.json"
RUN_FILE = "run.jsonl"
RESAMPLES = 2000
_READY_S = 60.0
_RESET_S = 60.0
_STOP_S = 30.0
_SAMPLE_S = 1.0
_COUNTERS = {
    "hits": "vllm:prefix_cache_hits_total",
    "queries": "vllm:prefix_cache_queries_total",
    "preemptions": "vllm:num_preemptions_total",
}
_GAUGES = {
    "held": "warmroute_held_requests",
    "recomputation": "warmroute_recomputation_ratio",
    "active_tokens": 'warmroute_working_set_tokens{state="active"}',
    "kept_tokens": 'warmroute_working_set_tokens{state="kept"}',
}


class Arm(msgspec.Struct, frozen=True):
    """A rule with its parameters, as given: ``NAME`` or ``NAME,KEY=VALUE,...``."""

    label: str
    rule: str
    params: dict[str, Any]

    @classmethod
    def parse(cls, text: str) -> Arm:
        """Raises ValueError for a parameter that is not KEY=VALUE."""
        rule, *params = text.split(",")
        return cls("-".join([rule, *(each.partition("=")[2] for each in params)]), rule, parsed_params(params))


class ArmNote(msgspec.Struct, kw_only=True):
    """What was observed beside the records of one arm."""

    label: str
    repeat: int
    trace: str
    started_unix_s: float
    wall_s: float
    counters: dict[str, int]
    """Increase of the engines' counters over the arm, summed over engines."""
    timeline: list[dict[str, float]]
    """Every second: values of the proxy's gauges, and the engines' hits and queries so far."""


def order_of(arms: Sequence[Arm], repeats: int) -> Iterator[tuple[int, Arm]]:
    """(repeat, arm): each repeat starts with another arm."""
    for repeat in range(repeats):
        for turn in range(len(arms)):
            yield repeat, arms[(repeat + turn) % len(arms)]


@app.command()
def run(
    trace: Annotated[Path, typer.Argument(help="Trace of any known format.")],
    config: Annotated[Path, typer.Option(help="Settings of the proxy, with the engines as its instances.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the arms.")],
    arm: Annotated[list[str] | None, typer.Option(help="RULE or RULE,KEY=VALUE. Repeatable.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Times that every arm is run.")] = 3,
    first_repeat: Annotated[int, typer.Option(min=0, help="Number of the first repeat, to continue.")] = 0,
    arrival_speed: Annotated[float, typer.Option(help="Sessions arrive this many times faster.")] = 1.0,
    idle_gap_cap_s: Annotated[float, typer.Option(min=0, help="Longest think time, seconds.")] = 10.0,
    timeout_s: Annotated[float, typer.Option(min=1, help="Timeout of one request in seconds.")] = 600.0,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many requests.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the tokens that hash ids stand for.")] = 0,
    until_s: Annotated[
        float | None, typer.Option(help="Start no arm after this many seconds; run again to continue.")
    ] = None,
) -> None:
    """Run every arm that is missing. Exit status 1 if one failed or was not started."""
    try:
        arms = [Arm.parse(each) for each in arm or ["never_hold", "working_set"]]
        loaded = load_trace(trace)
        settings = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (TraceError, ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    engines = [each["url"] for each in settings["instances"]]
    began_s, missing = time.monotonic(), []
    for repeat, each in order_of(arms, repeats):
        folder = output / f"{each.label}-r{repeat + first_repeat}"
        if (folder / ARM_FILE).exists():
            continue
        if until_s is not None and time.monotonic() - began_s > until_s:
            missing.append(folder.name)
            continue
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RUN_FILE).unlink(missing_ok=True)
        own = {**settings, "admission": {**settings.get("admission", {}), "name": each.rule, "params": each.params}}
        (folder / "proxy.yaml").write_text(yaml.safe_dump(own), encoding="utf-8")
        options = ReplayOptions(
            endpoint=f"http://127.0.0.1:{settings['port']}",
            label=each.label,
            plan=PlanOptions(time_scale=arrival_speed, idle_gap_cap_s=idle_gap_cap_s, request_limit=limit),
            timeout_s=timeout_s,
            seed=seed,
        )
        try:
            asyncio.run(_reset(engines))
            with _proxy(folder, options.endpoint):
                note = asyncio.run(_replayed(loaded, folder, options, engines, each.label, repeat + first_repeat))
        except (httpx.HTTPError, TimeoutError, OSError) as error:
            typer.echo(f"error: {folder.name}: {type(error).__name__}: {error}", err=True)
            missing.append(folder.name)
            continue
        records = read_run(folder / RUN_FILE).records
        with gzip.GzipFile(folder / f"{RUN_FILE}.gz", "wb", mtime=0) as packed:
            packed.write((folder / RUN_FILE).read_bytes())
        (folder / RUN_FILE).unlink()
        (folder / ARM_FILE).write_bytes(msgspec.json.encode(note))
        hit = note.counters["hits"] / max(1, note.counters["queries"])
        e2e = np.mean([record.e2e_scheduled_s or timeout_s for record in records])
        typer.echo(
            f"{time.strftime('%H:%M:%S')} {folder.name}: {sum(record.ok for record in records)}/{len(records)} ok, "
            f"{note.wall_s:.0f} s, mean E2E {e2e:.2f} s, hit rate {hit:.3f}"
        )
    if missing:
        typer.echo(f"not run: {', '.join(missing)}")
    raise typer.Exit(1 if missing else 0)


@contextmanager
def _proxy(folder: Path, endpoint: str) -> Iterator[None]:
    """A proxy with the arm's settings, until the end of the block."""
    with (folder / "proxy.log").open("wb") as log:
        command = [sys.executable, "-m", "warmroute", "serve", "--config", str(folder / "proxy.yaml")]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline_s = time.monotonic() + _READY_S
            while not _ready(endpoint):
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise TimeoutError(f"the proxy did not become ready: {folder / 'proxy.log'}")
                time.sleep(0.2)
            yield
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ready(endpoint: str) -> bool:
    try:
        return httpx.get(f"{endpoint}/ready", timeout=5.0).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


async def _reset(engines: Sequence[str]) -> None:
    """Empty every engine's prefix cache, as soon as it has no request any more."""
    async with httpx.AsyncClient(timeout=_RESET_S) as client:
        for engine in engines:
            (await client.post(f"{engine}/reset_prefix_cache")).raise_for_status()


async def _replayed(
    trace: Any, folder: Path, options: ReplayOptions, engines: Sequence[str], label: str, repeat: int
) -> ArmNote:
    timeline: list[dict[str, float]] = []
    started_s, started_unix_s = time.monotonic(), time.time()
    async with httpx.AsyncClient(timeout=10.0) as client:
        before = await _counters(client, engines)
        sampler = asyncio.create_task(_sample(client, options.endpoint, engines, before, started_s, timeline))
        try:
            await replay_trace(trace, folder / RUN_FILE, options)
        finally:
            sampler.cancel()
            await asyncio.gather(sampler, return_exceptions=True)
        after = await _counters(client, engines)
    return ArmNote(
        label=label,
        repeat=repeat,
        trace=trace.name,
        started_unix_s=started_unix_s,
        wall_s=round(time.monotonic() - started_s, 2),
        counters={name: int(after[name] - before[name]) for name in after},
        timeline=timeline,
    )


async def _sample(
    client: httpx.AsyncClient,
    endpoint: str,
    engines: Sequence[str],
    before: dict[str, float],
    started_s: float,
    timeline: list[dict[str, float]],
) -> None:
    while True:
        try:
            text = (await client.get(f"{endpoint}/metrics")).text
            row = {name: _sum(text, metric) for name, metric in _GAUGES.items()}
            now = await _counters(client, engines)
        except httpx.HTTPError:
            row, now = {}, {}  # a sample is missing; the counters of the whole arm are read apart
        if now:
            row |= {"hits": now["hits"] - before["hits"], "queries": now["queries"] - before["queries"]}
            timeline.append({"s": round(time.monotonic() - started_s, 1), **row})
        await asyncio.sleep(_SAMPLE_S)


async def _counters(client: httpx.AsyncClient, engines: Sequence[str]) -> dict[str, float]:
    pages = await asyncio.gather(*(client.get(f"{engine}/metrics") for engine in engines))
    return {name: sum(_sum(page.text, metric) for page in pages) for name, metric in _COUNTERS.items()}


def _sum(page: str, metric: str) -> float:
    """Sum over the samples of a metric; with labels given, of those that have just these."""
    pattern = "^" + re.escape(metric) + (r"(?:\{[^}]*\})?" if "{" not in metric else "") + r" (\S+)$"
    return sum(float(value) for value in re.findall(pattern, page, re.MULTILINE))


class _Figures(msgspec.Struct):
    e2e: dict[str, list[float]]
    """By session: E2E of its turns from when they were due, seconds."""
    ttft: list[float]
    completion: dict[str, float]
    makespan_s: float
    failed: int


def _figures(records: Sequence[RequestRecord]) -> _Figures:
    e2e: dict[str, list[float]] = {}
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    ttft = []
    for each in records:
        if each.e2e_scheduled_s is None:
            continue
        e2e.setdefault(each.session_id, []).append(each.e2e_scheduled_s)
        first[each.session_id] = min(first.get(each.session_id, np.inf), each.scheduled_s)
        last[each.session_id] = max(last.get(each.session_id, 0.0), each.scheduled_s + each.e2e_scheduled_s)
        if each.ttft_scheduled_s is not None:
            ttft.append(each.ttft_scheduled_s)
    return _Figures(
        e2e,
        ttft,
        {name: last[name] - first[name] for name in first},
        max(last.values()) - min(first.values()),
        sum(not each.ok for each in records),
    )


@app.command()
def table(
    folder: Annotated[Path, typer.Argument(help="Folder of arms.")],
    base: Annotated[str, typer.Option(help="The arm that others are compared with.")] = "never_hold",
) -> None:
    """Print the comparison as Markdown: means over repeats, paired bootstrap intervals over sessions."""
    arms: dict[str, list[tuple[ArmNote, _Figures]]] = {}
    for path in sorted(folder.glob(f"*/{ARM_FILE}")):
        note = msgspec.json.decode(path.read_bytes(), type=ArmNote)
        arms.setdefault(note.label, []).append((note, _figures(read_run(path.parent / f"{RUN_FILE}.gz").records)))
    if base not in arms:
        typer.echo(f"error: no arm {base} in {folder}; found: {', '.join(arms) or 'none'}", err=True)
        raise typer.Exit(2)
    typer.echo(
        "| rule | runs | failed | mean E2E s | p50, p90 | mean TTFT s | session completion s: mean, p90 | makespan s "
        "| hit rate | E2E against base | completion against base |"
    )
    typer.echo("| --- | ---: | ---: | --- | --- | --- | --- | --- | --- | --- | --- |")
    for label in [base, *sorted(set(arms) - {base})]:
        runs = arms[label]
        e2e = [np.concatenate([np.array(turns) for turns in figures.e2e.values()]) for _, figures in runs]
        every = np.concatenate(e2e)
        completion = np.concatenate([np.array(list(figures.completion.values())) for _, figures in runs])
        hits = [note.counters["hits"] / max(1, note.counters["queries"]) for note, _ in runs]
        against = "– | –"
        if label != base:
            against = (
                f"{_against(_by_session(runs), _by_session(arms[base]))} "
                f"| {_against(_completions(runs), _completions(arms[base]))}"
            )
        typer.echo(
            f"| {label} | {len(runs)} | {sum(figures.failed for _, figures in runs)} "
            f"| {_listed([float(each.mean()) for each in e2e])} "
            f"| {np.quantile(every, 0.5):.2f}, {np.quantile(every, 0.9):.2f} "
            f"| {_listed([float(np.mean(figures.ttft)) for _, figures in runs])} "
            f"| {completion.mean():.1f}, {np.quantile(completion, 0.9):.1f} "
            f"| {_listed([figures.makespan_s for _, figures in runs], 0)} | {_listed(hits)} | {against} |"
        )


def _listed(values: Sequence[float], digits: int = 2) -> str:
    return f"{np.mean(values):.{digits}f} ({', '.join(f'{value:.{digits}f}' for value in values)})"


def _by_session(runs: Sequence[tuple[ArmNote, _Figures]]) -> dict[str, float]:
    """Mean over the repeats of the sum of a session's E2E, seconds."""
    sums: dict[str, list[float]] = {}
    for _, figures in runs:
        for name, turns in figures.e2e.items():
            sums.setdefault(name, []).append(sum(turns))
    return {name: float(np.mean(values)) for name, values in sums.items()}


def _completions(runs: Sequence[tuple[ArmNote, _Figures]]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for _, figures in runs:
        for name, seconds in figures.completion.items():
            found.setdefault(name, []).append(seconds)
    return {name: float(np.mean(values)) for name, values in found.items()}


def _against(candidate: dict[str, float], base: dict[str, float]) -> str:
    """Ratio of means over the sessions of both, with its 95 % bootstrap interval."""
    names = sorted(set(candidate) & set(base))
    ours: FloatArray = np.array([candidate[name] for name in names])
    theirs: FloatArray = np.array([base[name] for name in names])
    draw = np.random.default_rng(0).integers(0, len(names), size=(RESAMPLES, len(names)))
    low, high = np.quantile(ours[draw].sum(axis=1) / theirs[draw].sum(axis=1), (0.025, 0.975))
    return f"{ours.sum() / theirs.sum():.2f} ({low:.2f}–{high:.2f})"


if __name__ == "__main__":
    app()
