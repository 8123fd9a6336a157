"""Slowness of the engines, learned from the records of a comparison as a proxy learns it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

from bench.routers.records import RequestFigures, RouterRecord
from policies.costs.book import CostBook, PrefillJob
from policies.costs.slowness import Slownesses


class LearnedSlowness(NamedTuple):
    """Slowness of the engines as learned in one run."""

    prefills: int
    """That waited for no other one and were long enough to be compared."""
    first_s: float | None
    """Time from which instances counted as different; None: never."""
    last: Slownesses
    """At the end; empty if all counted as equal."""


class _Event(IntEnum):
    """In the order in which those of one time are replayed."""

    FIRST_TOKEN = 0
    END = 1
    SENT = 2


def learned_slowness(requests: Sequence[RequestFigures]) -> LearnedSlowness:
    """Replay a run's requests, first tokens and ends, as if every pool had room.

    Args:
        requests: of one run; those without the name of an instance, times or counts of tokens are left out. One that
            was handed over is no sample itself; it counts as queued where it was prefilled until its first token.
    """
    book = CostBook()
    jobs: dict[int, PrefillJob] = {}
    queued: dict[str, dict[int, int]] = defaultdict(dict)
    """New tokens of the requests without a first token, by instance."""
    compared, first_s = 0, None
    for time_s, event, place in sorted(_events(requests)):
        each = requests[place]
        on = each.prefill_instance or each.instance
        assert on is not None
        waiting, cached = queued[on], each.cached_tokens or 0
        if event is _Event.SENT:
            new_tokens = (each.prompt_tokens or 0) - cached
            jobs[place] = PrefillJob(on, new_tokens, cached, sum(waiting.values()), len(waiting))
            waiting[place] = new_tokens
            continue
        seconds = (each.first_token_s or 0.0) - (each.sent_s or 0.0)
        if event is _Event.FIRST_TOKEN:
            del waiting[place]
            if each.prefill_instance is None:
                book.prefilled(jobs[place], seconds)
            continue
        job = jobs.pop(place)
        if each.prefill_instance is not None:
            continue
        compared += not job.prefilling and job.new_tokens >= book.prefill.smallest_tokens
        book.compare(job, each.prompt_tokens or 0, cached, seconds, time_s)
        if book.slowness.measured and first_s is None:
            first_s = time_s
    return LearnedSlowness(compared, first_s, book.slowness.measured)


def slowness_lines(records: Iterable[RouterRecord]) -> Iterator[str]:
    """A Markdown table with one row for each run; a dash: all engines counted as equal."""
    yield "| run | prefills compared | from, s | slowness at the end |"
    yield "| --- | ---: | ---: | --- |"
    for record in records:
        found = learned_slowness(record.requests)
        since = "–" if found.first_s is None else f"{found.first_s:.0f}"
        name = f"`{record.label}`, {record.load:g} x, {record.repeat + 1}"
        yield f"| {name} | {found.prefills} | {since} | {_shown(found.last)} |"


def _shown(slowness: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in sorted(slowness.items())) or "–"


def _events(requests: Sequence[RequestFigures]) -> Iterator[tuple[float, _Event, int]]:
    """Time, kind, and place of the request."""
    for place, each in enumerate(requests):
        sent_s, first_s, end_s = each.sent_s, each.first_token_s, each.end_s
        counted = each.instance is not None and each.prompt_tokens
        if counted and sent_s is not None and first_s is not None and end_s is not None and sent_s < first_s <= end_s:
            yield sent_s, _Event.SENT, place
            yield first_s, _Event.FIRST_TOKEN, place
            yield end_s, _Event.END, place
