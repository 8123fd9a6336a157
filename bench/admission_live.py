"""Admission rules on real engines: the same trace with each rule, caches reset in between, rules rotated over repeats.

``python -m bench.admission_live run TRACE --config PROXY.yaml --arm never_hold --arm working_set --output DIR`` needs
engines that run already (vLLM with VLLM_SERVER_DEV_MODE=1, for POST /reset_prefix_cache). Every arm has a proxy of its
own; an arm whose files exist is not run again. ``python -m bench.admission_live table DIR`` prints the comparison of
the kept records, without engines.
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

from bench.admission_records import ARM_FILE, RUN_FILE, NoArmError, RuleArmNote, lines_of
from bench.admission_shapes import AgentCut, short_sessions, write_rows
from replayer.records.runs import read_run
from replayer.replay.plan import PlanOptions
from replayer.replay.replay import ReplayOptions, replay_trace
from replayer.traces.loading import load_trace
from replayer.traces.trace import TraceError
from sim.offline.setup import parsed_params
from warmroute_yaml import load_yaml

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, rich_markup_mode=None)

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


class RuleArm(msgspec.Struct, frozen=True):
    """A rule with its parameters, as given: ``NAME`` or ``NAME,KEY=VALUE,...``."""

    label: str
    rule: str
    params: dict[str, Any]

    @classmethod
    def parse(cls, text: str) -> RuleArm:
        """Raises ValueError for a parameter that is not KEY=VALUE."""
        rule, *params = text.split(",")
        return cls("-".join([rule, *(each.partition("=")[2] for each in params)]), rule, parsed_params(params))

    def settings(self, base: dict[str, Any]) -> dict[str, Any]:
        """Settings of a proxy with this rule."""
        return {**base, "admission": {**base.get("admission", {}), "name": self.rule, "params": self.params}}


def order_of(arms: Sequence[RuleArm], repeats: int) -> Iterator[tuple[int, RuleArm]]:
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
        arms = [RuleArm.parse(each) for each in arm or ["never_hold", "working_set"]]
        loaded = load_trace(trace)
        settings = load_yaml(config.read_text(encoding="utf-8"))
    except (TraceError, ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    engines = [each["url"] for each in settings["instances"]]
    # A proxy would replay the events of all arms before its own, whose blocks are gone.
    for each in settings["instances"]:
        each.pop("events_replay_url", None)
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
        (folder / "proxy.yaml").write_text(yaml.safe_dump(each.settings(settings)), encoding="utf-8")
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
        e2e = np.mean([record.e2e_scheduled_s or timeout_s for record in records])
        typer.echo(
            f"{time.strftime('%H:%M:%S')} {folder.name}: {sum(record.ok for record in records)}/{len(records)} ok, "
            f"{note.wall_s:.0f} s, mean E2E {e2e:.2f} s"
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
) -> RuleArmNote:
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
    return RuleArmNote(
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


@app.command()
def cut(
    trace: Annotated[Path, typer.Argument(help="Trace with long sessions, such as kct_v6.")],
    output: Annotated[Path, typer.Argument(help="Trace to write.")],
    sessions: Annotated[int, typer.Option(min=1, help="Sessions, one beginning each second.")] = 30,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each.")] = 7,
    min_tokens: Annotated[int, typer.Option(help="Turns with shorter prompts are left out.")] = 30_000,
    max_tokens: Annotated[int, typer.Option(help="Turns with longer prompts are left out.")] = 120_000,
    think_s: Annotated[float, typer.Option(help="Longest think time, seconds.")] = 5.0,
    output_tokens: Annotated[int, typer.Option(help="Answers are cut to this many tokens.")] = 48,
    seed: Annotated[int, typer.Option(help="Seed of the choice.")] = 1,
) -> None:
    """Write a trace of short sessions with long contexts: runs of turns of a trace's sessions, sharing nothing."""
    try:
        whole = load_trace(trace)
    except TraceError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    rows, found = short_sessions(whole, AgentCut(sessions, turns, min_tokens, max_tokens, think_s, output_tokens, seed))
    write_rows(rows, output)
    typer.echo(f"{len(rows)} requests of {min(sessions, found)} sessions, {found} to choose from")


@app.command()
def table(
    folder: Annotated[Path, typer.Argument(help="Folder of arms.")],
    base: Annotated[str, typer.Option(help="The arm that others are compared with.")] = "never_hold",
) -> None:
    """Print the comparison as Markdown: means over repeats, paired bootstrap intervals over sessions."""
    try:
        for line in lines_of(folder, base):
            typer.echo(line)
    except NoArmError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error


if __name__ == "__main__":
    app()
