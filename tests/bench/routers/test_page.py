"""The figures of docs/head-to-head.md are those of the kept records."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from bench.gpu.routers_ab import app
from bench.routers.records import RouterRecord, read_records
from bench.routers.slowness import LearnedSlowness, learned_slowness
from bench.routers.table import lines_of
from replayer.records.runs import RequestRecord

_DOCS = Path(__file__).parents[3] / "docs"
RESULTS = _DOCS / "results"
_README = (_DOCS.parent / "README.md").read_text(encoding="utf-8")
_PAGE = (_DOCS / "head-to-head.md").read_text(encoding="utf-8")


@cache
def _runs(folder: str) -> list[RouterRecord]:
    return list(read_records(RESULTS / folder).values())


@pytest.mark.parametrize(
    ("name", "folder", "skip_first_s", "base"),
    [
        ("head to head", "head-to-head-h100-2x", None, "warm"),
        ("chat", "routers-chat-h100-2x", 32.3, "warm"),
        ("chat, token ids", "routers-chat-h200", 26.7, "warm"),
        ("chat, token ids, second", "routers-chat-h200-second", 34.8, "warm"),
        ("agents, token ids", "routers-agents-h200", 51.5, "warm"),
        ("agents, token ids, two GPUs", "routers-agents-h200-2x", 46.6, "warm"),
        ("agents, token ids, two GPUs, sticky", "routers-agents-h200-2x-second", 46.6, "warm"),
        ("Claude Code, uncut", "routers-claude-h200", None, "warm"),
        ("short prompts, own GPUs", "routers-azure-h200-2x", 28.8, "warm"),
        ("short prompts, own GPUs, retrieval", "routers-rag-h200-2x", 23.7, "warm"),
        ("short prompts, first", "routers-azure-h200-first", 19.1, "warm"),
        ("short prompts", "routers-azure-h200", 11.6, "warm"),
        ("short prompts, retrieval", "routers-rag-h200", 5.3, "warm"),
        ("learned step", "routers-azure-h200-learned-second", 20.0, "warm,learned_step=false"),
        ("code", "routers-azure-code-h200", 20.0, "warm"),
        ("hand-offs", "hand-offs-h100-2x", None, "warm"),
        ("own GPUs", "hand-offs-h100-4x", 78.3, "warm"),
        ("own GPUs, second", "hand-offs-h100-4x-second", 90.1, "warm"),
        ("own GPUs, fourth", "hand-offs-h100-4x-fourth", 90.1, "warm"),
        ("parts of a GPU", "hand-offs-h200-mps", 116.0, "warm"),
        ("parts of two GPUs", "hand-offs-h200-2x-mps", 132.8, "warm"),
        ("Claude Code, parts of a GPU", "hand-offs-h200-mps-claude", 248.2, "warm"),
        ("unequal engines", "unequal-h200-mps", 24.6, "warm,learned_slowness=false"),
        ("unequal engines, second", "unequal-h200-mps-second", 24.6, "warm,learned_slowness=false"),
        ("one slow engine", "one-slow-h200-mps", 7.3, "warm,learned_slowness=false"),
        ("order", "order-h100-4x", 48.9, "warm,slowdown=0"),
        ("order, conversations", "order-h100-4x-conversations", 26.0, "warm,slowdown=0"),
        ("order, agents", "order-h100-4x-agents", 75.2, "warm,slowdown=0"),
        ("order, agents again", "order-h100-4x-agents-second", 78.3, "warm,slowdown=0"),
        ("bounded steps", "long-prefills-h100-2x", 74.8, "warm,slowdown=0"),
        ("bounded steps, chat", "long-prefills-h100-2x-chat", 34.4, "warm,slowdown=0"),
    ],
)
def test_the_page_shows_the_table_of_the_kept_records(
    name: str, folder: str, skip_first_s: float | None, base: str
) -> None:
    shown = _PAGE.partition(f"<!-- {name}: begin -->")[2].partition(f"<!-- {name}: end -->")[0].strip()
    assert shown == "\n".join(lines_of(_runs(folder), base, skip_first_s)).strip()


def test_what_the_pages_say_of_uncut_sessions_of_claude_code() -> None:
    e2e: dict[str, list[float]] = {}
    longest: dict[str, list[float]] = {}
    for run in _runs("routers-claude-h200"):
        every = [each.record() for each in run.requests]
        assert all(each.ok for each in every)
        e2e.setdefault(run.label, []).extend(each.e2e_scheduled_s or 0.0 for each in every)
        longest.setdefault(run.label, []).append(max(each.ttft_scheduled_s or 0.0 for each in every))
    warm, sticky, vllm, joint = (
        f"{np.mean(e2e[name]):.1f}" for name in ("warm", "session_sticky", "vllm:cache_aware", "joint")
    )
    assert f"(mean E2E {sticky} and {warm} s)" in _README
    figures = " ".join((_DOCS / "figures.md").read_text(encoding="utf-8").split())
    assert f"{warm} s beside [{vllm} s of vLLM Router]" in figures
    assert f"with the same admission: {sticky} s" in figures
    assert f"mean E2E is {warm} s (`joint` {joint} s), vLLM Router's {vllm} s" in _PAGE
    waits = sorted([*longest["warm"], *longest["joint"]])
    assert f"{waits[0]:.0f} to {waits[-1]:.0f} s with `warm` and `joint`" in _PAGE
    assert "{:.0f} and {:.0f} s with `session_sticky`".format(*sorted(longest["session_sticky"])) in _PAGE
    assert "{:.0f} and {:.0f} s with vLLM Router".format(*sorted(longest["vllm:cache_aware"])) in _PAGE


def test_what_the_page_says_of_turns_that_left_their_context() -> None:
    moved: dict[str, list[int]] = {}
    lost: dict[str, list[int]] = {}
    for run in _runs("routers-claude-h200"):
        every = sorted((each.record() for each in run.requests), key=lambda each: (each.session_id, each.turn))
        turns = [(one, two) for one, two in pairwise(every) if one.session_id == two.session_id]
        assert len(turns) == 100
        moved.setdefault(run.label, []).append(sum(one.instance != two.instance for one, two in turns))
        kept = [(two.cached_tokens or 0) / (one.prompt_tokens or 1) for one, two in turns]
        lost.setdefault(run.label, []).append(sum(share < 0.5 for share in kept))
    page = " ".join(_PAGE.split())
    assert "`warm` computed {} and {} of the 100 later turns".format(*moved["warm"]) in page
    both = [f"`{name}` {moved[name][0]} and {moved[name][1]}" for name in ("joint", "session_sticky")]
    assert f"({', '.join(both)})" in page
    assert lost["warm"][0] == lost["warm"][1]
    assert "in {} (`session_sticky` {} and {}) less than half".format(lost["warm"][0], *lost["session_sticky"]) in page


def test_what_the_page_says_of_hand_offs_by_length() -> None:
    records = _runs("hand-offs-h100-2x")
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
    for run in _runs("hand-offs-h100-4x"):
        records = [each.record() for each in run.requests]
        p90[run.label].append(
            float(np.quantile([each.ttft_scheduled_s for each in records if each.trace_timestamp_s >= 78.3], 0.9))
        )
        longest += [each.ttft_scheduled_s or 0.0 for each in records[:4] if each.input_length == 123_058]
    first, second = sorted(p90["joint"])
    assert f"`joint` ({first:.2f} and {second:.2f} s)" in _PAGE
    assert f"`warm` ({min(p90['warm']):.2f} to {max(p90['warm']):.2f} s)" in _PAGE
    assert f"{min(longest):.1f} to {max(longest):.1f} s for 123,058 tokens" in _PAGE


def test_what_the_page_says_of_runs_on_parts_of_a_gpu() -> None:
    said = {}
    for run in [*_runs("hand-offs-h200-mps"), *_runs("hand-offs-h200-mps-second")]:
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
    assert "mean E2E 6.31 and 7.04 s, TTFT p90 2.07 and 2.57 s" in _PAGE
    assert "6.62 s, 2.29 s; mean TTFT of the three 1.08, 1.24\nand 1.31 s" in _PAGE
    assert "14 and 17 judged requests were handed over" in _PAGE


def test_what_the_page_says_of_engines_of_different_speed() -> None:
    on_slow: dict[str, list[int]] = {}
    runs = [*_runs("unequal-h200-mps-second"), *_runs("unequal-h200-mps-sticky")]
    for run in runs:
        assert len(run.requests) == 516
        on_slow.setdefault(run.label, []).append(sum(each.instance in {"inst-2", "inst-3"} for each in run.requests))
    warm, blind = on_slow["warm"], on_slow["warm,learned_slowness=false"]
    assert f"They got {min(warm)} to {max(warm)} of 516 requests instead of {min(blind)} to {max(blind)}" in _PAGE
    learned = [found for run in runs if run.label == "warm" and (found := learned_slowness(run.requests)).last]
    noticed = sorted(round(found.first_s or 0.0) for found in learned)
    assert f"within {noticed[0]} to {noticed[-1]} s of each run" in _PAGE
    ratios = [slow / fast for found in learned for slow in _of(found, "23") for fast in _of(found, "01")]
    assert f"at {min(ratios):.1f} to {max(ratios):.1f} times the fast ones" in _PAGE
    sticky = [each.record() for each in runs[-1].requests]
    judged = [each for each in sticky if each.trace_timestamp_s >= 24.6]
    mean = np.mean([each.e2e_scheduled_s for each in judged])
    p90 = np.quantile([each.ttft_scheduled_s or 0.0 for each in judged], 0.9)
    assert f"mean E2E {mean:.2f} s, TTFT p90 {p90:.2f} s, {on_slow['session_sticky'][0]} requests" in _PAGE


def test_what_the_page_says_of_one_slow_engine() -> None:
    on_slow: dict[str, list[int]] = {}
    noticed = []
    for run in _runs("one-slow-h200-mps"):
        assert len(run.requests) == 777
        on_slow.setdefault(run.label, []).append(sum(each.instance == "inst-3" for each in run.requests))
        found = learned_slowness(run.requests)
        assert max(found.last, key=found.last.__getitem__) == "inst-3"
        noticed.append(round(found.first_s or 0.0))
    warm, blind = on_slow["warm"], on_slow["warm,learned_slowness=false"]
    assert f"got {min(warm)} to {max(warm)} of 777 requests instead of {min(blind)} to {max(blind)}" in _PAGE
    assert f"known after {min(noticed)} to {max(noticed)} s of runs" in _PAGE


def _of(found: LearnedSlowness, numbers: str) -> list[float]:
    return [found.last[f"inst-{number}"] for number in numbers]


def test_what_the_page_says_of_sessions_of_claude_code() -> None:
    runs = {
        (run.label, run.repeat): [each.record() for each in run.requests] for run in _runs("hand-offs-h200-mps-claude")
    }
    warming = {run: [each for each in found if each.trace_timestamp_s < 248.2] for run, found in runs.items()}
    waits = {run: f"{np.mean([each.ttft_scheduled_s for each in found]):.1f}" for run, found in warming.items()}
    assert waits == {("warm", 0): "13.0", ("warm", 1): "13.1", ("joint", 0): "14.7", ("joint", 1): "15.2"}
    assert "mean TTFT 14.7 and 15.2 s, `warm` 13.0 and\n13.1 s; 16 of the 19 hand-offs of a run are there" in _PAGE
    handed = {run: [each.prefill_instance is not None for each in found] for run, found in runs.items()}
    assert [sum(handed["joint", repeat]) for repeat in (0, 1)] == [19, 19]
    assert [sum(each.prefill_instance is not None for each in warming["joint", repeat]) for repeat in (0, 1)] == [
        16,
        16,
    ]
    assert {len(found) for found in warming.values()} == {98}
    unanswered = [549 - len(found) for found in runs.values()]
    assert f"with {min(unanswered)} to {max(unanswered)} of 549 requests unanswered" in _PAGE
    assert all(each.ok for found in runs.values() for each in found)


def test_what_the_page_says_of_contexts_that_moved() -> None:
    for run in _runs("hand-offs-h100-4x-second"):
        if run.label == "joint":
            records = sorted([each.record() for each in run.requests], key=_sent)
            handed = [each for each in records if each.prefill_instance is not None]
            judged = [each for each in handed if each.trace_timestamp_s >= 90.1]
            assert (len(handed), len(judged), f"{_sent(handed[-1]):.0f}") == (12, 7, "107")
            assert _moved_from_busy_instances(records, until_s=112.0) == (17, 17)


def test_what_the_page_says_of_the_specialist_that_stays() -> None:
    fourth = _runs("hand-offs-h100-4x-fourth")
    third = _runs("hand-offs-h100-4x-third")
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
    for run in _runs("hand-offs-h100-4x-fourth"):
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
        assert f"| {name} | {len(group):,} | {row} |" in _PAGE


def test_what_the_page_says_of_an_order_of_prefills() -> None:
    times: dict[str, list[float]] = {"warm": [], "warm,slowdown=0": [], "llmd_affinity": []}
    long: dict[str, list[float]] = {label: [] for label in times}
    sent = preempted = 0
    for run in _runs("order-h100-4x"):
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


def test_what_the_page_says_of_an_order_for_chat_and_for_agents() -> None:
    waits: dict[str, dict[str, list[tuple[float, int]]]] = {}
    for name, skip_first_s in (("conversations", 26.0), ("agents", 75.2)):
        for run in _runs(f"order-h100-4x-{name}"):
            assert all(int(counter.preemptions) == 0 for counter in run.counters)
            found = waits.setdefault(name, {}).setdefault(run.label, [])
            for each in (each.record() for each in run.requests):
                assert each.ok
                if each.trace_timestamp_s >= skip_first_s:
                    assert each.ttft_scheduled_s is not None
                    found.append((each.ttft_scheduled_s, each.input_length - (each.cached_tokens or 0)))
    chat, agents = ([found[label] for label in ("warm", "warm,slowdown=0")] for found in waits.values())
    page = " ".join(_PAGE.split())
    long = [np.mean([wait for wait, new in each if new >= 32_000]) for each in chat]
    longest = [max(wait for wait, _ in each) for each in chat]
    assert f"wait {long[0]:.1f} instead of {long[1]:.1f} s on average; the longest wait is" in page
    assert f"the longest wait is {longest[0]:.0f} instead of {longest[1]:.0f} s" in page
    p95 = [np.quantile([wait for wait, _ in each], 0.95) for each in agents]
    assert f"(p95 {p95[0]:.1f} and {p95[1]:.1f} s)" in page


def test_what_the_page_says_of_single_runs_of_agents() -> None:
    p90: dict[str, list[float]] = {"warm": [], "warm,slowdown=0": []}
    for run in _runs("order-h100-4x-agents"):
        judged = [each for each in (each.record() for each in run.requests) if each.trace_timestamp_s >= 75.2]
        p90[run.label].append(float(np.quantile([each.ttft_scheduled_s for each in judged], 0.9)))
    ordered, plain = (sorted(each) for each in p90.values())
    assert (len(ordered), len(plain)) == (2, 2)
    assert min(ordered) > max(plain)
    page = " ".join(_PAGE.split())
    assert (
        f"higher in both runs ({ordered[0]:.1f} and {ordered[1]:.1f} beside {plain[0]:.1f} and {plain[1]:.1f} s)"
        in page
    )


def test_what_the_page_says_of_the_agents_other_stretch() -> None:
    page = " ".join(_PAGE.split())
    p90: dict[str, list[str]] = {}
    behind: list[bool] = []
    answered = 0
    for run in _runs("order-h100-4x-agents-second"):
        records = [each.record() for each in run.requests]
        answered += sum(each.ok for each in records)
        judged = [each for each in records if each.trace_timestamp_s >= 78.3]
        slowest = float(np.quantile([each.ttft_scheduled_s or 0.0 for each in judged], 0.9))
        p90.setdefault(run.label, []).append(f"{slowest:.1f}")
        behind += [
            _behind_a_long_prefill(records, each) for each in judged if 3.0 < (each.ttft_scheduled_s or 0.0) < 10.0
        ]
    assert sorted(p90["warm"]) == ["2.4", "8.7"]
    assert p90["warm,slowdown=0"] == ["2.7"]
    assert f"TTFT p90 is {' and '.join(sorted(p90['warm']))} s in the runs of `warm`, 2.7 s without the order" in page
    assert f"All {answered:,} requests of the other runs" in page
    assert f"{sum(behind)} of the {len(behind)} requests that waited 3 to 10 s" in page


def test_what_the_page_says_of_short_turns_beside_a_bound() -> None:
    page = " ".join(_PAGE.split())
    short: dict[str, list[float]] = {}
    tpot: dict[str, list[float]] = {}
    long: dict[str, list[float]] = {}
    means: dict[str, list[float]] = {}
    answered = 0
    for run in _runs("long-prefills-h100-2x"):
        records = [each.record() for each in run.requests]
        answered += sum(each.ok for each in records)
        judged = [each for each in records if each.trace_timestamp_s >= 74.8]
        for each in judged:
            new = each.input_length - (each.own_prefix_tokens or 0)
            if new < 5_000 and each.tpot_s is not None:
                tpot.setdefault(run.label, []).append(1e3 * each.tpot_s)
            for found, counts in ((short, new < 5_000), (long, new >= 20_000)):
                if counts:
                    found.setdefault(run.label, []).append(each.ttft_scheduled_s or 0.0)
        means.setdefault(run.label, []).append(float(np.mean([each.ttft_scheduled_s for each in judged])))
    neither, bound, both = "warm,slowdown=0", "warm,slowdown=0@bounded", "warm@bounded"
    assert max(*means[bound], *means[both]) < min(means[neither])
    assert (
        f"a mean TTFT of {np.mean(short[both]):.2f} s with both and {np.mean(short[bound]):.2f} s with the bound "
        f"alone, instead of {np.mean(short[neither]):.2f} s, and a TPOT p90 of {np.quantile(tpot[both], 0.9):.0f} and "
        f"{np.quantile(tpot[bound], 0.9):.0f} ms instead of {np.quantile(tpot[neither], 0.9):.0f}; prompts with "
        f"20,000 or more wait "
        f"{np.mean(long[both]):.1f} instead of {np.mean(long[neither]):.1f} s" in page
    )
    assert (
        f"All {answered:,} requests were answered. **Simulated** for these requests (seeds 1 to 4): TTFT p90 -7 %"
        in page
    )


def test_what_the_page_says_of_the_bound_on_chat() -> None:
    page = " ".join(_PAGE.split())
    long: dict[str, list[float]] = {}
    short: dict[str, list[float]] = {}
    waits: dict[str, list[float]] = {}
    e2e: dict[str, list[float]] = {}
    preempted: list[str] = []
    answered = 0
    for run in _runs("long-prefills-h100-2x-chat"):
        records = [each.record() for each in run.requests]
        preempted += [run.label for counter in run.counters for _ in range(int(counter.preemptions))]
        answered += sum(each.ok for each in records)
        judged = [each for each in records if each.trace_timestamp_s >= 34.4]
        e2e.setdefault(run.label, []).append(float(np.mean([each.e2e_scheduled_s for each in judged])))
        for each in judged:
            new = each.input_length - (each.own_prefix_tokens or 0)
            for found, counts in ((waits, True), (short, new < 5_000), (long, new >= 32_000)):
                if counts:
                    found.setdefault(run.label, []).append(each.ttft_scheduled_s or 0.0)
    neither, order, both = "warm,slowdown=0", "warm", "warm@bounded"
    assert max(*e2e[order], *e2e[both]) < min(e2e[neither])
    assert (
        f"Mean E2E is {np.mean(e2e[order]):.1f} and {np.mean(e2e[both]):.1f} instead of {np.mean(e2e[neither]):.1f} s, "
        "below it in every run" in page
    )
    assert (
        f"({len(long[order])} of {len(waits[order]):,} requests of an arm) wait {np.mean(long[order]):.1f} s with the "
        f"order and {np.mean(long[both]):.1f} s with both instead of {np.mean(long[neither]):.1f} s, and the longest "
        f"wait is {max(waits[order]):.0f} and {max(waits[both]):.0f} s instead of {max(waits[neither]):.0f} s. Turns "
        f"with fewer than 5,000 wait {np.mean(short[order]):.1f} and {np.mean(short[both]):.1f} instead of "
        f"{np.mean(short[neither]):.1f} s." in page
    )
    assert preempted == ["warm,slowdown=0@bounded"]
    assert f"All {answered:,} requests were answered, and one was preempted, with the bound alone." in page


def _behind_a_long_prefill(records: list[RequestRecord], record: RequestRecord) -> bool:
    """60,000 tokens or more of a prompt were computed there while it waited, its own included."""
    return any(
        other.instance == record.instance
        and other.input_length - (other.cached_tokens or 0) >= 60_000
        and _sent(other) < (record.first_token_s or 0.0)
        and (other.first_token_s or 0.0) > _sent(record)
        for other in records
    )


def _sent(record: RequestRecord) -> float:
    assert record.sent_s is not None
    return record.sent_s


def _left_a_busy_instance(records: list[RequestRecord], since_s: float) -> int:
    """Later turns that were handed over while an instance with their context computed 20,000 tokens or more of another
    prompt.
    """
    homes: dict[str, set[str | None]] = {}
    count = 0
    for record in sorted(records, key=_sent):
        home = homes.setdefault(record.session_id, set())
        if record.prefill_instance and record.own_prefix_tokens and record.trace_timestamp_s >= since_s:
            count += _computes_a_long_prompt(records, record, home)
        home |= {record.prefill_instance or record.instance, record.instance}
    return count


def _computes_a_long_prompt(records: list[RequestRecord], record: RequestRecord, home: set[str | None]) -> bool:
    return any(
        (other.prefill_instance or other.instance) in home
        and _sent(other) < _sent(record) < (other.first_token_s or 0.0)
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
    for record in [each for each in records if _sent(each) < until_s]:
        where, home = record.prefill_instance or record.instance, homes.get(record.session_id, set())
        if home and (record.own_prefix_tokens or 0) - (record.cached_tokens or 0) > 2_000:
            moved += where not in home
            busy += _computes_a_long_prompt(records, record, home)
        homes.setdefault(record.session_id, set()).update({where, record.instance})
    return moved, busy


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
    assert "three, six, five and six of the seven figures are surely better" in _PAGE
    of_warm, of_joint = (zip(*figures[name], strict=True) for name in ("warm", "joint"))
    assert all(max(joint) < min(warm) for warm, joint in zip(of_warm, of_joint, strict=True))
    refused = CliRunner().invoke(app, [*command, "--repeat", "4"])
    assert refused.exit_code == 2
    assert "no run 4; there are 0, 1, 2, 3" in refused.output


def test_what_the_pages_say_of_whole_answers_and_the_longest_waits_on_parts_of_two_gpus() -> None:
    first: dict[str, list[float]] = {"warm": [], "joint": []}
    whole: dict[str, list[list[float]]] = {"warm": [], "joint": []}
    answered = 0
    for run in _runs("hand-offs-h200-2x-mps"):
        every = [each.record() for each in run.requests]
        answered += sum(each.ok for each in every)
        judged = [each for each in every if each.trace_timestamp_s >= 132.8]
        first[run.label] += [each.ttft_scheduled_s or 0.0 for each in judged]
        whole[run.label].append([each.e2e_scheduled_s or 0.0 for each in judged])
    means = "[`joint`](docs/elastic.md) {:.1f} s | `warm` {:.1f} s |".format(
        *(np.mean(whole[name]) for name in ("joint", "warm"))
    )
    assert means in _README
    assert f"All {answered:,} requests were answered" in _PAGE
    p99 = {name: np.quantile(each, 0.99) for name, each in first.items()}
    longest = {name: max(each) for name, each in first.items()}
    assert "TTFT p99 is {joint:.1f} s beside {warm:.1f} s".format(**p99) in _PAGE
    assert "the longest wait {joint:.0f} instead of {warm:.0f} s".format(**longest) in _PAGE
    slowest = {name: [max(each) for each in runs] for name, runs in whole.items()}
    spans = [f"{min(slowest[name]):.0f} to {max(slowest[name]):.0f} s" for name in ("joint", "warm")]
    e2e_p99 = {name: np.quantile(runs, 0.99) for name, runs in whole.items()}
    assert (
        "the longest judged one of a run took {}, with `warm` {} (E2E p99 {joint:.0f} instead of {warm:.0f} s)".format(
            *spans, **e2e_p99
        )
        in _PAGE
    )
