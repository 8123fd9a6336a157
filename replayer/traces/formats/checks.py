"""Checks for common errors of traces: units of time, block size, tail rule, chained ids, turns, deltas."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Annotated

import msgspec
import numpy as np

from replayer.traces.trace import TailRule, TraceError, TraceRequest

BLOCK_SIZES = (16, 32, 64, 128, 256, 512, 1024)
UNITS_S = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
Number = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
"""A field for a time. Decoders that are not strict take the texts "nan" and "inf" for numbers; this refuses them."""
MIN_RATE, MAX_RATE = 1 / 1800, 5000.0
"""Plausible requests per second; the busiest public traces stay below 1,000."""
MIN_REQUESTS_FOR_RATE = 10
FIRST_DATE_S, LAST_DATE_S = 1e8, 1e10
"""Dates in seconds since 1970, from 1973 to 2286: in milliseconds a date of today is 1,000 times later than that."""
MIN_FOLLOW_UPS = 20
MIN_SHARING = 0.05
CHAIN_BASE = 1 << 48
"""First new id for re-chained blocks."""
MOST_S = 3.2e9
"""A century: later requests are wrong, and a clock that reaches 1e16 s does not advance by seconds any more."""
NO_TURN = -(1 << 31)
"""Turn of a request that the file does not number, until `TurnNumbers` does."""
SLOTS_PER_ID = 16
"""Ids that are far apart, as in a trace made of copies, are kept in a dictionary: 100 bytes an id, a slot has 8."""


def check_unit(times_s: Sequence[float], unit: str, where: str) -> None:
    """Refuse a unit of time that gives an implausible arrival rate, or dates centuries from now.

    Args:
        times_s: first arrivals, converted with ``unit``.
        unit: "s", "ms" or "us".
        where: file name for the message.

    Raises:
        TraceError: names the plausible units.
    """
    first_s, last_s = min(times_s, default=0.0), max(times_s, default=0.0)
    _check_dates(first_s, unit, where)
    if _some_are_dates(times_s):
        return  # no unit is to blame: `check_clock` refuses them
    span_s = last_s - first_s
    if len(times_s) < MIN_REQUESTS_FOR_RATE or span_s <= 0:
        return
    rate = (len(times_s) - 1) / span_s
    if MIN_RATE <= rate <= MAX_RATE:
        return
    others = [
        name for name, scale in UNITS_S.items() if MIN_RATE <= rate * UNITS_S[unit] / scale <= MAX_RATE and name != unit
    ]
    advice = "use " + " or ".join(f"--time-unit {name}" for name in others) if others else "correct the timestamps"
    raise TraceError(
        f"{where}: read as {unit}, the first {len(times_s)} requests arrive at {rate:.3g} per second, which is "
        f"implausible; {advice} (or use --time-unit {unit} to insist)"
    )


def _some_are_dates(times_s: Sequence[float]) -> bool:
    """True where dates stand beside times that are none, further apart than those of either kind.

    Milliseconds from 0 on, read as seconds, reach numbers as large, but spread evenly.
    """
    dates = [each for each in times_s if FIRST_DATE_S <= each <= LAST_DATE_S]
    others = [each for each in times_s if each < FIRST_DATE_S]
    if not dates or not others:
        return False
    return min(dates) - max(others) > max(max(dates) - min(dates), max(others) - min(others))


def _check_dates(time_s: float, unit: str, where: str) -> None:
    # A busy trace whose dates are milliseconds has a plausible rate in seconds too, a thousandth of its own.
    if time_s <= LAST_DATE_S:
        return
    others = [name for name, scale in UNITS_S.items() if FIRST_DATE_S <= time_s / UNITS_S[unit] * scale <= LAST_DATE_S]
    advice = f"use --time-unit {others[0]}" if others else "correct the timestamps"
    raise TraceError(
        f"{where}: read as {unit}, the requests arrive at {time_s:.3g} s or later, centuries from now if that is a "
        f"date; {advice} (or use --time-unit {unit} to insist)"
    )


def check_clock(first: TraceRequest, other: TraceRequest, where: str) -> None:
    """Refuse a trace of dates in which some time is none, since the others would come decades after it.

    Args:
        first: the earliest request, its time as in the file.
        other: a later one.
        where: file name for the message.

    Raises:
        TraceError: names both times.
    """
    if first.timestamp_s < FIRST_DATE_S <= other.timestamp_s <= LAST_DATE_S:
        raise TraceError(
            f"{where}: request {first.chat_id} has the time {first.timestamp_s:.15g} s and request {other.chat_id} "
            f"{other.timestamp_s:.15g} s, which is a date; correct the one that is wrong, or drop its line"
        )


def check_span(request: TraceRequest, where: str) -> None:
    """Refuse a request that is due a century or more after the trace's start. Raises TraceError."""
    if request.timestamp_s > MOST_S:
        raise TraceError(
            f"{where}: request {request.chat_id} is due {request.timestamp_s:.3g} s after the trace's start; correct "
            "its timestamp, or give --time-unit"
        )


def detect_blocks(requests: Sequence[TraceRequest], where: str) -> tuple[int, TailRule]:
    """Block size and tail rule that explain the number of ids of (nearly) all requests.

    Raises:
        TraceError: nothing fits.
    """
    scores: Counter[tuple[int, TailRule]] = Counter()
    for request in requests:
        length, ids = request.input_length, len(request.hash_ids)
        for size in BLOCK_SIZES:
            scores[size, "ceil"] += ids == -(-length // size)
            scores[size, "floor"] += ids == length // size
    (size, tail), hits = max(scores.items(), key=lambda item: (item[1], item[0][1] == "ceil"))
    if hits < 0.9 * len(requests):
        example = requests[0]
        raise TraceError(
            f"{where}: no block size of {', '.join(map(str, BLOCK_SIZES))} explains the hash_ids (first request: "
            f"{len(example.hash_ids)} ids for {example.input_length} tokens); give --block-tokens, or check that "
            "input_length counts the whole prompt"
        )
    return size, tail


def detect_tail(requests: Sequence[TraceRequest], block_tokens: int) -> TailRule:
    """The tail rule that fits more requests at a given block size."""
    ceil = sum(len(r.hash_ids) == -(-r.input_length // block_tokens) for r in requests)
    floor = sum(len(r.hash_ids) == r.input_length // block_tokens for r in requests)
    return "ceil" if ceil >= floor else "floor"


def check_id_count(request: TraceRequest, block_tokens: int, tail: TailRule, where: str) -> bool:
    """Check the number of ids against the prompt length; one id too many, from rounded estimates, is cut.

    Returns:
        True when the request was repaired.

    Raises:
        TraceError: the numbers disagree by more.
    """
    length, ids = request.input_length, len(request.hash_ids)
    allowed = -(-length // block_tokens)
    expected = allowed if tail == "ceil" else length // block_tokens
    if ids == expected:
        return False
    if ids == allowed + 1 and length % block_tokens == 0:
        request.hash_ids = request.hash_ids[:allowed]
        return True
    raise TraceError(
        f"{where}: request {request.chat_id} has {ids} hash_ids for {length} tokens; blocks of {block_tokens} with "
        f"tail rule {tail!r} need {expected}. Check --block-tokens, or drop the line"
    )


class Rechainer:
    """Chains ids: an id always follows the same id.

    Where an id follows another parent than when first seen (ids made from a block's content alone), an engine's prefix
    cache, which hashes a block with all before it, would not share it. Such blocks get new ids, the same for the same
    parent.
    """

    def __init__(self) -> None:
        self._parent = np.full(1 << 16, -2, dtype=np.int64)
        self._sparse: dict[int, int] = {}
        self._alternative: dict[tuple[int, int], int] = {}
        self._read = 0
        self.requests = 0
        """Requests that held at least one unchained id."""
        self.ids = 0
        """New ids made."""

    def apply(self, request: TraceRequest) -> None:
        """Check one request's ids and replace them where needed."""
        if not request.hash_ids:
            return
        ids = np.asarray(request.hash_ids, dtype=np.int64)
        self._read += len(ids)
        if not self._in_table(int(ids.max())):
            self._walk(request, 0)
            return
        parents = np.concatenate((np.array([-1]), ids[:-1]))
        known = self._parent[ids]
        wrong = np.flatnonzero((known != -2) & (known != parents))
        if len(wrong) == 0:
            self._parent[ids] = parents
            # An id twice in one prompt: the table keeps its last parent, so one of the two must disagree.
            wrong = np.flatnonzero(self._parent[ids] != parents)
            if len(wrong) == 0:
                return
            self._parent[ids[known == -2]] = -2
            self._walk(request, 0)
            return
        first = int(wrong[0])
        fresh = known[:first] == -2
        if len(set(ids[:first].tolist())) != first:
            self._walk(request, 0)
            return
        self._parent[ids[:first][fresh]] = parents[:first][fresh]
        self._walk(request, first)

    def _in_table(self, top: int) -> bool:
        """True if ids up to ``top`` have slots; makes the table larger unless most of its slots would stay empty."""
        if top < len(self._parent):
            return True
        size = max(top + 1, 2 * len(self._parent))
        if top >= 1 << 27 or size > SLOTS_PER_ID * self._read:
            return False
        grown = np.full(size, -2, dtype=np.int64)
        grown[: len(self._parent)] = self._parent
        for block in [block for block in self._sparse if block < size]:
            grown[block] = self._sparse.pop(block)
        self._parent = grown
        return True

    def _parent_of(self, block: int) -> int:
        return int(self._parent[block]) if block < len(self._parent) else self._sparse.get(block, -2)

    def _walk(self, request: TraceRequest, start: int) -> None:
        chained = list(request.hash_ids[:start])
        changed = False
        parent = chained[-1] if chained else -1
        for original in request.hash_ids[start:]:
            block = original
            known = self._parent_of(block)
            if known == -2:
                if block < len(self._parent):
                    self._parent[block] = parent
                else:
                    self._sparse[block] = parent
            elif known != parent:
                block = self._alternative.setdefault((parent, original), CHAIN_BASE + len(self._alternative))
                changed = True
            chained.append(block)
            parent = block
        if changed:
            self.requests += 1
            request.hash_ids = array("q", chained)
        self.ids = len(self._alternative)


def parents_first(requests: list[TraceRequest]) -> None:
    """Put parents before their children among requests of one instant, in place; others keep their order.

    Requests must be sorted by time. A file in another order has a child above its parent as likely as below it.
    """
    place = {request.chat_id: position for position, request in enumerate(requests)}
    late = {
        request.timestamp_s
        for position, request in enumerate(requests)
        if (parent := place.get(request.parent_chat_id, -1)) > position
        and requests[parent].timestamp_s == request.timestamp_s
    }
    if not late:
        return
    start = 0
    for time_s, group in groupby(requests.copy(), key=lambda request: request.timestamp_s):
        members = list(group)
        if time_s in late:
            requests[start : start + len(members)] = _by_generation(members)
        start += len(members)


def _by_generation(requests: list[TraceRequest]) -> list[TraceRequest]:
    """Requests whose parent is not among them, then their children, and so on; members of a cycle come last."""
    children: dict[int, list[TraceRequest]] = {}
    ids = {request.chat_id for request in requests}
    ordered: list[TraceRequest] = []
    for request in requests:
        if request.parent_chat_id in ids and request.parent_chat_id != request.chat_id:
            children.setdefault(request.parent_chat_id, []).append(request)
        else:
            ordered.append(request)
    for request in ordered:  # grows while it is read
        ordered += children.pop(request.chat_id, [])
    return ordered + [request for rest in children.values() for request in rest]


class TurnNumbers:
    """Turn numbers that rise in each session: a request's own, or one more than the last where it has none or does not
    rise.

    Args:
        remembered: sessions that are known, those of the last requests; None for all.
    """

    def __init__(self, remembered: int | None = None) -> None:
        self._last: dict[str, int] = {}
        self._remembered = remembered

    def apply(self, request: TraceRequest) -> bool:
        """Number the next request in time, in place; True if that changed a number that it had."""
        last = self._last.pop(request.session_id, None)  # put back as the newest
        given = request.turn != NO_TURN
        changed = last is not None and request.turn <= last
        if last is not None and changed:
            request.turn = last + 1
        elif not given:
            request.turn = 1
        self._last[request.session_id] = request.turn
        if self._remembered is not None and len(self._last) > self._remembered:
            del self._last[next(iter(self._last))]
        return changed and given


def order_turns(requests: Sequence[TraceRequest], where: str) -> int:
    """Check that no request comes before its parent, and number turns upwards in each session.

    Requests must be sorted by time. A turn number that does not rise becomes the last one plus 1.

    Returns:
        Number of sessions with a number that was changed.

    Raises:
        TraceError: a request is older than its parent.
    """
    place = {request.chat_id: position for position, request in enumerate(requests)}
    numbers = TurnNumbers()
    broken: set[str] = set()
    for position, request in enumerate(requests):
        if place.get(request.parent_chat_id, -1) > position:
            raise TraceError(
                f"{where}: request {request.chat_id} of session {request.session_id} comes before its parent "
                f"{request.parent_chat_id} in time; correct the timestamps"
            )
        if numbers.apply(request):
            broken.add(request.session_id)
    return len(broken)


def looks_like_deltas(requests: Sequence[TraceRequest]) -> tuple[int, int]:
    """(follow-up turns, those that begin with their predecessor's first block).

    Where hardly any follow-up begins as its predecessor did, prompts hold only what is new in each turn.
    """
    first_block: dict[str, int] = {}
    follow_ups = sharing = 0
    for request in requests:
        if not request.hash_ids or request.lengths_only:
            continue
        before = first_block.get(request.session_id)
        if before is not None:
            follow_ups += 1
            sharing += before == request.hash_ids[0]
        first_block[request.session_id] = request.hash_ids[0]
    return follow_ups, sharing
