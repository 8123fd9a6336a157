"""Checks of hand-offs over TCP: pieces that fit into Mooncake's queue."""

from __future__ import annotations

from collections.abc import Iterator

from launch.doctor.facts import Facts
from launch.doctor.findings import Result, check, ok, warning
from launch.doctor.versions import installed
from launch.fleet.pieces import queued_pieces, too_many_pieces


@check(
    "tcp-pieces",
    looks_at="layers and block size against MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER, engines with protocol tcp",
    why="a worn KV pool is handed over in one piece for each block and layer, of K and of V; Mooncake refuses a "
    "transfer with more of them than its queue takes, and D's request then hangs and keeps its KV",
    worst="warning",
)
def tcp_pieces(facts: Facts) -> Iterator[Result]:
    """The longest prompt can be handed over over TCP."""
    mooncake = installed(facts.engine_python.packages).mooncake
    using = [one for one in facts.engines() if one.protocol == "tcp" and one.pieces is not None]
    bad: dict[tuple[str, str], None] = {}
    for engine in using:
        assert engine.pieces is not None
        problem = too_many_pieces(engine.pieces, queued_pieces(engine.environment, mooncake))
        if problem is not None:
            bad[problem] = None
    for summary, fix in bad:
        yield warning(summary, fix)
    if using and not bad:
        most = max(one.pieces.most for one in using if one.pieces is not None)
        yield ok(f"the longest prompt has at most {most:,} pieces")
