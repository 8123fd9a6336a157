"""Every condition of the meters: raised by its fault, not by less, and explained by one finding only."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from policies.ledger import Ledger
from policies.predict.exact_index import ExactIndex, StoredBlocks
from proxy.events.subscriber import EventSubscriber
from proxy.fleet.instances import Instances
from proxy.fleet.models import ModelList
from proxy.meters.checks import MEANINGS, REMEDIES, Checks
from proxy.meters.engine import EngineMeter, EngineSums, LoadReading
from proxy.meters.session_headers import SessionHeaders
from proxy.settings import Settings, load_settings

PAGE = Path(__file__).parents[3] / "docs" / "meters.md"
REPEAT = EngineSums(requests=1, prompt_tokens=1_000, predicted_tokens=500, repeats=1)


class Rig:
    """Checks over two instances, a and b, whose events are followed; a clock that steps over both delays."""

    def __init__(self, *, ordered: bool = False, **meters: Any) -> None:
        instances = [
            {"name": name, "url": f"http://127.0.0.1:{port}", "events_url": f"tcp://127.0.0.1:{port + 1}"}
            | {"priority_scheduling": ordered}
            for name, port in (("a", 7_000), ("b", 8_000))
        ]
        settings: Settings = load_settings(None, instances=instances, meters={"min_requests": 10, **meters})
        self.exact = ExactIndex(block_tokens=4)
        self.ledger = Ledger()
        for name in "ab":
            self.exact.add_instance(name)
        self.instances = Instances(settings.instances, settings.health)
        for each in self.instances:
            each.up = True
        self.events = EventSubscriber(settings.instances, settings.events, self.exact)
        self.engines = {name: EngineMeter(settings.meters.window_s) for name in "ab"}
        self.headers = SessionHeaders()
        self.checks = Checks(settings.meters, self.exact, self.ledger, self.instances, self.events)
        self.now_s = 100.0

    def examine(self, seconds: float = 0.0) -> dict[str, dict[str, str]]:
        """Findings after some seconds, examined every second."""
        for _ in range(int(seconds)):
            self.now_s += 1.0
            self.checks.examine(self.engines, self.headers, 0, self.now_s)
        return {name: found for name, found in self.checks.failing.items() if found}

    def add(self, sums: EngineSums, times: int = 10) -> None:
        """Add the same request several times to instance a."""
        for _ in range(times):
            self.engines["a"].add(sums, self.now_s)


def test_a_healthy_fleet_raises_nothing() -> None:
    rig = Rig()
    rig.add(REPEAT._replace(reported_tokens=500, exact_requests=1, exact_tokens=500), 50)
    for name in "ab":
        rig.exact.reset(name)
        rig.exact.store(name, StoredBlocks([1], None, [1, 2, 3, 4], 4, 1))
    assert rig.examine(20) == {}
    assert set(rig.checks.failing) == set(REMEDIES) == set(MEANINGS)


@pytest.mark.parametrize(
    ("name", "sums"),
    [
        ("prediction_drift", REPEAT._replace(reported_tokens=250, error_tokens=250)),
        ("cached_token_reports", REPEAT._replace(error_tokens=500)),
        (
            "hybrid_events",
            REPEAT._replace(
                reported_tokens=100, error_tokens=400, exact_requests=1, exact_tokens=500, exact_over_tokens=400
            ),
        ),
        ("transfer_drift", EngineSums(transfers=1, transfer_error_s=5.0, transfer_s=2.0, transfer_predicted_s=7.0)),
        ("transfer_drift", EngineSums(transfers=1, transfer_error_s=5.0, transfer_s=7.0, transfer_predicted_s=2.0)),
    ],
)
def test_a_fault_raises_its_condition_alone_with_enough_requests_and_clears(name: str, sums: EngineSums) -> None:
    rig = Rig(window_s=60)
    rig.add(sums, 9)
    assert rig.examine(5) == {}
    rig.add(sums, 1)
    assert rig.examine(2) == {}
    assert list(rig.examine(2)) == [name]
    assert set(rig.checks.failing[name]) == {"a"}
    assert rig.examine(75) == {}


def test_small_errors_raise_nothing() -> None:
    rig = Rig()
    rig.add(REPEAT._replace(reported_tokens=400, error_tokens=100), 100)
    rig.add(EngineSums(transfers=1, transfer_error_s=1.9, transfer_s=2.9, transfer_predicted_s=1.0), 100)
    assert rig.examine(20) == {}


def test_no_hits_by_the_engines_own_counters_mean_that_prefix_caching_is_off() -> None:
    rig = Rig()
    rig.add(REPEAT._replace(error_tokens=500), 20)
    for queries in (0.0, 9_000.0):
        rig.engines["a"].count({"prefix_query_tokens": queries, "prefix_hit_tokens": 0.0}, rig.now_s)
    assert list(rig.examine(4)) == ["prefix_cache"]
    rig.engines["a"].count({"prefix_query_tokens": 9_500.0, "prefix_hit_tokens": 400.0}, rig.now_s)
    assert list(rig.examine(12)) == ["cached_token_reports"]


def test_an_engine_that_reports_a_disabled_prefix_cache_needs_no_requests() -> None:
    rig = Rig()
    rig.engines["b"].caching_off = True
    assert rig.examine(4) == {"prefix_cache": {"b": "its prefix cache is disabled"}}


def test_ledger_and_engine_that_differ_are_named_with_both_figures() -> None:
    rig = Rig()
    rig.engines["b"].readings.extend([LoadReading(2, 40)] * 3)
    assert rig.examine(4) == {"ledger_drift": {"b": "2 requests by the ledger, 40 by the engine"}}


@pytest.mark.parametrize(
    ("ordered", "kept", "broken", "raised"),
    [(True, 2, 8, True), (True, 3, 7, False), (True, 1, 8, False), (False, 0, 90, False)],
)
def test_an_engine_that_does_not_keep_the_order_is_named_with_its_pairs(
    ordered: bool, kept: int, broken: int, raised: bool
) -> None:
    rig = Rig(ordered=ordered)
    rig.ledger.acquire("b", 1, 1, 0.0)
    rig.ledger.account("b").pairs.add(kept, broken)
    text = f"{broken} of {kept + broken} prompts that were to be overtaken were not"
    assert rig.examine(4) == ({"priority_scheduling": {"b": text}} if raised else {})


def test_silent_events_are_found_with_requests_only() -> None:
    rig = Rig()
    assert rig.examine(60) == {}
    for _ in range(3):
        rig.engines["a"].computed(rig.now_s, rig.now_s)
    assert rig.examine(3) == {}
    found = rig.examine(2)
    assert re.fullmatch(r"no events for \d s, in which it computed 3 prompts", found["kv_events"]["a"])
    rig.events.streams["a"].counters.batches += 1
    assert rig.examine(12) == {}


@pytest.mark.parametrize(
    ("reason", "name"),
    [
        ("missed_events", "kv_events"),
        ("unreadable", "kv_events"),
        ("several_cache_groups", "hybrid_events"),
        ("block_size", "block_size"),
    ],
)
def test_events_that_cannot_be_used_are_reported_with_their_reason(reason: str, name: str) -> None:
    rig = Rig()
    rig.exact.distrust("b", reason)
    assert rig.examine(4) == {name: {"b": f"its events are not used: {reason}"}}


def test_an_engine_without_a_prefix_cache_owes_no_events() -> None:
    rig = Rig()
    rig.engines["a"].caching_off = True
    for _ in range(3):
        rig.engines["a"].computed(rig.now_s, rig.now_s)
    assert list(rig.examine(10)) == ["prefix_cache"]


def test_contexts_that_differ_name_the_shorter_and_models_of_one_instance_do_not_count() -> None:
    rig = Rig()
    for name, lengths in (("a", {"m": 64, "only-here": 8}), ("b", {"m": 4096, "unknown": None})):
        cards = [{"id": model, "max_model_len": tokens} for model, tokens in lengths.items()]
        rig.instances.listed(name, ModelList.read(json.dumps({"data": cards}).encode()))
    assert rig.examine(4) == {"context_length": {"a": "at most 64 tokens for m, others 4096"}}
    rig.instances["b"].up = False
    assert rig.examine(12) == {}


def test_block_sizes_that_differ_name_the_minority() -> None:
    rig = Rig()
    for name, size in (("a", 16), ("b", 32)):
        rig.instances[name].block_tokens = size
    assert rig.examine(4) == {"block_size": {"b": "blocks of 32 tokens, others of 16"}}


@pytest.mark.parametrize(
    ("wanted", "agreed_before", "raised"),
    [("auto", False, False), ("auto", True, True), ("always", False, True), ("never", True, False)],
)
def test_seeds_must_be_equal_where_they_were_or_where_it_is_set(wanted: str, agreed_before: bool, raised: bool) -> None:
    rig = Rig(equal_hash_seeds=wanted)
    for start, own in ((100, {"a": 1, "b": 1 if agreed_before else 2}), (200, {"a": 3, "b": 4})):
        for name, engine_hash in own.items():
            rig.exact.reset(name)  # a restart
            rig.exact.store(name, StoredBlocks([engine_hash], None, list(range(start, start + 4)), 4, 1))
    assert list(rig.examine(4)) == (["hash_seed"] if raised else [])


def test_answers_without_the_id_count_only_where_some_engine_has_it() -> None:
    rig = Rig()
    for _ in range(10):
        rig.engines["a"].answered(False)
    assert rig.examine(4) == {}
    rig.engines["b"].answered(True)
    assert rig.examine(4) == {}  # it may be an engine of another kind
    rig.instances["a"].block_tokens = 16
    assert rig.examine(4) == {"engine_headers": {"a": "its last 10 answers do not have the id of x-request-id"}}


def test_lost_session_ids_concern_the_fleet() -> None:
    rig = Rig()
    rig.headers.add(True, [1, 2], 0)
    for turn in range(10):
        rig.headers.add(False, list(range(1, turn + 4)), turn + 2)
    assert set(rig.examine(4)["session_headers"]) == {""}


def test_an_engine_that_is_down_is_left_to_the_condition_instances() -> None:
    rig = Rig()
    rig.exact.distrust("a", "missed_events")
    rig.engines["a"].readings.extend([LoadReading(2, 40)] * 3)
    assert set(rig.examine(4)) == {"kv_events", "ledger_drift"}
    rig.instances["a"].up = False
    assert rig.examine(12) == {}


def test_an_instance_that_leaves_is_forgotten() -> None:
    rig = Rig()
    rig.engines["b"].caching_off = True
    rig.examine(4)
    rig.checks.forget("b")
    assert rig.examine() == {}
    rig.instances.remove("b")
    assert rig.examine(4) == {}


def test_the_page_lists_every_condition_with_its_remedy() -> None:
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert dict(rows) == dict(REMEDIES)
