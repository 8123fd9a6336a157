"""Time that a step with a short prefill took longer, learned from the records of a comparison as a proxy does it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from bench.routers.records import RequestFigures, RouterRecord
from policies.costs.book import CostBook, PrefillJob
from policies.costs.short_step import ShortStep
from policies.costs.step_watch import WatchedStream
from policies.routing.warm import Warm

SHOWN_SIGMA = 0.01
"""Standard error below which an estimate is shown, used or not."""


class LearnedSteps(NamedTuple):
    """Estimates in the course of one run, from the first one on."""

    first_s: float | None
    """Time of the first one that replaces the constant; None: none does."""
    replaced: int
    """Number of estimates that do."""
    estimates: tuple[ShortStep, ...]


def learned_steps(requests: Sequence[RequestFigures], assumed_s: float = Warm().step_s) -> LearnedSteps:
    """Replay a run's first and last tokens. Prefills that were handed over are left out.

    Args:
        requests: of one run; those without the name of an instance, a first token or counts of tokens are left out.
        assumed_s: the constant.
    """
    book = CostBook()
    streams: dict[int, WatchedStream] = {}
    estimates: list[ShortStep] = []
    first_s, replaced, latest = None, 0, book.steps.short_step
    for time_s, ends, place in sorted(_events(requests)):
        each = requests[place]
        assert each.instance is not None
        if not ends:
            if each.prefill_instance is None:
                cached = each.cached_tokens or 0
                book.ran_beside(PrefillJob(each.instance, (each.prompt_tokens or 0) - cached, cached, 0, 0), time_s)
            streams[place] = book.watch.began(each.instance, time_s)
            continue
        stream = streams.pop(place)
        book.answered(stream, each.completion_tokens or 0, time_s)
        book.watch.ended(stream, time_s)
        if book.steps.short_step is not latest:
            latest = book.steps.short_step
            estimates.append(latest)
            if latest.instead_of(assumed_s) != assumed_s:
                replaced += 1
                first_s = time_s if first_s is None else first_s
    return LearnedSteps(first_s, replaced, tuple(estimates))


def step_lines(records: Iterable[RouterRecord]) -> Iterator[str]:
    """A Markdown table with one row for each run; a dash: too few answers, or few short steps."""
    assumed_s = Warm().step_s
    yield f"| run | estimates | last one, ms | replaces {assumed_s * 1e3:.0f} ms in | from, s |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for record in records:
        found = learned_steps(record.requests, assumed_s)
        last = found.estimates[-1] if found.estimates else None
        shown = "–"
        if last is not None and last.sigma < SHOWN_SIGMA:
            shown = f"{last.seconds * 1e3:.0f} ± {last.sigma * 1e3:.1f}"
        since = "–" if found.first_s is None else f"{found.first_s:.0f}"
        name = f"`{record.label}`, {record.load:g} x, {record.repeat + 1}"
        yield f"| {name} | {len(found.estimates)} | {shown} | {found.replaced} | {since} |"


def _events(requests: Sequence[RequestFigures]) -> Iterator[tuple[float, bool, int]]:
    """Time, true for the last token, and place of the request."""
    for place, each in enumerate(requests):
        first_s, last_s = each.first_token_s, each.last_token_s
        counted = each.instance is not None and each.prompt_tokens and each.completion_tokens
        if counted and first_s is not None and last_s is not None and last_s >= first_s:
            yield first_s, False, place
            yield last_s, True, place
