"""The router's predictions of first tokens in the records of real engines, with short prefills learned and without."""

from __future__ import annotations

import gzip
import math
from collections.abc import Mapping, Sequence
from heapq import merge
from operator import itemgetter
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

import msgspec

from policies.costs.short_prefills import ShortPrefills
from replayer.records.breakdown_rows import Leg


class FirstToken(NamedTuple):
    """One request that was prefilled where it decoded; times in seconds."""

    arrived_s: float
    took_s: float
    expected_s: float
    """Expected from queue and work. These records were made before short prefills were learned."""
    new_tokens: int
    warm: bool


class _Stored(msgspec.Struct):
    """The fields of a row that are read."""

    arrived_unix_s: float
    request_class: str | None = msgspec.field(name="class")
    prompt_tokens: int | None
    actual_cached_tokens: int | None
    legs: dict[str, Leg]


_DECODER = msgspec.json.Decoder(_Stored)


def first_tokens(path: Path) -> list[FirstToken]:
    """Those of a compressed breakdown file, in the order of their arrival."""
    found = []
    with gzip.open(path, "rb") as lines:
        for row in map(_DECODER.decode, lines):
            leg = row.legs.get("first_token")
            if leg is not None and row.prompt_tokens is not None:
                new = row.prompt_tokens - (row.actual_cached_tokens or 0)
                warm = row.request_class == "WARM"
                found.append(FirstToken(row.arrived_unix_s, leg.actual_s, leg.predicted_s, new, warm))
    return sorted(found)


def learned(requests: Sequence[FirstToken]) -> list[float]:
    """Predicted seconds of each, if short prefills are learned from every first token that came before it arrived."""
    arrivals = ((each.arrived_s, False, place) for place, each in enumerate(requests))
    tokens = sorted((each.arrived_s + each.took_s, True, place) for place, each in enumerate(requests))
    short, predicted = ShortPrefills(), [0.0] * len(requests)
    for _, ended, place in merge(arrivals, tokens, key=itemgetter(0)):
        each = requests[place]
        if ended:
            short = short.observe(each.new_tokens, each.expected_s, each.took_s)
        else:
            predicted[place] = short.predict(each.new_tokens, each.expected_s)
    return predicted


class Errors(NamedTuple):
    """Factors (above 1) between predicted and actual times of WARM requests, and the median of actual / predicted."""

    requests: float
    half: float
    most: float
    """Nine tenths are within this factor."""
    ratio: float


def errors(requests: Sequence[FirstToken], predicted: Sequence[float]) -> Errors:
    """Of the WARM requests."""
    logs = [math.log(each.took_s / seconds) for each, seconds in zip(requests, predicted, strict=True) if each.warm]
    factors = [math.exp(abs(each)) for each in logs]
    return Errors(len(logs), median(factors), quantiles(factors, n=10)[-1], math.exp(median(logs)))


def table(recordings: Mapping[str, Sequence[FirstToken]]) -> str:
    """A Markdown table: expected from queue and work, and with short prefills learned."""
    lines = [
        "| recording | WARM requests | half within | 90 % within | actual / predicted, median |",
        "| --- | ---: | --- | --- | --- |",
    ]
    both = []
    for name, requests in recordings.items():
        before, after = errors(requests, [each.expected_s for each in requests]), errors(requests, learned(requests))
        both.append((before, after))
        lines.append(_line(name, before, after))
    medians = (Errors(*(median(each[at] for each in found) for at in range(4))) for found in zip(*both, strict=True))
    closer = sum(after.half < before.half for before, after in both)
    lines.append(_line(f"median; closer in {closer} of {len(both)}", *medians))
    return "\n".join(lines)


def _line(name: str, before: Errors, after: Errors) -> str:
    half, most, ratio = (f"{old:.2f} / {new:.2f}" for old, new in zip(before[1:], after[1:], strict=True))
    return f"| {name} | {before.requests:.0f} | x {half} | x {most} | {ratio} |"
