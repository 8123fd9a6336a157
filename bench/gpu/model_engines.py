"""Engines of several models before and after a run of ``two_models.sh``: caches proven empty, counters, kept figures.

``warm-up`` lets every engine compute a long prompt once. ``empty`` empties all prefix caches and proves it; ``begin``
empties them again once the proxy runs, so that it has seen it by their KV events; ``end`` waits until the engines are
idle and keeps what they and the proxy counted. ``table`` prints the kept runs. Used by ``bench/gpu/two_models.sh``.
"""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Annotated, Any, TypeVar

import httpx
import msgspec
import numpy as np
import typer

from bench.routers.engines import EngineSet, EngineSetError
from bench.routers.records import CacheProof, EngineCounters
from replayer.records.runs import RequestRecord, read_run
from warmroute_yaml import load_yaml

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, rich_markup_mode=None)

NOTE_FILE = "engines.json"
_EVENTS_S = 60.0
_POLL_S = 0.5
_ROWS = 10_000
"""Of the proxy's breakdown: as many as it keeps."""
_Result = TypeVar("_Result")

Settings = Annotated[Path, typer.Argument(help="Settings of a proxy, with the engines as its instances.")]
Note = Annotated[Path, typer.Argument(help="File that keeps the run's engines.")]
Endpoint = Annotated[str, typer.Argument(help="URL of the proxy.")]


class ModelEngine(msgspec.Struct, kw_only=True):
    """One engine in one run."""

    name: str
    url: str
    model: str
    version: str = ""
    pool_tokens: int = 0
    proof: CacheProof | None = None
    """None: it was started for this run."""
    before: EngineCounters = EngineCounters()
    during: EngineCounters = EngineCounters()
    """Increase of its counters in the run."""
    held: int = 0
    """Requests that the proxy held before it sent them here."""


@dataclass(frozen=True)
class Engines:
    """Engines of a proxy, by the model that they serve."""

    rows: list[ModelEngine]
    http: httpx.AsyncClient

    def parts(self) -> Iterator[tuple[str, list[ModelEngine], EngineSet]]:
        """(model, its engines, the same to ask)."""
        for model in sorted({row.model for row in self.rows}):
            rows = [row for row in self.rows if row.model == model]
            yield model, rows, EngineSet([row.url for row in rows], self.http)

    async def count(self, *, finished: bool) -> None:
        """Read all counters: those before a run, or their increase once it has finished."""
        for model, rows, engines in self.parts():
            if finished:
                await engines.until_idle(model)
            for row, counters in zip(rows, await engines.counters(), strict=True):
                if finished:
                    row.during = counters.since(row.before)
                else:
                    row.before = counters


async def found(settings: dict[str, Any], http: httpx.AsyncClient) -> Engines:
    """The engines that the settings name, and what each serves. Raises EngineSetError."""
    rows = []
    for each in settings["instances"]:
        served = await EngineSet([each["url"]], http).served()
        rows.append(
            ModelEngine(
                name=each["name"],
                url=each["url"],
                model=served.name,
                version=served.versions[0],
                pool_tokens=served.pool_tokens[0],
            )
        )
    return Engines(rows, http)


def _settings(config: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = load_yaml(config.read_text(encoding="utf-8"))
    return loaded


def _kept(path: Path, http: httpx.AsyncClient) -> Engines:
    return Engines(msgspec.json.decode(path.read_bytes(), type=list[ModelEngine]), http)


def _keep(path: Path, engines: Engines) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(engines.rows)) + b"\n")


def _run(work: Callable[[httpx.AsyncClient], Coroutine[Any, Any, _Result]]) -> _Result:
    async def with_client() -> _Result:
        async with httpx.AsyncClient(trust_env=False) as http:
            return await work(http)

    try:
        return asyncio.run(with_client())
    except (EngineSetError, httpx.HTTPError, OSError, msgspec.MsgspecError) as error:
        typer.echo(f"error: {error or type(error).__name__}", err=True)
        raise typer.Exit(1) from error


@app.command("warm-up")
def warm_up(
    config: Settings, longest: Annotated[int, typer.Option(min=1, help="Tokens of the longest prompt.")]
) -> None:
    """Let every engine compute short and long prompts once."""

    async def work(http: httpx.AsyncClient) -> None:
        parts = (await found(_settings(config), http)).parts()
        await asyncio.gather(*(engines.warm_up(model, longest) for model, _, engines in parts))

    _run(work)


@app.command()
def empty(config: Settings, note: Note) -> None:
    """Empty every prefix cache, and prove it: a probe that was cached before hits nothing afterwards."""

    async def work(http: httpx.AsyncClient) -> None:
        engines = await found(_settings(config), http)
        for model, rows, each in engines.parts():
            for row, proof in zip(rows, await each.emptied(model), strict=True):
                row.proof = proof
        _keep(note, engines)

    _run(work)


@app.command()
def begin(config: Settings, note: Note, endpoint: Endpoint) -> None:
    """Read the counters before a run; of engines in ``note`` empty the caches once more until the proxy has seen it."""

    async def work(http: httpx.AsyncClient) -> None:
        engines = _kept(note, http) if note.exists() else await found(_settings(config), http)
        deadline_s = time.monotonic() + _EVENTS_S
        while note.exists():
            for model, _, each in engines.parts():
                await each.clear(model)
            await asyncio.sleep(_POLL_S)
            late = await _unseen(http, endpoint)
            if not late:
                break
            if time.monotonic() > deadline_s:
                raise EngineSetError(f"KV events are not trusted after {_EVENTS_S:g} s: {', '.join(late)}")
        await engines.count(finished=False)
        _keep(note, engines)

    _run(work)


async def _unseen(http: httpx.AsyncClient, endpoint: str) -> list[str]:
    """Instances whose KV events the proxy cannot use yet."""
    rows = (await http.get(f"{endpoint}/instances")).raise_for_status().json()["instances"]
    return [row["name"] for row in rows if row.get("kv_events") and not row["kv_events"]["trusted"]]


@app.command()
def end(note: Note, output: Annotated[Path, typer.Argument(help="File to write.")], endpoint: Endpoint) -> None:
    """Write the increase of the engines' counters, and how many requests were held, once the engines are idle."""

    async def work(http: httpx.AsyncClient) -> None:
        engines = _kept(note, http)
        await engines.count(finished=True)
        answer = await http.get(f"{endpoint}/breakdown", params={"limit": _ROWS}, timeout=60.0)
        rows = answer.raise_for_status().json()["rows"]
        for engine in engines.rows:
            engine.held = sum(row["instance"] == engine.name and row["held_s"] > 0 for row in rows)
        _keep(output, engines)

    _run(work)


@app.command()
def table(
    folder: Annotated[Path, typer.Argument(help="Folder of runs: ARM-REPEAT/engines.json and MODEL.jsonl beside it.")],
    arms: Annotated[list[str], typer.Argument(help="Arms to show, in this order.")],
) -> None:
    """Print the kept runs as Markdown, a row for each arm and model."""
    typer.echo(
        "| model | arm | runs | ok | mean E2E s, each run | TTFT p90 s, each run | longest TTFT s "
        "| all answered after s | hit rate by answers | by engines' counters | held |"
    )
    typer.echo("| --- | --- | ---: | ---: | --- | --- | ---: | --- | --- | --- | --- |")
    for model in ("first", "second"):
        for arm in arms:
            runs = [path.parent for path in sorted(folder.glob(f"{arm}-*/{NOTE_FILE}"))]
            if not runs:
                typer.echo(f"error: no finished run of {arm} in {folder}", err=True)
                raise typer.Exit(2)
            typer.echo(f"| {model} | `{arm}` | {' | '.join(_cells(model, runs))} |")


def _cells(model: str, runs: Sequence[Path]) -> Iterator[str]:
    records = [_records(run / f"{model}.jsonl") for run in runs]
    notes = [msgspec.json.decode((run / NOTE_FILE).read_bytes(), type=list[ModelEngine]) for run in runs]
    engines = [[row for row in note if row.model == model] for note in notes]
    ok = [[each for each in run if each.ok] for run in records]
    first_tokens = [[each.ttft_s for each in run if each.ttft_s is not None] for run in ok]
    counters = [[row.during for row in rows] for rows in engines]
    yield str(len(runs))
    yield f"{sum(map(len, ok))}/{sum(map(len, records))}"
    yield _each([fmean(each.e2e_s for each in run if each.e2e_s is not None) for run in ok], 2)
    yield _each([float(np.quantile(seconds, 0.9)) for seconds in first_tokens], 1)
    yield f"{max(max(seconds) for seconds in first_tokens):.1f}"
    yield _each([max(each.finished_s or 0.0 for each in run) for run in ok], 0)
    yield _each([_ratio((each.cached_tokens, each.prompt_tokens) for each in run) for run in ok], 2)
    yield _each([_ratio(_counted(each) for each in rows) for rows in counters], 2)
    yield ", ".join(str(sum(row.held for row in rows)) for rows in engines)


def _counted(counters: EngineCounters) -> tuple[float, float]:
    """Tokens that were not computed, and all; of those looked up where an engine does not count the former."""
    if counters.cached_tokens is None:
        return counters.hit_tokens, counters.lookup_tokens
    return counters.cached_tokens, counters.prompt_tokens


def _ratio(pairs: Iterator[tuple[float | None, float | None]]) -> float:
    counted = [(cached or 0.0, prompt or 0.0) for cached, prompt in pairs]
    return sum(cached for cached, _ in counted) / max(1.0, sum(prompt for _, prompt in counted))


def _each(values: Sequence[float], digits: int) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in values)


def _records(path: Path) -> list[RequestRecord]:
    if path.exists():
        return read_run(path).records
    with TemporaryDirectory() as folder:
        unpacked = Path(folder) / path.name
        unpacked.write_bytes(gzip.decompress(path.with_name(f"{path.name}.gz").read_bytes()))
        return read_run(unpacked).records


if __name__ == "__main__":
    app()
