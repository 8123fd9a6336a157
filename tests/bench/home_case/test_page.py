"""The figures of docs/home-case.md are those of the kept records."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bench.home_case.record import SustainedRun, read_files
from bench.home_case.table import lines_of
from bench.routers.records import RouterRecord, read_records
from bench.routers.table import lines_of as router_lines
from bench.soak.plan import SoakPlan
from bench.soak.samples import trend
from policies.offload import recent_contexts, specialists

DOCS = Path(__file__).parents[3] / "docs"
RECORDS = DOCS / "results" / "home-case-h200-4x"
PAGE = (DOCS / "home-case.md").read_text(encoding="utf-8")
PROSE = " ".join(PAGE.split())
"""The page without its line breaks."""


@pytest.fixture(scope="module")
def sustained() -> SustainedRun:
    return read_files(RECORDS / "sustained")


@pytest.fixture(scope="module")
def routers() -> list[RouterRecord]:
    return list(read_records(RECORDS / "routers").values())


def shown(name: str) -> str:
    """The part of the page between a pair of markers."""
    return PAGE.partition(f"<!-- {name}: begin -->")[2].partition(f"<!-- {name}: end -->")[0].strip()


def test_the_page_shows_the_table_of_the_sustained_run(sustained: SustainedRun) -> None:
    assert shown("sustained") == "\n".join(lines_of(sustained)).strip()


def test_the_page_shows_the_table_of_the_routers(routers: list[RouterRecord]) -> None:
    assert shown("routers") == "\n".join(router_lines(routers, "warm")).strip()


def test_every_request_succeeded_and_nothing_was_left(sustained: SustainedRun) -> None:
    records, found = sustained.run.records, sustained.record
    assert sum(each.ok for each in records) == len(records) == sustained.run.header.offered["requests"] == 1016
    assert len({each.session_id for each in records}) == 72
    assert (found.cut, found.leaks, found.problems, found.idle_after_s) == (False, [], [], 0.03)
    assert "1,016 requests of 72 agent sessions in 199 s" in PROSE
    assert "1,016 of 1,016, without a retry, a fallback, a preemption or a refusal. Nothing was left 0.03 s" in PROSE


def test_the_hit_rate_and_what_was_lost(sustained: SustainedRun) -> None:
    counters = sustained.record.proxy.counters
    prompt, ceiling, achieved = (
        counters[f'warmroute_hit_tokens_total{{kind="{kind}"}}'] for kind in ("prompt", "ceiling", "achieved")
    )
    assert f"{achieved / prompt:.3f} of prompt tokens by the engines' own counters" in PROSE
    assert f"Where every prefix once computed is kept it would be {ceiling / prompt:.3f}" in PROSE
    lost = [counters[f'warmroute_hit_loss_tokens_total{{cause="{cause}"}}'] for cause in ("routing", "eviction")]
    assert sum(lost) == ceiling - achieved
    assert f"routing lost {lost[0]:,.0f} tokens and eviction {lost[1]:,.0f}" in PROSE


def test_predictions_of_the_cache_were_exact(sustained: SustainedRun) -> None:
    assert all(row["predicted_cached_tokens"] == row["actual_cached_tokens"] for row in sustained.rows)
    assert {row["index_source"] for row in sustained.rows} == {"exact"}


def test_predictions_of_ttft_by_class(sustained: SustainedRun) -> None:
    def factors(*classes: str) -> tuple[float, float]:
        """Median of actual / predicted, and the factor that half of the predictions are within."""
        legs = [row["legs"]["first_token"] for row in sustained.rows if row["class"] in classes]
        logs = np.log([leg["actual_s"] / leg["predicted_s"] for leg in legs])
        return float(np.exp(np.median(logs))), float(np.exp(np.median(np.abs(logs))))

    ratio, half = factors("WARM", "MEDIUM", "HEAVY")
    assert f"within a factor of {half:.2f} in half of the requests; actual / predicted is {ratio:.2f}" in PROSE
    heavy, medium, warm = factors("HEAVY"), factors("MEDIUM"), factors("WARM")
    assert f"{heavy[0]:.2f} for HEAVY requests (a factor of {heavy[1]:.2f} in half)" in PROSE
    assert f"{medium[0]:.2f} for MEDIUM ({medium[1]:.2f}) and {warm[0]:.2f} for WARM ({warm[1]:.2f})" in PROSE


def test_reasons_of_the_planner_and_of_admission(sustained: SustainedRun) -> None:
    reasons = Counter(row["offload_reason"] for row in sustained.rows)
    assert reasons == {"below_threshold": 788, "does_not_pay": 228}
    priced = [row["offload_inputs"] for row in sustained.rows if row["offload_reason"] == "does_not_pay"]
    later = sum(inputs["own_gain_s"] < 0 for inputs in priced)
    assert (
        f"the other 228 (`does_not_pay`) the first token would have come later by way of another instance in {later}"
        in PROSE
    )
    admitted = Counter(row["admission"] for row in sustained.rows)
    assert f"{admitted['resident']} requests continued a session that it knew, {admitted['room']} found room" in PROSE
    assert not any(row["held_s"] for row in sustained.rows)


def test_the_use_of_the_proxy(sustained: SustainedRun) -> None:
    proxy, requests = sustained.record.proxy, len(sustained.run.records)
    assert proxy.cpu_s is not None
    events = sum(row["completion_tokens"] for row in sustained.rows) / requests
    share = 100 * proxy.cpu_s / sustained.record.replay_s
    assert (
        f"{1e3 * proxy.cpu_s / requests:.1f} ms of CPU a request** of 50,803 token ids and {events:.0f} output tokens, "
        f"{share:.1f} % of one core"
    ) in PROSE
    first, last = proxy.samples[0], proxy.samples[-1]
    assert (first.descriptors, proxy.descriptors_most, last.descriptors) == (36, 132, 37)
    assert f"from {first.rss_bytes / 2**20:.0f} to {last.rss_bytes / 2**20:.0f} MiB" in PROSE


def test_the_growth_of_memory(sustained: SustainedRun) -> None:
    samples = sustained.record.proxy.samples
    mib = {each.at_s: each.rss_bytes / 2**20 for each in samples}
    half = next(at_s for at_s in mib if at_s >= 100)
    risen = [mib[half] - samples[0].rss_bytes / 2**20, samples[-1].rss_bytes / 2**20 - mib[half]]
    assert f"rose by {risen[0]:.0f} MiB in the first 100 s" in PROSE
    assert f"by {risen[1]:.0f} MiB in the next 86 s and not at all in the last 12" in PROSE
    assert len({rss for at_s, rss in mib.items() if at_s >= samples[-1].at_s - 12.6}) == 1
    plan = SoakPlan()
    warm = {at_s: rss for at_s, rss in mib.items() if at_s >= plan.warm_up_share * samples[-1].at_s}
    grown = trend(list(warm), list(warm.values())).over_window
    assert f"that is {grown:.1f} MiB, within its bound of {plan.rss_growth_mb:.0f}" in PROSE


def test_the_contexts_of_the_trace(sustained: SustainedRun) -> None:
    last = {each.session_id: each.prompt_tokens or 0 for each in sorted(sustained.run.records, key=lambda r: r.turn)}
    contexts, pools = sum(last.values()), sum(each.pool_tokens for each in sustained.record.engines)
    assert f"grow to {contexts / 1e6:.1f} M tokens, against {pools / 1e6:.2f} M of the pools" in PROSE
    assert f"end at {contexts / len(last) / 1e3:.0f},000 tokens, 27 times the bound" in PROSE


def test_the_bounds_of_specialists_are_those_of_the_rule(sustained: SustainedRun) -> None:
    pool = sustained.record.engines[0].pool_tokens
    most = specialists.ROOM * 3 * pool
    rate = most / recent_contexts.WINDOW_S
    assert specialists.ROOM == 0.8
    assert f"0.8 x 3 x {pool:,} = {most / 1e6:.2f} M tokens: {rate / 1e3:.1f}k tokens of new contexts" in PROSE
    share = 0.5 / specialists.SHARE
    assert share == pytest.approx(2 / 3)
    transfers = (DOCS / "instruments.md").read_text(encoding="utf-8").partition("### Transfers over NVLink")[2]
    for tokens, seconds in ((32_768, 1.171), (65_536, 3.584), (131_072, 12.17)):
        row = next(line for line in transfers.splitlines() if line.startswith(f"| {tokens:,} |"))
        assert row.split(" | ")[5] == f"{1e3 * seconds:,.0f}", "ms of the prefill that a transfer replaces"
        takes = share * tokens / seconds
        assert re.search(
            rf"{takes / 1e3:.1f}k (tokens a second )?in prompts of {tokens:,}( tokens)? \({seconds:.3f} s", PROSE
        )
        assert takes > rate
    eight = rate * 7 / 3
    assert f"0.8 x 7 pools are {eight / 1e3:.1f}k tokens a second" in PROSE
    assert eight < share * 131_072 / 12.17


def test_no_difference_of_the_routers_is_sure(routers: list[RouterRecord]) -> None:
    assert {(each.label, each.repeat) for each in routers} == {("warm", 0), ("vllm:cache_aware", 0)}
    table = shown("routers")
    assert "**better**" not in table
    assert "**worse**" not in table
