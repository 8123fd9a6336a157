"""The figures of docs/head-to-head.md are those of the kept records."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.routers.records import RequestFigures, read_records
from bench.routers.table import lines_of
from replayer.records.runs import RequestRecord

_DOCS = Path(__file__).parents[3] / "docs"
_PAGE = (_DOCS / "head-to-head.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "folder", "skip_first_s", "base"),
    [
        ("head to head", "head-to-head-h100-2x", None, "warm"),
        ("hand-offs", "hand-offs-h100-2x", None, "warm"),
        ("own GPUs", "hand-offs-h100-4x", 78.3, "warm"),
        ("own GPUs, second", "hand-offs-h100-4x-second", 90.1, "warm"),
        ("order", "order-h100-4x", 48.9, "warm,slowdown=0"),
    ],
)
def test_the_page_shows_the_table_of_the_kept_records(
    name: str, folder: str, skip_first_s: float | None, base: str
) -> None:
    shown = _PAGE.partition(f"<!-- {name}: begin -->")[2].partition(f"<!-- {name}: end -->")[0].strip()
    records = read_records(_DOCS / "results" / folder)
    assert shown == "\n".join(lines_of(list(records.values()), base, skip_first_s)).strip()


def test_what_the_page_says_of_hand_offs_by_length() -> None:
    records = read_records(_DOCS / "results" / "hand-offs-h100-2x").values()
    requests = [(run.label, each.record()) for run in records for each in run.requests]

    def ttft(found: list[RequestRecord]) -> float:
        return float(np.mean([each.ttft_scheduled_s for each in found]))

    def beside(found: list[RequestRecord]) -> float:
        """The same requests under `warm`, each the mean of its repeats."""
        return float(
            np.mean(
                [
                    ttft([same for label, same in requests if label == "warm" and same.request_id == each.request_id])
                    for each in found
                ]
            )
        )

    handed = [each for label, each in requests if label == "joint" and each.prefill_instance is not None]
    short = [each for each in handed if each.input_length < 30_000]
    long = [each for each in handed if each.input_length >= 30_000]
    assert (
        f"that of {len(short)} prompts under 30,000 tokens, {ttft(short):.1f} instead of {beside(short):.1f} s" in _PAGE
    )
    assert f"for the {len(long)} longer ones it is {100 * (ttft(long) / beside(long) - 1):.0f} %" in _PAGE


def test_what_the_page_says_of_single_runs_on_gpus_of_their_own() -> None:
    p90: dict[str, list[float]] = {"warm": [], "joint": []}
    longest: list[float] = []
    for run in read_records(_DOCS / "results" / "hand-offs-h100-4x").values():
        records = [each.record() for each in run.requests]
        p90[run.label].append(
            float(np.quantile([each.ttft_scheduled_s for each in records if each.trace_timestamp_s >= 78.3], 0.9))
        )
        longest += [each.ttft_scheduled_s or 0.0 for each in records[:4] if each.input_length == 123_058]
    first, second = sorted(p90["joint"])
    assert f"`joint` ({first:.2f} and {second:.2f} s)" in _PAGE
    assert f"`warm` ({min(p90['warm']):.2f} to {max(p90['warm']):.2f} s)" in _PAGE
    assert f"{min(longest):.1f} to {max(longest):.1f} s for 123,058 tokens" in _PAGE


def test_what_the_page_says_of_contexts_that_moved() -> None:
    for run in read_records(_DOCS / "results" / "hand-offs-h100-4x-second").values():
        if run.label == "joint":
            records = sorted([each.record() for each in run.requests], key=_sent)
            handed = [each for each in records if each.prefill_instance is not None]
            judged = [each for each in handed if each.trace_timestamp_s >= 90.1]
            assert (len(handed), len(judged), f"{_sent(handed[-1]):.0f}") == (12, 7, "107")
            assert _moved_from_busy_instances(records, until_s=112.0) == (17, 17)


def test_what_the_page_says_of_the_specialist_that_stays() -> None:
    """The run with the corrected bound beside the same requests of the runs before."""
    second = read_records(_DOCS / "results" / "hand-offs-h100-4x-second").values()
    [third] = read_records(_DOCS / "results" / "hand-offs-h100-4x-third").values()
    assert {"warmroute_prefill_specialists 1.0", "warmroute_recomputation_ratio 0.0"} <= set(third.evidence)
    records = [each.record() for each in third.requests]
    handed = [each.trace_timestamp_s for each in records if each.prefill_instance is not None]
    assert (len(records), len(handed)) == (505, 26)
    assert max(handed) == max(each.trace_timestamp_s for each in records)
    compared = {(each.session_id, each.turn) for each in records if 90.1 <= each.trace_timestamp_s < 185}
    assert f"Of the {len(compared)} requests planned from 90.1 to 185 s" in _PAGE
    times = []
    for run in [third, *(each for label in ("warm", "joint") for each in second if each.label == label)]:
        same = [each for each in map(RequestFigures.record, run.requests) if (each.session_id, each.turn) in compared]
        assert len(same) == len(compared)
        ttft, e2e = (
            np.array([getattr(each, name) for each in same]) for name in ("ttft_scheduled_s", "e2e_scheduled_s")
        )
        times.append((np.quantile(ttft, 0.9), np.mean(ttft), np.mean(e2e)))
    said = [
        f"{name} {new:.2f} s ({w0:.2f}, {w1:.2f}; {j0:.2f}, {j1:.2f})"
        for name, (new, w0, w1, j0, j1) in zip(
            ("TTFT p90", "mean TTFT", "mean E2E"), zip(*times, strict=True), strict=True
        )
    ]
    assert ", ".join(said) in _PAGE.replace("\n", " ")


def test_what_the_page_says_of_an_order_of_prefills() -> None:
    times: dict[str, list[float]] = {"warm": [], "warm,slowdown=0": [], "llmd_affinity": []}
    long: dict[str, list[float]] = {label: [] for label in times}
    sent = preempted = 0
    for run in read_records(_DOCS / "results" / "order-h100-4x").values():
        records = [each.record() for each in run.requests]
        assert all(each.ok for each in records)
        sent += len(records)
        preempted += sum(int(counter.preemptions) for counter in run.counters)
        for each in records:
            if each.trace_timestamp_s >= 48.9:
                assert each.ttft_scheduled_s is not None
                times[run.label].append(each.ttft_scheduled_s)
                if each.input_length - (each.cached_tokens or 0) >= 32_000:
                    long[run.label].append(each.ttft_scheduled_s)
    ordered, plain = times["warm"], times["warm,slowdown=0"]
    assert f"All {sent:,} requests were answered, and no engine preempted one" in _PAGE
    assert preempted == 0
    p99 = [float(np.quantile(each, 0.99)) for each in (ordered, plain)]
    assert f"TTFT p99 {p99[0]:.0f} instead of {p99[1]:.0f} s, the longest {max(ordered):.0f} instead of" in _PAGE
    waits = [float(np.mean(long[label])) for label in ("warm", "warm,slowdown=0")]
    assert f"wait {waits[0]:.1f} instead of {waits[1]:.1f} s on average" in _PAGE


def _sent(record: RequestRecord) -> float:
    assert record.sent_s is not None
    return record.sent_s


def _moved_from_busy_instances(records: list[RequestRecord], until_s: float) -> tuple[int, int]:
    """Turns that were computed without 2,000 tokens or more of their context on another instance than it, and those of
    them that were sent while that instance computed 20,000 tokens or more of another prompt.
    """
    homes: dict[str, set[str | None]] = {}
    moved = busy = 0
    for record in [each for each in records if _sent(each) < until_s]:
        where, home = record.prefill_instance or record.instance, homes.get(record.session_id, set())
        if home and (record.own_prefix_tokens or 0) - (record.cached_tokens or 0) > 2_000:
            moved += where not in home
            busy += any(
                (other.prefill_instance or other.instance) in home
                and _sent(other) < _sent(record) < (other.first_token_s or 0.0)
                and other.input_length - (other.cached_tokens or 0) >= 20_000
                for other in records
                if other is not record
            )
        homes.setdefault(record.session_id, set()).update({where, record.instance})
    return moved, busy
