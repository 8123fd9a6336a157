"""``warmroute analyse workload``: characteristics of a trace's traffic."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.analysis.output import (
    AnalysisError,
    Figures,
    Json,
    Limit,
    Markdown,
    Model,
    Sheet,
    TracePath,
    TraceReading,
    folder,
    load_trace,
    show,
    stop,
)
from bench.analysis.words import GIB
from replayer.traces.load_options import AllowDeltas, BlockTokens, Sessions, SessionsOption, TimeUnit, Unit

if TYPE_CHECKING:
    from bench.analysis.workload import QuantitySpread, RequestColumns, TraceAnatomy
    from policies.classes import ClassThresholds
    from replayer.traces.trace import TraceRequest

DEFAULT_REMEMBER = 8_000_000
_PROBE = 256


def workload(
    trace: TracePath,
    model: Model = "qwen3-coder-30b-a3b",
    kv_bits: Annotated[int, typer.Option(help="Bits of a value in the KV cache, 16 or 8.")] = 16,
    medium_from_tokens: Annotated[
        int, typer.Option(min=1, help="New tokens from which a request is MEDIUM; below it is WARM.")
    ] = 5_000,
    heavy_from_tokens: Annotated[int, typer.Option(min=2, help="New tokens from which a request is HEAVY.")] = 20_000,
    bin_s: Annotated[
        float | None,
        typer.Option(
            help="Bin of the arrival rate, seconds of the trace. Default: a 60th of the trace.", show_default=False
        ),
    ] = None,
    stream: Annotated[
        bool,
        typer.Option(
            "--stream",
            help="Read line by line, for traces beyond memory: in time order, ids and sessions as stored.",
        ),
    ] = False,
    remember_blocks: Annotated[
        int,
        typer.Option(min=1000, help="Most block ids kept in memory, about 100 bytes each; the oldest are dropped."),
    ] = DEFAULT_REMEMBER,
    limit: Limit = None,
    block_tokens: BlockTokens = None,
    time_unit: Unit = TimeUnit.AUTO,
    sessions: SessionsOption = Sessions.DERIVED,
    allow_deltas: AllowDeltas = False,
    figures: Figures = None,
    as_json: Json = False,
    as_markdown: Markdown = False,
) -> None:
    """Anatomy of a trace: classes, lengths, reuse, gaps, turns, arrivals, KV bytes.

    New tokens, classes and reuse are those of one unlimited cache for all requests, as a perfect router would see.
    With --stream nothing is sorted, no ids are repaired and no sessions are derived.
    """
    from bench.analysis.sheets import load_model
    from bench.analysis.workload import anatomy
    from policies.classes import ClassThresholds
    from replayer.traces.trace import TraceError

    if kv_bits not in (8, 16):
        stop("--kv-bits is 16 or 8")
    if stream and sessions is Sessions.SINGLE:
        stop("--sessions has no effect with --stream, which takes sessions as the file names them; leave it out")
    if bin_s is not None and not bin_s > 0:
        stop("--bin-s must be above 0")
    try:
        shape = load_model(model)
        bounds = ClassThresholds(medium_from_tokens, heavy_from_tokens)
        reading = TraceReading(limit, block_tokens, time_unit, sessions, allow_deltas)
        requests, tokens, name, notes = _open(trace, stream, reading)
        found, rows = anatomy(
            requests,
            tokens,
            name=name,
            model=shape.name,
            kv_bytes_per_token=shape.kv_bytes_per_token(kv_bits / 8),
            bin_s=bin_s,
            thresholds=bounds,
            remember_blocks=remember_blocks,
            notes=notes,
        )
    except (AnalysisError, TraceError, ValueError, OSError) as error:
        stop(error)
    if figures is not None:
        _draw(found, rows, bounds, folder(figures))
    show(found, _sheets(found), as_json=as_json, as_markdown=as_markdown)


def _open(path: Path, stream: bool, reading: TraceReading) -> tuple[Iterable[TraceRequest], int, str, list[str]]:
    """Requests, tokens of a block, name, notes of the loader."""
    if not stream:
        loaded = load_trace(path, reading.options())
        return loaded.requests, loaded.block_tokens, loaded.name, loaded.notes
    from replayer.traces.loading import iter_trace

    probe = reading._replace(limit=min(reading.limit or _PROBE, _PROBE))
    tokens = load_trace(path, probe.options()).block_tokens
    notes = ["streamed: ids as stored, sessions as named in the file"]
    return iter_trace(path, reading._replace(block_tokens=tokens).options()), tokens, path.name, notes


def _sheets(found: TraceAnatomy) -> list[Sheet]:
    reuse, arrivals = found.reuse, found.arrivals
    sessions = "sessions unknown" if found.sessions is None else f"{found.sessions:,} sessions"
    notes = [f"note: {note}" for note in found.notes]
    if reuse.forgotten_blocks:
        notes.append(
            f"note: {reuse.forgotten_blocks:,} block ids were forgotten to bound memory: reuse may be understated "
            "(--remember-blocks)"
        )
    lengths: list[tuple[str, QuantitySpread | None, float, str]] = [
        ("prompt tokens", found.prompt_tokens, 1, ",.0f"),
        ("output tokens", found.output_tokens, 1, ",.0f"),
        ("new tokens", found.new_tokens, 1, ",.0f"),
        ("turns of a session", found.turns, 1, ",.1f"),
        ("gap between turns, s", found.gap_s, 1, ",.1f"),
        ("gap between turns, requests", found.gap_requests, 1, ",.0f"),
        ("think time, s", found.think_time_s, 1, ",.1f"),
        (f"KV of a request, GiB ({found.model})", found.kv_bytes, 1 / GIB, ",.2f"),
    ]
    return [
        Sheet(
            f"{found.trace}: {found.requests:,} requests, {sessions}, {arrivals.duration_s:,.0f} s",
            ("quantity", "mean", "p50", "p90", "p99", "max"),
            [_spread(name, values, factor, form) for name, values, factor, form in lengths if values is not None],
            notes=notes,
        ),
        Sheet(
            "Classes by new tokens",
            ("class", "requests", "of requests", "of new tokens"),
            [
                (row.name, f"{row.requests:,}", f"{row.request_share:.1%}", f"{row.new_token_share:.1%}")
                for row in found.classes
            ],
        ),
        Sheet(
            "Reuse and load",
            ("what", "value"),
            [
                ("prompt tokens cached (APC, one cache, no eviction)", f"{reuse.cached_share:.1%}"),
                ("hits within the session", f"{reuse.intra_session_share_of_hits:.1%}"),
                ("hits across sessions", f"{reuse.cross_session_share_of_hits:.1%}"),
                ("prompt tokens cached by other sessions only", f"{reuse.cross_session_share_of_tokens:.1%}"),
                ("prompt tokens of all tokens", f"{found.prefill_share:.1%}"),
                ("new tokens of all computed tokens", f"{found.computed_prefill_share:.1%}"),
                ("arrivals, mean", f"{arrivals.mean_per_s:,.3f} /s"),
                (f"arrivals, busiest {arrivals.bin_s:,.0f} s", f"{arrivals.peak_per_s:,.3f} /s"),
                ("dispersion of arrivals (Poisson: 1)", f"{arrivals.dispersion:,.2f}"),
                ("requests of sub-agents", f"{found.subagent_requests:,}"),
            ],
        ),
    ]


def _spread(name: str, values: QuantitySpread, factor: float, form: str) -> list[str]:
    shown = (values.mean, values.p50, values.p90, values.p99, values.max)
    return [name, *(format(value * factor, form) for value in shown)]


def _draw(found: TraceAnatomy, rows: RequestColumns, bounds: ClassThresholds, to: Path) -> None:
    from bench.analysis.figures import Line, bars, distribution, lines

    new = [prompt - cached for prompt, cached in zip(rows.prompt_tokens, rows.cached_tokens, strict=True)]
    classes = {"MEDIUM": float(bounds.medium_tokens), "HEAVY": float(bounds.heavy_tokens)}
    lengths = {"prompt": rows.prompt_tokens, "new": new, "output": rows.output_tokens}
    distribution(to / "lengths.svg", lengths, x="tokens", marks=classes, title=found.trace)
    if rows.gap_s:
        distribution(to / "gaps_s.svg", {"gap": rows.gap_s}, x="seconds between a session's turns", title=found.trace)
        distribution(
            to / "gaps_requests.svg",
            {"gap": rows.gap_requests},
            x="requests between a session's turns",
            title=found.trace,
        )
    if rows.turns:
        distribution(to / "turns.svg", {"session": rows.turns}, x="turns of a session", title=found.trace)
    arrivals = found.arrivals
    starts = [index * arrivals.bin_s for index in range(len(arrivals.per_s))]
    lines(
        to / "arrivals.svg",
        [Line("arrivals", starts, arrivals.per_s)],
        x="seconds",
        y="requests per second",
        title=found.trace,
        step=True,
        levels={"mean": arrivals.mean_per_s},
    )
    reuse = found.reuse
    shares = {
        "own turns": reuse.cached_share - reuse.cross_session_share_of_tokens,
        "other sessions": reuse.cross_session_share_of_tokens,
        "new": 1 - reuse.cached_share,
    }
    bars(to / "reuse.svg", shares, y="share of prompt tokens", title=found.trace)
    kv = [
        (prompt + output) * found.kv_bytes_per_token / GIB
        for prompt, output in zip(rows.prompt_tokens, rows.output_tokens, strict=True)
    ]
    distribution(to / "kv.svg", {found.model: kv}, x="GiB of KV cache of a request", title=found.trace)
