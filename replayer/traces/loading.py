"""Loading of traces: detect the format, read, check for known errors, sort by time.

`load` returns a checked `Trace`. For files beyond memory, `iter_trace` and `stream` give the requests one by one,
without sorting and without repair across requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec

from replayer.records.counted import counted
from replayer.traces.chaining import Chainer
from replayer.traces.formats import Format, agent_text, bailian, detect_format, lengths, mooncake, weka
from replayer.traces.formats.checks import (
    MIN_FOLLOW_UPS,
    MIN_SHARING,
    NO_TURN,
    UNITS_S,
    Rechainer,
    TurnNumbers,
    check_clock,
    check_id_count,
    check_span,
    check_unit,
    detect_blocks,
    detect_tail,
    looks_like_deltas,
    order_turns,
    parents_first,
)
from replayer.traces.formats.source import file_sha256
from replayer.traces.trace import TailRule, Trace, TraceError, TraceRequest

PROBE_REQUESTS = 256
"""Requests from which block size, tail rule and unit of time are detected."""
EPOCH_S = 1e8
"""Times from here on are dates, not offsets: they are rebased to the first request."""
REMEMBERED_REQUESTS = 100_000
"""Last requests a stream remembers, to find parents and duplicate chat ids, and sessions, to number their turns."""
_DEFAULT_UNIT = {Format.BAILIAN: "s", Format.MOONCAKE: "ms", Format.AGENT_TEXT: "us", Format.WEKA: "s"}
_DEFAULT_UNIT |= {Format.AZURE: "s", Format.BURSTGPT: "s"}
_MADE_BLOCKS = {Format.AGENT_TEXT, Format.AZURE, Format.BURSTGPT}
"""Formats without block ids, which get blocks of 64 tokens unless another size is given."""
_DERIVED_SESSIONS = {Format.MOONCAKE}
"""Formats without sessions of which `load` derives them, from the whole trace."""


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a trace that users may give; the defaults detect them."""

    limit: int | None = None
    """Read at most this many requests."""
    block_tokens: int | None = None
    time_unit: Literal["auto", "s", "ms", "us"] = "auto"
    """"auto": the format's own, refused when the arrival rate or dates are implausible. Others are not checked."""
    sessions: Literal["derived", "single"] = "derived"
    """For traces without sessions: derive them by prefix chaining, or one for each request."""
    chain: Literal["repair", "keep", "error"] = "repair"
    """Treatment of ids that follow different parents: renumber, keep or refuse."""
    idle_gap_cap_s: float = 60.0
    """kv-cache-tester files: longest idle gap."""
    spacing_s: float = 10.0
    """kv-cache-tester files: time between the starts of conversations."""
    allow_deltas: bool = False
    """Accept a trace whose turns do not repeat their history."""

    def given(self) -> dict[str, Any]:
        """The options that are not the defaults, by name."""
        return {
            name: value for name, value in msgspec.structs.asdict(self).items() if value != getattr(_DEFAULTS, name)
        }


_DEFAULTS = LoadOptions()


class _Opened(msgspec.Struct):
    requests: Iterator[TraceRequest]
    block_tokens: int
    tail: TailRule
    format: Format
    notes: list[str]


class TraceStream(msgspec.Struct):
    """A trace that is read while it is used. ``notes`` grows meanwhile."""

    requests: Iterator[TraceRequest]
    """In time order; can be iterated once."""
    block_tokens: int
    tail: TailRule
    name: str
    sha256: str
    """Of the file's bytes as stored."""
    notes: list[str]
    read_with: dict[str, Any]
    """As of a `Trace`."""
    cut_session: str | None = None
    """Session of which only the first turns are among the requests."""


def _open(path: Path, options: LoadOptions, remembered: int | None = None, *, whole: bool = False) -> _Opened:
    """Open a trace; ``whole``: it will be sorted, so Bailian-style requests are not linked to their parents yet."""
    kind = detect_format(path)
    notes: list[str] = []
    unit = _DEFAULT_UNIT[kind] if options.time_unit == "auto" else options.time_unit
    match kind:
        case Format.BAILIAN if whole:
            stream = bailian.read_unlinked(path, UNITS_S[unit])
        case Format.BAILIAN:
            stream = bailian.read(path, UNITS_S[unit], notes, remembered=remembered)
        case Format.MOONCAKE:
            stream = mooncake.read(path, UNITS_S[unit], notes)
        case Format.AGENT_TEXT:
            stream = agent_text.read(path, UNITS_S[unit], options.block_tokens or 64, notes)
        case Format.AZURE:
            stream = lengths.read(path, lengths.AZURE, 1.0, options.block_tokens or 64, notes)
        case Format.BURSTGPT:
            stream = lengths.read(path, lengths.BURSTGPT, UNITS_S[unit], options.block_tokens or 64, notes)
        case Format.WEKA:
            placed = weka.WekaOptions(idle_gap_cap_s=options.idle_gap_cap_s, spacing_s=options.spacing_s)
            stream = weka.read(path, placed, notes)
    if options.limit is not None:
        stream = islice(stream, options.limit)
    probe = list(islice(stream, PROBE_REQUESTS))
    if not probe:
        raise TraceError(f"{path}: no requests; check the file{'' if options.limit is None else ', or --limit'}")
    if options.time_unit == "auto" and kind not in (Format.WEKA, Format.AZURE):
        check_unit([request.timestamp_s for request in probe], unit, str(path))
    tail: TailRule
    if kind in _MADE_BLOCKS:
        block_tokens, tail = options.block_tokens or 64, "ceil"
    elif options.block_tokens is not None:
        block_tokens, tail = options.block_tokens, detect_tail(probe, options.block_tokens)
    else:
        block_tokens, tail = detect_blocks(probe, str(path))
    return _Opened(chain(probe, stream), block_tokens, tail, kind, notes)


def iter_trace(path: str | Path, options: LoadOptions | None = None) -> Iterator[TraceRequest]:
    """Requests in file order with memory bounded by one line (plus a few bytes of session table per request).

    Times are those of the file in seconds, sessions are not derived, ids are not re-chained.

    Raises:
        TraceError: names file, line and remedy.
    """
    path = Path(path)
    opened = _open(path, options or LoadOptions())
    for request in opened.requests:
        check_id_count(request, opened.block_tokens, opened.tail, str(path))
        if request.turn == NO_TURN:
            request.turn = 1
        yield request


def stream(path: str | Path, options: LoadOptions | None = None) -> TraceStream:
    """Requests of a Bailian-style or Mooncake file in time order, with bounded memory.

    Times and turn numbers are those that `load` gives. Sessions are the file's; a Mooncake file has none, and the
    options must say ``sessions="single"`` for one per request, as deriving them takes the whole trace. Block ids are
    replaced by chained keys (`replayer.traces.chaining`), unless they are to be kept: prompts share what they share
    after `load`'s repair, but the stream does not report what was wrong with the ids.

    Raises:
        TraceError: names file, line and remedy; while reading, also for a file that is not in time order.
    """
    path = Path(path)
    options = options or LoadOptions()
    if options.chain == "error":
        raise TraceError(f"{path}: a stream cannot be checked for unchained ids; load the file whole")
    opened = _open_stream(path, options)
    if opened.format in _DERIVED_SESSIONS and options.sessions == "derived":
        raise TraceError(
            f"{path}: the trace has no sessions, and a stream cannot derive them: give --sessions single for one per "
            "request, or leave out --stream"
        )
    return TraceStream(
        requests=_in_order(opened, str(path), Chainer() if options.chain == "repair" else None),
        block_tokens=opened.block_tokens,
        tail=opened.tail,
        name=path.name,
        sha256=file_sha256(path),
        notes=opened.notes,
        read_with=options.given(),
    )


def stream_sessions(path: str | Path, options: LoadOptions | None = None) -> Iterator[str]:
    """Session of every request of `stream`, in its order and with its errors."""
    opened = _open_stream(Path(path), options or LoadOptions())
    return (request.session_id for request in _in_order(opened, str(path), None))


def _open_stream(path: Path, options: LoadOptions) -> _Opened:
    opened = _open(path, options, REMEMBERED_REQUESTS)
    if opened.format in {Format.AGENT_TEXT, Format.WEKA}:
        raise TraceError(
            f"{path}: {opened.format} traces cannot be streamed, as they are not in time order or need their "
            "whole text: load them whole, or convert them with `warmroute trace sample` first"
        )
    return opened


def _in_order(opened: _Opened, where: str, chainer: Chainer | None) -> Iterator[TraceRequest]:
    first: TraceRequest | None = None
    first_s = 0.0
    last_s = -math.inf
    numbers = TurnNumbers(REMEMBERED_REQUESTS)
    for request in opened.requests:
        check_id_count(request, opened.block_tokens, opened.tail, where)
        if first is None:
            first = request
            first_s = request.timestamp_s if request.timestamp_s >= EPOCH_S else 0.0
        if first_s:
            request.timestamp_s = round(request.timestamp_s - first_s, 6)
        else:
            check_clock(first, request, where)
        if request.timestamp_s < last_s:
            raise TraceError(
                f"{where}: request {request.chat_id} comes {last_s - request.timestamp_s:g} s before the one above it; "
                "a stream must be in time order: load the file whole, or sort it"
            )
        last_s = request.timestamp_s
        check_span(request, where)
        numbers.apply(request)
        if chainer is not None:
            request.hash_ids = chainer.keys(request.hash_ids)
        yield request


def load(path: str | Path, options: LoadOptions | None = None) -> Trace:
    """Load, check and sort a trace.

    Raises:
        TraceError: names file, line or request, error and remedy.
    """
    path = Path(path)
    options = options or LoadOptions()
    opened = _open(path, options, whole=True)
    where = str(path)
    requests: list[TraceRequest] = []
    trimmed = 0
    for request in opened.requests:
        trimmed += check_id_count(request, opened.block_tokens, opened.tail, where)
        requests.append(request)
    notes = opened.notes
    if trimmed:
        notes.append(f"{counted(trimmed, 'request')} had one id too many; the last was dropped")
    if any(later.timestamp_s < earlier.timestamp_s for earlier, later in pairwise(requests)):
        # Stable: requests of one instant keep the file's order.
        requests.sort(key=lambda request: request.timestamp_s)
        if opened.format is not Format.WEKA:
            notes.append("the file was not in time order; sorted")
    check_clock(requests[0], requests[-1], where)
    first_s = requests[0].timestamp_s
    if opened.format is Format.AGENT_TEXT or first_s >= EPOCH_S:
        for request in requests:
            request.timestamp_s = round(request.timestamp_s - first_s, 6)
    check_span(requests[-1], where)
    if opened.format is Format.BAILIAN:
        # Only now: above, the file's order would decide which parents are known.
        parents_first(requests)
        notes += bailian.link(requests, where)
    _chain(requests, options, where, notes)
    if opened.format in _DERIVED_SESSIONS and options.sessions == "derived":
        found = mooncake.derive_sessions(requests, opened.block_tokens)
        notes.append(f"the trace has no sessions; {found} derived by prefix chaining (--sessions single: none)")
    renumbered = order_turns(requests, where)
    if renumbered and opened.format is not Format.AGENT_TEXT:
        notes.append(
            f"{counted(renumbered, 'session')} with branches or repeated turn numbers; renumbered in time order"
        )
    _refuse_deltas(requests, options, opened.format, where, notes)
    return Trace(
        requests=requests,
        block_tokens=opened.block_tokens,
        tail=opened.tail,
        name=path.name,
        sha256=file_sha256(path),
        notes=notes,
        read_with=options.given(),
    )


def load_trace(path: str | Path, *, limit: int | None = None, block_tokens: int | None = None) -> Trace:
    """Load a trace of any known format with the default options.

    Args:
        path: file or folder.
        limit: read at most this many requests.
        block_tokens: tokens per block id; detected when None.

    Raises:
        TraceError: unknown format, or a line that breaks a rule of the format.
    """
    return load(path, LoadOptions(limit=limit, block_tokens=block_tokens))


def load_replayed(path: str | Path, recorded: Mapping[str, Any]) -> Trace:
    """Load the trace of a run as the run did: with other options it has other sessions, turns and ids.

    Args:
        path: file or folder.
        recorded: ``options`` of the run's header. Runs of earlier versions have no ``trace_options`` there.

    Raises:
        TraceError: as of `load`, or options that no loader has.
    """
    given = {"block_tokens": recorded.get("block_tokens"), **(recorded.get("trace_options") or {})}
    try:
        options = msgspec.convert(given, LoadOptions)
    except msgspec.ValidationError as error:
        raise TraceError(f"{path}: the run's options for its trace cannot be used ({error})") from None
    return load(path, options)


def _chain(requests: list[TraceRequest], options: LoadOptions, where: str, notes: list[str]) -> None:
    if options.chain == "keep":
        return
    rechainer = Rechainer()
    for request in requests:
        before = rechainer.requests
        rechainer.apply(request)
        if options.chain == "error" and rechainer.requests != before:
            raise TraceError(
                f"{where}: request {request.chat_id} has a hash id that follows another id than when first seen; "
                "ids must be chained (use --chain repair to renumber such blocks)"
            )
    if rechainer.requests:
        notes.append(
            f"{counted(rechainer.requests, 'request')} held ids that follow different parents; "
            f"renumbered as {rechainer.ids} new ids (prefix caches hash a block with all before it)"
        )


def _refuse_deltas(
    requests: list[TraceRequest], options: LoadOptions, kind: Format, where: str, notes: list[str]
) -> None:
    follow_ups, sharing = looks_like_deltas(requests)
    if follow_ups < MIN_FOLLOW_UPS or sharing >= MIN_SHARING * follow_ups:
        return
    fact = f"only {sharing} of {follow_ups} follow-up turns begin as the turn before them: these look like deltas"
    if options.allow_deltas or kind is Format.AGENT_TEXT:
        notes.append(fact)
        return
    raise TraceError(
        f"{where}: {fact}, not cumulative prompts; give a trace whose prompts repeat the history "
        "(--allow-deltas replays them as they are)"
    )
