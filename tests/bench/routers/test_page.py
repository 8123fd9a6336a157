"""The figures of docs/head-to-head.md are those of the kept records; test_page_hand_offs.py has those of hand-offs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from bench.routers.slowness import LearnedSlowness, learned_slowness
from bench.routers.table import lines_of
from replayer.records.runs import RequestRecord
from tests.bench.routers.kept import DOCS, PAGE, README, runs_of, sent_s


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
        ("Claude Code, those who wait", "routers-claude2-h200", None, "warm"),
        ("Claude Code, those who wait, first", "routers-claude-h200-present", None, "warm"),
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
    shown = PAGE.partition(f"<!-- {name}: begin -->")[2].partition(f"<!-- {name}: end -->")[0].strip()
    assert shown == "\n".join(lines_of(runs_of(folder), base, skip_first_s)).strip()


def test_what_the_pages_say_of_uncut_sessions_of_claude_code() -> None:
    e2e: dict[str, list[float]] = {}
    longest: dict[str, list[float]] = {}
    for run in runs_of("routers-claude-h200"):
        every = [each.record() for each in run.requests]
        assert all(each.ok for each in every)
        e2e.setdefault(run.label, []).extend(each.e2e_scheduled_s or 0.0 for each in every)
        longest.setdefault(run.label, []).append(max(each.ttft_scheduled_s or 0.0 for each in every))
    warm, sticky, vllm, joint = (
        f"{np.mean(e2e[name]):.1f}" for name in ("warm", "session_sticky", "vllm:cache_aware", "joint")
    )
    assert f"(mean E2E {sticky} and {warm} s)" in README
    figures = " ".join((DOCS / "figures.md").read_text(encoding="utf-8").split())
    assert f"{warm} s beside [{vllm} s of vLLM Router]" in figures
    assert f"with the same admission: {sticky} s" in figures
    assert f"mean E2E is {warm} s (`joint` {joint} s), vLLM Router's {vllm} s" in PAGE
    waits = sorted([*longest["warm"], *longest["joint"]])
    assert f"{waits[0]:.0f} to {waits[-1]:.0f} s with `warm` and `joint`" in PAGE
    assert "{:.0f} and {:.0f} s with `session_sticky`".format(*sorted(longest["session_sticky"])) in PAGE
    assert "{:.0f} and {:.0f} s with vLLM Router".format(*sorted(longest["vllm:cache_aware"])) in PAGE


def test_what_the_page_says_of_turns_that_left_their_context() -> None:
    moved: dict[str, list[int]] = {}
    lost: dict[str, list[int]] = {}
    for run in runs_of("routers-claude-h200"):
        every = sorted((each.record() for each in run.requests), key=lambda each: (each.session_id, each.turn))
        turns = [(one, two) for one, two in pairwise(every) if one.session_id == two.session_id]
        assert len(turns) == 100
        moved.setdefault(run.label, []).append(sum(one.instance != two.instance for one, two in turns))
        kept = [(two.cached_tokens or 0) / (one.prompt_tokens or 1) for one, two in turns]
        lost.setdefault(run.label, []).append(sum(share < 0.5 for share in kept))
    page = " ".join(PAGE.split())
    assert "`warm` computed {} and {} of the 100 later turns".format(*moved["warm"]) in page
    both = [f"`{name}` {moved[name][0]} and {moved[name][1]}" for name in ("joint", "session_sticky")]
    assert f"({', '.join(both)})" in page
    assert lost["warm"][0] == lost["warm"][1]
    assert "in {} (`session_sticky` {} and {}) less than half".format(lost["warm"][0], *lost["session_sticky"]) in page


def test_what_the_page_says_of_engines_of_different_speed() -> None:
    on_slow: dict[str, list[int]] = {}
    runs = [*runs_of("unequal-h200-mps-second"), *runs_of("unequal-h200-mps-sticky")]
    for run in runs:
        assert len(run.requests) == 516
        on_slow.setdefault(run.label, []).append(sum(each.instance in {"inst-2", "inst-3"} for each in run.requests))
    warm, blind = on_slow["warm"], on_slow["warm,learned_slowness=false"]
    assert f"They got {min(warm)} to {max(warm)} of 516 requests instead of {min(blind)} to {max(blind)}" in PAGE
    learned = [found for run in runs if run.label == "warm" and (found := learned_slowness(run.requests)).last]
    noticed = sorted(round(found.first_s or 0.0) for found in learned)
    assert f"within {noticed[0]} to {noticed[-1]} s of each run" in PAGE
    ratios = [slow / fast for found in learned for slow in _of(found, "23") for fast in _of(found, "01")]
    assert f"at {min(ratios):.1f} to {max(ratios):.1f} times the fast ones" in PAGE
    sticky = [each.record() for each in runs[-1].requests]
    judged = [each for each in sticky if each.trace_timestamp_s >= 24.6]
    mean = np.mean([each.e2e_scheduled_s for each in judged])
    p90 = np.quantile([each.ttft_scheduled_s or 0.0 for each in judged], 0.9)
    assert f"mean E2E {mean:.2f} s, TTFT p90 {p90:.2f} s, {on_slow['session_sticky'][0]} requests" in PAGE


def test_what_the_page_says_of_one_slow_engine() -> None:
    on_slow: dict[str, list[int]] = {}
    noticed = []
    for run in runs_of("one-slow-h200-mps"):
        assert len(run.requests) == 777
        on_slow.setdefault(run.label, []).append(sum(each.instance == "inst-3" for each in run.requests))
        found = learned_slowness(run.requests)
        assert max(found.last, key=found.last.__getitem__) == "inst-3"
        noticed.append(round(found.first_s or 0.0))
    warm, blind = on_slow["warm"], on_slow["warm,learned_slowness=false"]
    assert f"got {min(warm)} to {max(warm)} of 777 requests instead of {min(blind)} to {max(blind)}" in PAGE
    assert f"known after {min(noticed)} to {max(noticed)} s of runs" in PAGE


def _of(found: LearnedSlowness, numbers: str) -> list[float]:
    return [found.last[f"inst-{number}"] for number in numbers]


def test_what_the_page_says_of_an_order_of_prefills() -> None:
    times: dict[str, list[float]] = {"warm": [], "warm,slowdown=0": [], "llmd_affinity": []}
    long: dict[str, list[float]] = {label: [] for label in times}
    sent = preempted = 0
    for run in runs_of("order-h100-4x"):
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
    assert f"All {sent:,} requests were answered, and no engine preempted one" in PAGE
    assert preempted == 0
    p99 = [float(np.quantile(each, 0.99)) for each in (ordered, plain)]
    assert f"TTFT p99 {p99[0]:.0f} instead of {p99[1]:.0f} s, the longest {max(ordered):.0f} instead of" in PAGE
    waits = [float(np.mean(long[label])) for label in ("warm", "warm,slowdown=0")]
    assert f"wait {waits[0]:.1f} instead of {waits[1]:.1f} s on average" in PAGE


def test_what_the_page_says_of_an_order_for_chat_and_for_agents() -> None:
    waits: dict[str, dict[str, list[tuple[float, int]]]] = {}
    for name, skip_first_s in (("conversations", 26.0), ("agents", 75.2)):
        for run in runs_of(f"order-h100-4x-{name}"):
            assert all(int(counter.preemptions) == 0 for counter in run.counters)
            found = waits.setdefault(name, {}).setdefault(run.label, [])
            for each in (each.record() for each in run.requests):
                assert each.ok
                if each.trace_timestamp_s >= skip_first_s:
                    assert each.ttft_scheduled_s is not None
                    found.append((each.ttft_scheduled_s, each.input_length - (each.cached_tokens or 0)))
    chat, agents = ([found[label] for label in ("warm", "warm,slowdown=0")] for found in waits.values())
    page = " ".join(PAGE.split())
    long = [np.mean([wait for wait, new in each if new >= 32_000]) for each in chat]
    longest = [max(wait for wait, _ in each) for each in chat]
    assert f"wait {long[0]:.1f} instead of {long[1]:.1f} s on average; the longest wait is" in page
    assert f"the longest wait is {longest[0]:.0f} instead of {longest[1]:.0f} s" in page
    p95 = [np.quantile([wait for wait, _ in each], 0.95) for each in agents]
    assert f"(p95 {p95[0]:.1f} and {p95[1]:.1f} s)" in page


def test_what_the_page_says_of_single_runs_of_agents() -> None:
    p90: dict[str, list[float]] = {"warm": [], "warm,slowdown=0": []}
    for run in runs_of("order-h100-4x-agents"):
        judged = [each for each in (each.record() for each in run.requests) if each.trace_timestamp_s >= 75.2]
        p90[run.label].append(float(np.quantile([each.ttft_scheduled_s for each in judged], 0.9)))
    ordered, plain = (sorted(each) for each in p90.values())
    assert (len(ordered), len(plain)) == (2, 2)
    assert min(ordered) > max(plain)
    page = " ".join(PAGE.split())
    assert (
        f"higher in both runs ({ordered[0]:.1f} and {ordered[1]:.1f} beside {plain[0]:.1f} and {plain[1]:.1f} s)"
        in page
    )


def test_what_the_page_says_of_the_agents_other_stretch() -> None:
    page = " ".join(PAGE.split())
    p90: dict[str, list[str]] = {}
    behind: list[bool] = []
    answered = 0
    for run in runs_of("order-h100-4x-agents-second"):
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
    page = " ".join(PAGE.split())
    short: dict[str, list[float]] = {}
    tpot: dict[str, list[float]] = {}
    long: dict[str, list[float]] = {}
    means: dict[str, list[float]] = {}
    answered = 0
    for run in runs_of("long-prefills-h100-2x"):
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
    page = " ".join(PAGE.split())
    long: dict[str, list[float]] = {}
    short: dict[str, list[float]] = {}
    waits: dict[str, list[float]] = {}
    e2e: dict[str, list[float]] = {}
    preempted: list[str] = []
    answered = 0
    for run in runs_of("long-prefills-h100-2x-chat"):
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
        and sent_s(other) < (record.first_token_s or 0.0)
        and (other.first_token_s or 0.0) > sent_s(record)
        for other in records
    )
