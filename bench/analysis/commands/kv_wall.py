"""``warmroute analyse kv-wall``: number of requests that fit, and the load at which static PD separation fails."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from bench.analysis.output import (
    AnalysisError,
    Figures,
    Gpu,
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
from bench.analysis.words import GIB, giga, integers, milliseconds
from replayer.traces.load_options import AllowDeltas, BlockTokens, Sessions, SessionsOption, TimeUnit, Unit

if TYPE_CHECKING:
    from pathlib import Path

    from bench.analysis.kv_wall import InstancePool, KvWall, Split, SplitFleet
    from replayer.traces.trace import Trace

HANDOFFS = ("pull", "arrival")


def kv_wall(
    trace: TracePath,
    model: Model = "qwen3-coder-30b-a3b",
    gpu: Gpu = "h20",
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of one instance.")] = 1,
    profile: Annotated[
        str, typer.Option(help="Hardware profile for times: a name in configs/hardware or a YAML file.")
    ] = "h20",
    utilisation: Annotated[float, typer.Option(help="Share of the GPU memory that the engine may use.")] = 0.9,
    overhead_gib: Annotated[
        float, typer.Option(min=0, help="Activations, CUDA graphs and context of one GPU, GiB.")
    ] = 2.0,
    pool_gib: Annotated[
        float | None,
        typer.Option(
            help="KV pool of one instance, GiB. Default: GPU memory less weights and overhead.",
            show_default=False,
        ),
    ] = None,
    weight_bits: Annotated[int, typer.Option(help="Bits of a weight, 16 or 8.")] = 16,
    kv_bits: Annotated[int, typer.Option(help="Bits of a value in the KV cache, 16 or 8.")] = 16,
    splits: Annotated[
        str, typer.Option(help="P+D splits of the fleet, comma-separated: 4+4 is four P and four D, 0+8 co-located.")
    ] = "0+8,2+6,4+4,6+2",
    request_tokens: Annotated[
        str, typer.Option(help="Further request sizes for the table of the pool, tokens, comma-separated.")
    ] = "",
    rate_per_s: Annotated[
        float | None,
        typer.Option(help="Requests per second for the whole fleet. Default: the trace's.", show_default=False),
    ] = None,
    arrival_speed: Annotated[float, typer.Option(help="Factor on the trace's rate; not used with --rate-per-s.")] = 1.0,
    handoff: Annotated[
        str,
        typer.Option(
            help="D holds blocks from: pull (after the P leg, as this proxy), or arrival (both legs at once)."
        ),
    ] = "pull",
    transport: Annotated[
        str | None, typer.Option(help="KV transport of the profile. Default: its default.", show_default=False)
    ] = None,
    prefix_hits: Annotated[
        bool,
        typer.Option(help="Reuse prefixes where the prefill runs: sessions stick, nothing is evicted."),
    ] = True,
    limit: Limit = None,
    block_tokens: BlockTokens = None,
    time_unit: Unit = TimeUnit.AUTO,
    sessions: SessionsOption = Sessions.DERIVED,
    allow_deltas: AllowDeltas = False,
    figures: Figures = None,
    as_json: Json = False,
    as_markdown: Markdown = False,
) -> None:
    """KV capacity of decode instances, and the load at which static PD runs out of it.

    Little's law: KV on D = rate x (prompt + output) x time held, with TPOT from the profile's decode step at the number
    of streams that results. P instances are queues; a split fails when prefills cannot keep up, when decodes cannot, or
    when the requests in flight need more than D's pool for 1 % of the time. `fails at` is in multiples of the rate.

    Arrivals are taken as Poisson and open-loop: a client that waits for answers offers less under overload.
    """
    from bench.analysis.kv_wall import Handoff, KvWall, SplitFleet, assess, fits, kv_pool
    from bench.analysis.sheets import load_gpu, load_model
    from sim.hardware import ProfileError, load_profile

    if weight_bits not in (8, 16) or kv_bits not in (8, 16):
        stop("--weight-bits and --kv-bits are 16 or 8")
    if not 0 < utilisation <= 1:
        stop("--utilisation is above 0 and at most 1")
    if any(value is not None and not value > 0 for value in (rate_per_s, arrival_speed, pool_gib)):
        stop("--rate-per-s, --arrival-speed and --pool-gib must be above 0")
    if handoff not in HANDOFFS:
        stop(f"--handoff: unknown {handoff}; known: {', '.join(HANDOFFS)}")
    chosen = _splits(splits)
    more = integers(request_tokens, "--request-tokens", least=1) if request_tokens else []
    loaded = load_trace(trace, TraceReading(limit, block_tokens, time_unit, sessions, allow_deltas).options())
    if rate_per_s is None and not loaded.duration_s:
        stop("the trace has no duration, so no rate; give --rate-per-s")
    per_s = rate_per_s if rate_per_s is not None else arrival_speed * len(loaded.requests) / loaded.duration_s
    try:
        shape, sheet, timing = load_model(model), load_gpu(gpu), load_profile(profile)
        name = timing.transport_name(transport)
        per_token = shape.kv_bytes_per_token(kv_bits / 8)
        pool = kv_pool(
            shape,
            sheet,
            weight_bytes=shape.parameters * weight_bits / 8,
            kv_bytes_per_token=per_token,
            gpus=gpus,
            utilisation=utilisation,
            overhead_bytes=overhead_gib * GIB,
            given_bytes=None if pool_gib is None else pool_gib * GIB,
        )
        fleet = SplitFleet(timing, pool, per_token, name, Handoff(handoff))
        found = KvWall(
            trace=loaded.name,
            model=shape.name,
            gpu=sheet.name,
            profile=timing.name,
            transport=name,
            handoff=fleet.handoff,
            rate_per_s=per_s,
            prefill_hits=prefix_hits,
            kv_bytes_per_token=per_token,
            pool=pool,
            profile_pool_bytes=timing.kv.pool_tokens * timing.kv.bytes_per_token,
            fits=fits(loaded, pool, per_token, more),
            splits=assess(loaded, fleet, chosen, per_s, prefix_hits),
        )
    except (AnalysisError, ProfileError) as error:
        stop(error)
    if figures is not None:
        _draw(found, loaded, fleet, folder(figures))
    show(found, _sheets(found), as_json=as_json, as_markdown=as_markdown)


def _splits(text: str) -> list[tuple[int, int]]:
    found = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(\d{1,5})\+(\d{1,5})", word, re.ASCII)
        if not match or int(match[2]) < 1:
            stop(f"--splits: {word!r} is not P+D with at least one D, such as 4+4 (0+8: co-located)")
        found.append((int(match[1]), int(match[2])))
    if not found:
        stop("--splits: give at least one, such as 4+4")
    return found


def _sheets(found: KvWall) -> list[Sheet]:
    hits = "prefixes reused on P" if found.prefill_hits else "every prompt computed whole"
    return [
        Sheet(
            f"KV pool of one instance: {found.model} on {found.gpu}", ("quantity", "GiB"), _pool_rows(found.pool, found)
        ),
        Sheet(
            f"Requests of {found.trace} that fit the pool",
            ("request", "tokens", "KV GiB", "fit"),
            [(row.size, f"{row.tokens:,.0f}", giga(row.kv_bytes), f"{row.requests:,.1f}") for row in found.fits],
        ),
        Sheet(
            f"Static PD at {found.rate_per_s:,.3f} requests/s ({found.profile} times, {found.transport}, D holds from "
            f"{found.handoff}, {hits})",
            (
                "P+D",
                "P busy",
                "P wait",
                "streams/D",
                "TPOT",
                "held",
                "KV/D mean GiB",
                "p99 GiB",
                "overflow",
                "verdict",
                "fails at",
                "by",
            ),
            [_split_row(row) for row in found.splits],
            notes=[
                "0+N is co-located. Overflow: share of time in which requests in flight need more than the pool; above "
                "1 % counts as full. `fails at`: multiples of the rate."
            ],
        ),
    ]


def _pool_rows(pool: InstancePool, found: KvWall) -> list[list[str]]:
    if pool.given:
        rows = [["pool, as set", giga(pool.pool_bytes)]]
    else:
        rows = [
            ["visible memory", giga(pool.visible_bytes)],
            [f"of which usable ({pool.utilisation:g})", giga(pool.visible_bytes * pool.utilisation)],
            ["less weights", giga(pool.weight_bytes)],
            ["less overhead", giga(pool.overhead_bytes)],
            ["pool", giga(pool.pool_bytes)],
        ]
    return [
        *rows,
        ["pool, tokens", f"{pool.pool_tokens:,}"],
        [f"pool by the {found.profile} profile", giga(found.profile_pool_bytes)],
    ]


def _split_row(row: Split) -> list[str]:
    return [
        f"{row.prefill}+{row.decode}",
        f"{row.prefill_busy:.0%}",
        "without end" if row.prefill_wait_s is None else milliseconds(row.prefill_wait_s),
        "–" if row.streams is None else f"{row.streams:,.1f}",
        "–" if row.tpot_s is None else milliseconds(row.tpot_s),
        "without end" if row.hold_s is None else milliseconds(row.hold_s),
        "–" if row.kv_mean_bytes is None else giga(row.kv_mean_bytes),
        "–" if row.kv_p99_bytes is None else giga(row.kv_p99_bytes),
        f"{row.overflow:.2%}",
        row.verdict.value,
        "–" if row.breaks_at is None else f"{row.breaks_at:,.3g}x",
        "–" if row.breaks_at is None else row.breaks_by.value,
    ]


def _draw(found: KvWall, trace: Trace, fleet: SplitFleet, to: Path) -> None:
    from bench.analysis.figures import Line, bars, lines
    from bench.analysis.kv_wall import over_rates

    name = f"{found.model}_{found.gpu}"
    bars(
        to / f"kv_fit_{name}.svg",
        {row.size: row.requests for row in found.fits if row.size != "asked for"},
        y="requests that fit one pool",
        title=f"{found.model} on {found.gpu}, {found.pool.pool_bytes / GIB:,.1f} GiB",
    )
    curves = []
    for split in found.splits:
        last = 1.2 * found.rate_per_s * (split.breaks_at or 1.0)
        rates = [last * step / 24 for step in range(1, 25)]
        states = over_rates(trace, fleet, (split.prefill, split.decode), rates, found.prefill_hits)
        held = [
            (rate, state.kv_p99_bytes / GIB) for rate, state in zip(rates, states, strict=True) if state.kv_p99_bytes
        ]
        curves.append(Line(f"{split.prefill}+{split.decode}", [rate for rate, _ in held], [gib for _, gib in held]))
    lines(
        to / f"kv_wall_{name}.svg",
        curves,
        x="requests per second, whole fleet",
        y="p99 of KV held on one D [GiB]",
        title=f"{found.trace}, {found.profile}, D holds from {found.handoff}",
        levels={"pool": found.pool.pool_bytes / GIB},
        marks={"given rate": found.rate_per_s},
    )
