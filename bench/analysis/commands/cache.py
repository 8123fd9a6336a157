"""``warmroute analyse cache``: loss of a trace's reuse to placement and eviction."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.analysis.caching.placement import WORDS, Placement
from bench.analysis.output import (
    Figures,
    Json,
    Limit,
    Markdown,
    Sheet,
    TracePath,
    TraceReading,
    folder,
    load_trace,
    show,
    stop,
)
from replayer.traces.load_options import AllowDeltas, BlockTokens, Sessions, SessionsOption, TimeUnit, Unit

if TYPE_CHECKING:
    from bench.analysis.caching.study import CachePoint, CacheStudy, PoolSize
    from replayer.traces.ideal import Ideal

POLICIES = ("infinite", "lru", "lfu", "session_protecting", "belady")
POOLS = "0.25x,1x,4x"


def _pools(text: str) -> tuple[list[PoolSize], list[float]]:
    """``64000,1x`` as (tokens of one instance, multiples of the hot set for all of them)."""
    from bench.analysis.caching.study import PoolSize

    tokens: list[PoolSize] = []
    multiples: list[float] = []
    for word in filter(None, (part.strip().replace("_", "") for part in text.split(","))):
        try:
            if word.endswith("x"):
                multiples.append(float(word[:-1]))
            else:
                tokens.append(PoolSize(tokens=int(word)))
        except ValueError:
            stop(f"--pools: {word!r} is neither tokens (415061) nor a multiple of the hot set (0.25x)")
    if any(not 0 < multiple < 1e6 for multiple in multiples) or not tokens + multiples:
        stop("--pools: give sizes above 0, such as 415061 or 0.25x,1x,4x")
    return tokens, multiples


def _choice(text: str, known: tuple[str, ...], option: str) -> list[str]:
    chosen = [word.strip() for word in text.split(",") if word.strip()]
    unknown = [word for word in chosen if word not in known]
    if unknown or not chosen:
        stop(f"{option}: unknown {', '.join(unknown) or 'nothing'}; known: {', '.join(known)}")
    return list(dict.fromkeys(chosen))


def cache(
    trace: TracePath,
    instances: Annotated[int, typer.Option(min=1, help="Number of caches that requests are placed on.")] = 8,
    pools: Annotated[
        str,
        typer.Option(
            help="KV pools, comma-separated: tokens of one instance (415061) or multiples of the hot set (0.25x)."
        ),
    ] = POOLS,
    placements: Annotated[
        str, typer.Option(help=f"Placement rules, comma-separated: {', '.join(Placement)}.")
    ] = ",".join(Placement),
    policies: Annotated[str, typer.Option(help=f"Cache policies, comma-separated: {', '.join(POLICIES)}.")] = ",".join(
        POLICIES
    ),
    as_stored: Annotated[
        bool,
        typer.Option(
            "--as-stored",
            help="Also give the ideal figures of the ids as stored, unchained, as published for public traces.",
        ),
    ] = False,
    limit: Limit = None,
    block_tokens: BlockTokens = None,
    time_unit: Unit = TimeUnit.AUTO,
    sessions: SessionsOption = Sessions.DERIVED,
    allow_deltas: AllowDeltas = False,
    figures: Figures = None,
    as_json: Json = False,
    as_markdown: Markdown = False,
) -> None:
    """Study of eviction and placement: APC by placement, pool and cache policy.

    The loss against the ideal is split into routing and eviction.

    Policies: infinite (no limit), lru, lfu (uses counted from the start), session_protecting (keeps what is likely to
    be used again soon, learned online from the gaps between turns; no knowledge of the future) and belady (knows the
    future: the bound for a pool of that size). `one cache` is all instances' pools in one. The hot set is the peak of
    the tokens that are between two of their uses; its multiples are for all instances together.

    Requests are taken one after the other: overlap, output tokens and partial blocks are left out.
    """
    from bench.analysis.caching.study import CachePolicy, study

    sizes, multiples = _pools(pools)
    rules = [Placement(name) for name in _choice(placements, tuple(Placement), "--placements")]
    kinds = [CachePolicy(name) for name in _choice(policies, POLICIES, "--policies")]
    reading = TraceReading(limit, block_tokens, time_unit, sessions, allow_deltas)
    loaded = load_trace(trace, reading.options())
    stored = load_trace(trace, reading.options(chain="keep")) if as_stored else None
    try:
        found = study(
            loaded,
            instances=instances,
            pools=sizes,
            pool_hot_sets=multiples,
            placements=rules,
            policies=kinds,
            as_stored=stored,
        )
    except ValueError as error:
        stop(f"--pools: {error}")
    if figures is not None:
        _draw(found, folder(figures))
    show(found, _sheets(found), as_json=as_json, as_markdown=as_markdown)


def _sheets(found: CacheStudy) -> list[Sheet]:
    hot = found.hot_set
    head = (
        f"{found.trace}: {found.requests:,} requests, {found.sessions:,} sessions, "
        f"{found.prompt_tokens / 1e6:,.1f} M prompt tokens"
    )
    facts = [("ids chained as an engine chains them", found.ideal)]
    if found.ideal_as_stored is not None:
        facts.append(("ids as stored (bisection)", found.ideal_as_stored))
    rows = [_ideal_row(name, figures) for name, figures in facts]
    n = found.instances
    sheets = [
        Sheet(
            f"Unlimited caches. {head}",
            ("APC", "one cache", f"round robin, {n}", f"sticky, {n}", "hits within the session"),
            rows,
            notes=[
                f"Hot set (blocks between two of their uses): peak {hot.peak_tokens:,} tokens, mean "
                f"{hot.mean_tokens:,.0f}; all distinct full blocks: {hot.distinct_tokens:,}.",
                *(f"note: {note}" for note in found.notes),
            ],
        )
    ]
    for placement in dict.fromkeys(point.placement for point in found.points):
        chosen = [point for point in found.points if point.placement == placement]
        words = "all pools as one" if placement == "one_cache" else WORDS[Placement(placement)]
        sheets.append(
            Sheet(
                f"{placement} ({words})",
                ("policy", "pool/instance", "of hot set", "APC", "routing loss", "eviction loss", "of bound"),
                [_row(point, chosen) for point in chosen],
            )
        )
    key = (
        "Losses in points of APC: routing = one unlimited cache less unlimited caches under this placement; eviction = "
        "those less this pool. `of bound`: APC over belady's. infinite and belady are bounds, not policies."
    )
    return [*sheets[:-1], replace(sheets[-1], notes=[key])]


def _ideal_row(name: str, figures: Ideal) -> list[str]:
    shares = (figures.shared_apc, figures.round_robin_apc, figures.sticky_apc, figures.intra_session_share)
    return [name, *(f"{share:.3f}" for share in shares)]


def _row(point: CachePoint, others: list[CachePoint]) -> list[str]:
    bound = [other.apc for other in others if other.policy == "belady" and other.pool_tokens == point.pool_tokens]
    return [
        point.policy.value,
        "unlimited" if point.pool_tokens is None else f"{point.pool_tokens:,}",
        "–" if point.pool_hot_sets is None else f"{point.pool_hot_sets:g}x",
        f"{point.apc:.3f}",
        f"{100 * point.routing_loss:.1f}",
        f"{100 * point.eviction_loss:.1f}",
        f"{point.apc / bound[0]:.0%}" if bound and bound[0] else "–",
    ]


def _draw(found: CacheStudy, to: Path) -> None:
    from bench.analysis.figures import Line, lines

    for placement in dict.fromkeys(point.placement for point in found.points):
        chosen = [point for point in found.points if point.placement == placement]
        sized = [(point.pool_tokens, point) for point in chosen if point.pool_tokens is not None]
        sized.sort(key=lambda pair: pair[0])
        curves = [
            Line(
                policy,
                [tokens for tokens, point in sized if point.policy == policy],
                [point.apc for _, point in sized if point.policy == policy],
            )
            for policy in dict.fromkeys(point.policy.value for _, point in sized)
        ]
        level = next(point.apc for point in chosen if point.policy == "infinite")
        lines(
            to / f"cache_{placement}.svg",
            curves,
            x="KV pool of one instance [tokens]",
            y="APC",
            title=placement,
            log_x=True,
            levels={"unlimited": level},
        )
