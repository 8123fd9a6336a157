"""The figures of hand-offs in docs/head-to-head.md are those of the kept records."""

from __future__ import annotations

import numpy as np
from typer.testing import CliRunner

from bench.gpu.routers_ab import app
from replayer.records.runs import RequestRecord
from tests.bench.routers.kept import PAGE, README, RESULTS, runs_of, sent_s


def test_what_the_page_says_of_hand_offs_by_length() -> None:
    records = runs_of("hand-offs-h100-2x")
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
        f"that of {len(short)} prompts under 30,000 tokens, {ttft(short):.1f} instead of {beside(short):.1f} s" in PAGE
    )
    assert f"for the {len(long)} longer ones it is {100 * (ttft(long) / beside(long) - 1):.0f} %" in PAGE


def test_what_the_page_says_of_single_runs_on_gpus_of_their_own() -> None:
    p90: dict[str, list[float]] = {"warm": [], "joint": []}
    longest: list[float] = []
    for run in runs_of("hand-offs-h100-4x"):
        records = [each.record() for each in run.requests]
        p90[run.label].append(
            float(np.quantile([each.ttft_scheduled_s for each in records if each.trace_timestamp_s >= 78.3], 0.9))
        )
        longest += [each.ttft_scheduled_s or 0.0 for each in records[:4] if each.input_length == 123_058]
    first, second = sorted(p90["joint"])
    assert f"`joint` ({first:.2f} and {second:.2f} s)" in PAGE
    assert f"`warm` ({min(p90['warm']):.2f} to {max(p90['warm']):.2f} s)" in PAGE
    assert f"{min(longest):.1f} to {max(longest):.1f} s for 123,058 tokens" in PAGE


def test_what_the_page_says_of_runs_on_parts_of_a_gpu() -> None:
    said = {}
    for run in [*runs_of("hand-offs-h200-mps"), *runs_of("hand-offs-h200-mps-second")]:
        judged = [record for each in run.requests if (record := each.record()).trace_timestamp_s >= 116]
        first = [each.ttft_scheduled_s or 0.0 for each in judged]
        whole = float(np.mean([each.e2e_scheduled_s or 0.0 for each in judged]))
        handed = sum(each.prefill_instance is not None for each in judged)
        figures = (f"{whole:.2f}", f"{np.quantile(first, 0.9):.2f}", f"{np.mean(first):.2f}", handed, len(run.requests))
        said[run.label, run.repeat] = figures
    assert said == {
        ("warm", 0): ("7.04", "2.57", "1.31", 0, 684),
        ("joint", 0): ("6.31", "2.07", "1.08", 14, 684),
        ("joint", 1): ("6.62", "2.29", "1.24", 17, 683),
    }
    assert "mean E2E 6.31 and 7.04 s, TTFT p90 2.07 and 2.57 s" in PAGE
    assert "6.62 s, 2.29 s; mean TTFT of the three 1.08, 1.24\nand 1.31 s" in PAGE
    assert "14 and 17 judged requests were handed over" in PAGE


def test_what_the_page_says_of_sessions_of_claude_code() -> None:
    runs = {
        (run.label, run.repeat): [each.record() for each in run.requests]
        for run in runs_of("hand-offs-h200-mps-claude")
    }
    warming = {run: [each for each in found if each.trace_timestamp_s < 248.2] for run, found in runs.items()}
    waits = {run: f"{np.mean([each.ttft_scheduled_s for each in found]):.1f}" for run, found in warming.items()}
    assert waits == {("warm", 0): "13.0", ("warm", 1): "13.1", ("joint", 0): "14.7", ("joint", 1): "15.2"}
    assert "mean TTFT 14.7 and 15.2 s, `warm` 13.0 and\n13.1 s; 16 of the 19 hand-offs of a run are there" in PAGE
    handed = {run: [each.prefill_instance is not None for each in found] for run, found in runs.items()}
    assert [sum(handed["joint", repeat]) for repeat in (0, 1)] == [19, 19]
    assert [sum(each.prefill_instance is not None for each in warming["joint", repeat]) for repeat in (0, 1)] == [
        16,
        16,
    ]
    assert {len(found) for found in warming.values()} == {98}
    unanswered = [549 - len(found) for found in runs.values()]
    assert f"with {min(unanswered)} to {max(unanswered)} of 549 requests unanswered" in PAGE
    assert all(each.ok for found in runs.values() for each in found)


def test_what_the_page_says_of_contexts_that_moved() -> None:
    for run in runs_of("hand-offs-h100-4x-second"):
        if run.label == "joint":
            records = sorted([each.record() for each in run.requests], key=sent_s)
            handed = [each for each in records if each.prefill_instance is not None]
            judged = [each for each in handed if each.trace_timestamp_s >= 90.1]
            assert (len(handed), len(judged), f"{sent_s(handed[-1]):.0f}") == (12, 7, "107")
            assert _moved_from_busy_instances(records, until_s=112.0) == (17, 17)


def test_what_the_page_says_of_the_specialist_that_stays() -> None:
    fourth = runs_of("hand-offs-h100-4x-fourth")
    third = runs_of("hand-offs-h100-4x-third")
    handed = {}
    for run in [each for each in (*third, *fourth) if each.label == "joint"]:
        assert {"warmroute_prefill_specialists 1.0", "warmroute_recomputation_ratio 0.0"} <= set(run.evidence)
        requests = [each.record() for each in run.requests]
        planned = [each.trace_timestamp_s for each in requests if each.prefill_instance is not None]
        before_the_end_s = max(each.trace_timestamp_s for each in requests) - max(planned)
        handed[len(requests), run.repeat] = len(planned), round(before_the_end_s)
    assert handed == {(505, 0): (26, 0), (703, 0): (46, 2), (703, 1): (33, 2)}
    assert sum(len(run.requests) for run in fourth if all(each.record().ok for each in run.requests)) == 2_812


def test_what_the_page_says_of_those_that_were_handed_over() -> None:
    warm: dict[str, list[RequestRecord]] = {}
    joint: list[RequestRecord] = []
    fresh: dict[str, set[int]] = {"warm": set(), "joint": set()}
    left = 0
    for run in runs_of("hand-offs-h100-4x-fourth"):
        every = [each.record() for each in run.requests]
        records = [each for each in every if each.trace_timestamp_s >= 90.1]
        fresh[run.label].add(
            sum(2 * (each.cached_tokens or 0) < (each.own_prefix_tokens or 0) > 10_000 for each in records)
        )
        if run.label == "warm":
            for each in records:
                warm.setdefault(each.request_id, []).append(each)
        else:
            joint += records
            left += _left_a_busy_instance(every, since_s=90.1)
    assert (fresh, left) == ({"warm": {59}, "joint": {47, 46}}, 34)
    handed = [each for each in joint if each.prefill_instance is not None]
    first = [each for each in handed if not each.own_prefix_tokens]
    for name, group in (
        ("first prompts of 100,000 tokens or more", [each for each in first if each.input_length >= 100_000]),
        ("shorter first prompts", [each for each in first if each.input_length < 100_000]),
        ("later turns, away from their context", [each for each in handed if each.own_prefix_tokens]),
        ("not handed over", [each for each in joint if each.prefill_instance is None]),
    ):
        times = [
            float(np.mean([getattr(each, metric) for own in group for each in of(own)]))
            for metric in ("ttft_scheduled_s", "e2e_scheduled_s")
            for of in (lambda own: [own], lambda own: warm[own.request_id])
        ]
        row = " | ".join(f"{each:.2f}" for each in times)
        assert f"| {name} | {len(group):,} | {row} |" in PAGE


def test_what_the_page_says_of_each_pair_of_runs_on_parts_of_two_gpus() -> None:
    command = ["table", str(RESULTS / "hand-offs-h200-2x-mps"), "--skip-first-s", "132.8"]
    figures: dict[str, list[tuple[float, ...]]] = {"warm": [], "joint": []}
    surely_better = []
    for repeat in range(4):
        shown = CliRunner().invoke(app, [*command, "--repeat", str(repeat)])
        assert shown.exit_code == 0, shown.output
        rows = [line for line in shown.output.splitlines() if line.startswith("| `")]
        surely_better.append(rows[-1].count("**better**"))
        for row in rows[:2]:
            name, runs, ok, *cells = [cell.strip() for cell in row.strip("|").split("|")]
            assert (runs, ok) == ("1", "993/993")
            figures[name.strip("`")].append(tuple(float(each) for cell in cells[:5] for each in cell.split(", ")))
    assert surely_better == [3, 6, 5, 6]
    assert "three, six, five and six of the seven figures are surely better" in PAGE
    of_warm, of_joint = (zip(*figures[name], strict=True) for name in ("warm", "joint"))
    assert all(max(joint) < min(warm) for warm, joint in zip(of_warm, of_joint, strict=True))
    refused = CliRunner().invoke(app, [*command, "--repeat", "4"])
    assert refused.exit_code == 2
    assert "no run 4; there are 0, 1, 2, 3" in refused.output


def test_what_the_pages_say_of_whole_answers_and_the_longest_waits_on_parts_of_two_gpus() -> None:
    first: dict[str, list[float]] = {"warm": [], "joint": []}
    whole: dict[str, list[list[float]]] = {"warm": [], "joint": []}
    answered = 0
    for run in runs_of("hand-offs-h200-2x-mps"):
        every = [each.record() for each in run.requests]
        answered += sum(each.ok for each in every)
        judged = [each for each in every if each.trace_timestamp_s >= 132.8]
        first[run.label] += [each.ttft_scheduled_s or 0.0 for each in judged]
        whole[run.label].append([each.e2e_scheduled_s or 0.0 for each in judged])
    means = "[`joint`](docs/elastic.md) {:.1f} s | `warm` {:.1f} s |".format(
        *(np.mean(whole[name]) for name in ("joint", "warm"))
    )
    assert means in README
    assert f"All {answered:,} requests were answered" in PAGE
    p99 = {name: np.quantile(each, 0.99) for name, each in first.items()}
    longest = {name: max(each) for name, each in first.items()}
    assert "TTFT p99 is {joint:.1f} s beside {warm:.1f} s".format(**p99) in PAGE
    assert "the longest wait {joint:.0f} instead of {warm:.0f} s".format(**longest) in PAGE
    slowest = {name: [max(each) for each in runs] for name, runs in whole.items()}
    spans = [f"{min(slowest[name]):.0f} to {max(slowest[name]):.0f} s" for name in ("joint", "warm")]
    e2e_p99 = {name: np.quantile(runs, 0.99) for name, runs in whole.items()}
    assert (
        "the longest judged one of a run took {}, with `warm` {} (E2E p99 {joint:.0f} instead of {warm:.0f} s)".format(
            *spans, **e2e_p99
        )
        in PAGE
    )


def _left_a_busy_instance(records: list[RequestRecord], since_s: float) -> int:
    """Later turns that were handed over while an instance with their context computed 20,000 tokens or more of another
    prompt.
    """
    homes: dict[str, set[str | None]] = {}
    count = 0
    for record in sorted(records, key=sent_s):
        home = homes.setdefault(record.session_id, set())
        if record.prefill_instance and record.own_prefix_tokens and record.trace_timestamp_s >= since_s:
            count += _computes_a_long_prompt(records, record, home)
        home |= {record.prefill_instance or record.instance, record.instance}
    return count


def _computes_a_long_prompt(records: list[RequestRecord], record: RequestRecord, home: set[str | None]) -> bool:
    return any(
        (other.prefill_instance or other.instance) in home
        and sent_s(other) < sent_s(record) < (other.first_token_s or 0.0)
        and other.input_length - (other.cached_tokens or 0) >= 20_000
        for other in records
        if other is not record
    )


def _moved_from_busy_instances(records: list[RequestRecord], until_s: float) -> tuple[int, int]:
    """Turns that were computed without 2,000 tokens or more of their context on another instance than it, and those of
    them that were sent while that instance computed 20,000 tokens or more of another prompt.
    """
    homes: dict[str, set[str | None]] = {}
    moved = busy = 0
    for record in [each for each in records if sent_s(each) < until_s]:
        where, home = record.prefill_instance or record.instance, homes.get(record.session_id, set())
        if home and (record.own_prefix_tokens or 0) - (record.cached_tokens or 0) > 2_000:
            moved += where not in home
            busy += _computes_a_long_prompt(records, record, home)
        homes.setdefault(record.session_id, set()).update({where, record.instance})
    return moved, busy
