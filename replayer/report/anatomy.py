"""Hit-rate anatomy: the prefix sharing that a run could have used, the part that it used, and the losses.

Every request looks up the leading full blocks of its prompt. In the order in which the run sent its requests, and at
the moment each was sent, the models below count how many of these tokens

* **ideal, infinite**: any earlier request of the fleet had computed (one cache for all that never forgets);
* **ideal, finite**: one LRU cache of the whole fleet's capacity would have held;
* **routed, infinite**: an earlier request on the *chosen* instance had computed (the placement as it was, no eviction);
* **best placed**: some instance still held, under LRU caches of the instances' own size and the placement as it was;
* **routed, finite**: the chosen instance still held, under the same caches;
* **actual**: the engine reported as cached.

The loss, ideal infinite minus actual, is the sum of three parts for every single request:

* **eviction** = ideal infinite - best placed: computed before, but no instance holds it any more;
* **routing** = best placed - routed finite: another instance held it, the chosen one did not. What the router predicted
  for each candidate divides it: up to (largest prediction - prediction for the chosen one) was given up *knowingly*,
  for load for example; the rest is **prediction error**;
* **not delivered** = routed finite - actual: the model holds it, the engine computed it anyway. Blocks still
  being computed when the request came, room taken by running requests and by outputs; below zero where the engine's
  blocks are smaller than the trace's, or its eviction kinder than LRU.

Eviction and routing are never negative: an instance's cache is part of what all instances computed, because a request
leaves its whole prompt on its instance. Without a capacity there is no finite cache: routing is then ideal infinite
minus routed infinite, and eviction and not delivered are one figure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from replayer.records.runs import RequestRecord
from replayer.report.segments import InfiniteCache, LruCache, PrefixCache, Segments
from replayer.traces.trace import Trace

Beliefs = Mapping[str, Mapping[str, float]]
"""Request id -> instance -> cached tokens the router predicted there when it decided."""


@dataclass(frozen=True, kw_only=True)
class AnatomyTokens:
    """Sums over requests, in tokens of the trace. None: unknown, see `Anatomy.left_out`."""

    prompt: int = 0
    ideal_infinite: int = 0
    ideal_finite: int | None = None
    routed_infinite: int = 0
    best_placed: int | None = None
    routed_finite: int | None = None
    actual: int | None = None
    known: int | None = None
    """Of the routing loss: given up although it was predicted. None without predictions for every candidate."""
    unknown: int | None = None
    """Of the routing loss: prediction error."""
    untold: int | None = None
    """Of the routing loss: requests without predictions, where others have them."""
    overpredicted: int | None = None
    """Sum of max(0, predicted - actual) on the instance that computed the prompt: promised and not there. No part of
    the loss: what was not there was evicted, or never computed."""
    underpredicted: int | None = None
    """Sum of max(0, actual - predicted): there and not promised."""

    def __add__(self, other: AnatomyTokens) -> AnatomyTokens:
        """Sums of two sets of requests; a figure one of them lacks is lacking."""
        summed: dict[str, Any] = {}
        for one in fields(self):
            left, right = getattr(self, one.name), getattr(other, one.name)
            summed[one.name] = None if left is None or right is None else left + right
        return AnatomyTokens(**summed)


@dataclass(frozen=True)
class Part:
    """One part of the loss."""

    name: str
    tokens: int
    meaning: str


@dataclass(frozen=True)
class Anatomy:
    """The figures of one run, or of several of one arm."""

    tokens: AnatomyTokens
    requests: int
    """Requests counted."""
    instances: int
    capacity_tokens: int | None
    """Of one instance; None when unknown."""
    left_out: list[str] = field(default_factory=list)
    """Requests and figures that are missing, with the reason."""
    uncounted: int = 0
    """Requests left out; the engines may have their prompts in their caches, the models have not."""

    @property
    def losses(self) -> list[Part]:
        """Parts that add up to ideal infinite - actual (without actual: - the lowest level there is)."""
        t = self.tokens
        parts: list[Part] = []
        if t.best_placed is None or t.routed_finite is None:
            parts += self._routing(t.ideal_infinite - t.routed_infinite)
            if t.actual is not None:
                rest = t.routed_infinite - t.actual
                parts.append(Part("eviction and not delivered", rest, "the chosen instance had computed it before"))
            return parts
        parts.append(Part("eviction", t.ideal_infinite - t.best_placed, "no instance held it any more"))
        parts += self._routing(t.best_placed - t.routed_finite)
        if t.actual is not None:
            parts.append(
                Part("not delivered", t.routed_finite - t.actual, "the model holds it, the engine computed it")
            )
        return parts

    def _routing(self, total: int) -> list[Part]:
        t = self.tokens
        if t.known is None or t.unknown is None:
            return [Part("routing", total, "another instance held it")]
        parts = [
            Part("routing, knowingly", t.known, "another instance held it and the router knew"),
            Part("routing, prediction error", t.unknown, "another instance held it and the router did not know"),
        ]
        if t.untold:
            parts.append(Part("routing, belief not recorded", t.untold, "another instance held it"))
        return parts


class TokenSums:
    """Sums up a request at a time, as integers."""

    __slots__ = ("sums",)

    def __init__(self) -> None:
        self.sums: dict[str, int] = {}

    def add(self, name: str, tokens: int) -> None:
        """Count tokens to a figure."""
        self.sums[name] = self.sums.get(name, 0) + tokens


class TracePaths:
    """The blocks of each request of a trace as paths of segments. Made once for all runs of the trace."""

    def __init__(self, trace: Trace) -> None:
        size = trace.block_tokens
        self.block_tokens = size
        segments = Segments([request.hash_ids[: request.full_blocks(size)] for request in trace.requests])
        self.blocks = segments.blocks
        """Blocks of each segment."""
        self._asked = {
            (request.session_id, request.turn, request.chat_id): (path, request.input_length)
            for request, path in zip(trace.requests, segments.paths, strict=True)
        }

    def of(self, record: RequestRecord) -> tuple[list[int], int] | None:
        """Path and prompt tokens of a request; None when it is not in the trace."""
        return self._asked.get((record.session_id, record.turn, record.chat_id))


def anatomy(
    paths: TracePaths,
    records: Sequence[RequestRecord],
    *,
    capacity_tokens: int | None = None,
    instances: Iterable[str] = (),
    beliefs: Beliefs | None = None,
) -> Anatomy:
    """The anatomy of one run that began with empty caches.

    Args:
        paths: what was replayed.
        records: the run's requests. Those that failed, have no instance, or are not in the trace are
            left out, and what they left in the engines' caches with them.
        capacity_tokens: KV pool of one instance, tokens; None leaves out what needs it.
        instances: names of all instances; those that served nothing count for the fleet's capacity.
        beliefs: the router's predictions, for the split of the routing loss.
    """
    found, left_out = _matched(paths, records)
    size, blocks = paths.block_tokens, paths.blocks
    names = sorted({*instances, *(place for record, *_ in found for place in _places(record))})
    capacity = None if capacity_tokens is None else capacity_tokens // size
    everywhere = InfiniteCache(blocks)
    pooled = None if capacity is None else LruCache(blocks, capacity * len(names))
    infinite = {name: InfiniteCache(blocks) for name in names}
    finite = {} if capacity is None else {name: LruCache(blocks, capacity) for name in names}
    predicted = any(record.predicted_cached_tokens is not None for record, *_ in found)
    reported = [record.cached_tokens is not None and record.prompt_tokens is not None for record, *_ in found]
    sums = TokenSums()
    split = any(beliefs.get(record.request_id) for record, *_ in found) if beliefs else False
    for record, path, input_length in found:
        places = _places(record)
        sums.add("prompt", input_length)
        held = everywhere.held(path)
        sums.add("ideal_infinite", held * size)
        here = infinite[places[0]].held(path)
        sums.add("routed_infinite", here * size)
        best = held
        if pooled is not None:
            here = finite[places[0]].held(path)
            best = _best(finite, path, here, held)
            sums.add("ideal_finite", pooled.held(path) * size)
            sums.add("best_placed", best * size)
            sums.add("routed_finite", here * size)
        if split:
            _split_routing(sums, (best - here) * size, places[0], (beliefs or {}).get(record.request_id))
        if all(reported):
            sums.add("actual", _in_trace_tokens(record, input_length))
            if predicted:
                error = (record.predicted_cached_tokens or 0) - (record.cached_tokens or 0)
                sums.add("overpredicted", max(0, error))
                sums.add("underpredicted", max(0, -error))
        for cache in (everywhere, pooled, *(kind[place] for kind in (infinite, finite) if kind for place in places)):
            if cache is not None:
                cache.add(path)
    if capacity is None:
        left_out.append("ideal finite, best placed and routed finite: the KV capacity of an instance is not known")
    if not split:
        left_out.append("the split of the routing loss: no record of what the router predicted for each candidate")
    if found and not all(reported):
        left_out.append(
            f"actual: the engines reported no cached tokens for {reported.count(False)} of {len(found)} requests"
        )
    known = _names(capacity is not None, split, bool(found) and all(reported), predicted)
    figures = AnatomyTokens(**{name: sums.sums.get(name, 0) for name in known})
    return Anatomy(figures, len(found), len(names), capacity_tokens, left_out, len(records) - len(found))


def total(parts: Sequence[Anatomy]) -> Anatomy:
    """Several runs of one arm as one: tokens add up, every run began with empty caches."""
    first = parts[0]
    tokens = first.tokens
    for part in parts[1:]:
        tokens += part.tokens
    left_out = list(dict.fromkeys(remark for part in parts for remark in part.left_out))
    requests, uncounted = sum(part.requests for part in parts), sum(part.uncounted for part in parts)
    return Anatomy(tokens, requests, first.instances, first.capacity_tokens, left_out, uncounted)


def _names(capacity: bool, split: bool, actual: bool, predicted: bool) -> list[str]:
    """Names of the figures that are known."""
    names = ["prompt", "ideal_infinite", "routed_infinite"]
    names += ["ideal_finite", "best_placed", "routed_finite"] if capacity else []
    names += ["known", "unknown", "untold"] if split else []
    names += ["actual"] if actual else []
    names += ["overpredicted", "underpredicted"] if actual and predicted else []
    return names


def _matched(
    paths: TracePaths, records: Sequence[RequestRecord]
) -> tuple[list[tuple[RequestRecord, list[int], int]], list[str]]:
    """The requests that count, with path and prompt tokens, in the order in which they were sent; what is left out."""
    found: list[tuple[float, int, RequestRecord, list[int], int]] = []
    failed, placeless, strange = 0, 0, 0
    for record in records:
        asked = paths.of(record)
        if not record.ok or record.sent_s is None:
            failed += 1
        elif record.instance is None:
            placeless += 1
        elif asked is None:
            strange += 1
        else:
            found.append((record.sent_s, len(found), record, *asked))
    found.sort(key=lambda row: row[:2])
    counts = (
        (failed, "failed"),
        (placeless, "did not say which instance served them"),
        (strange, "are not in the trace"),
    )
    left_out = [f"{count} of {len(records)} requests: they {why}" for count, why in counts if count]
    return [row[2:] for row in found], left_out


def _places(record: RequestRecord) -> tuple[str, ...]:
    """The instance that computed the prompt, then the one that its KV went to."""
    assert record.instance is not None
    if record.prefill_instance is None or record.prefill_instance == record.instance:
        return (record.instance,)
    return (record.prefill_instance, record.instance)


def _best(caches: Mapping[str, PrefixCache], path: Sequence[int], here: int, most: int) -> int:
    """Blocks that the best instance holds; no instance holds more than ``most``."""
    best = here
    for cache in caches.values():
        if best == most:
            break
        best = max(best, cache.held(path))
    return best


def _split_routing(sums: TokenSums, lost: int, chosen: str, predicted: Mapping[str, float] | None) -> None:
    if not predicted or chosen not in predicted:
        sums.add("untold", lost)
        return
    known = min(lost, max(0, int(max(predicted.values()) - predicted[chosen])))
    sums.add("known", known)
    sums.add("unknown", lost - known)


def _in_trace_tokens(record: RequestRecord, input_length: int) -> int:
    """Reported cached tokens, scaled where the engine counts the prompt differently from the trace (text replays)."""
    cached, prompt = record.cached_tokens or 0, record.prompt_tokens or 0
    if not prompt or prompt == input_length:
        return cached
    return round(cached * input_length / prompt)
