"""Cost of hand-offs for the requests that were handed over, and their gain for all others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from bench.routers.records import RouterRecord
from replayer.records.runs import RequestRecord

_TIMES = (("TTFT", "ttft_scheduled_s"), ("E2E", "e2e_scheduled_s"))


def hand_off_lines(arms: Mapping[str, Sequence[RouterRecord]], base: str) -> Iterator[str]:
    """For each arm with hand-offs a line: means of the requests handed over and of the others, beside the base's.

    A request is compared with the mean of the base's requests of the same name, over all repeats. The means have no
    intervals: which requests are handed over depends on the run, so neither group is chosen at random.
    """
    if all(each.prefill_instance is None for runs in arms.values() for run in runs for each in run.requests):
        return
    of_base: dict[str, list[RequestRecord]] = {}
    for each in _answered(arms.get(base, ())):
        of_base.setdefault(each.request_id, []).append(each)
    for label, runs in arms.items():
        paired = [each for each in _answered(runs) if each.request_id in of_base]
        handed = [each for each in paired if each.prefill_instance is not None]
        if label == base or not handed:
            continue
        others = [each for each in paired if each.prefill_instance is None]
        yield (
            f"- `{label}`: {len(handed)} requests were handed over. Means, beside those of the same requests under "
            f"`{base}`: {_beside(handed, of_base)}; the others {_beside(others, of_base)}."
        )


def _answered(runs: Sequence[RouterRecord]) -> Iterator[RequestRecord]:
    for run in runs:
        for figures in run.requests:
            record = figures.record()
            if record.ok and record.ttft_scheduled_s is not None:
                yield record


def _beside(requests: Sequence[RequestRecord], of_base: Mapping[str, Sequence[RequestRecord]]) -> str:
    if not requests:
        return "none"
    return ", ".join(
        f"{name} {np.mean([getattr(each, field) for each in requests]):.2f} and "
        f"{np.mean([np.mean([getattr(same, field) for same in of_base[each.request_id]]) for each in requests]):.2f} s"
        for name, field in _TIMES
    )
