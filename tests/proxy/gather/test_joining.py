"""JSON answers of several workers become one."""

from __future__ import annotations

from typing import Any

import msgspec

from proxy.gather.peers import PeerAnswer
from proxy.gather.records import PageQuery, resumed
from proxy.gather.rules import READS, changes_workers, join_of

NOW_S = 1.8e9


def test_load_is_summed_and_state_is_the_worst() -> None:
    def row(**fields: Any) -> dict[str, Any]:
        breaker = {"state": "closed", "openings": 1}
        return {"name": "a", "healthy": True, "breaker": breaker, "requests": 2, "in_flight": {"WARM": 2}, **fields}

    worse = row(healthy=False, breaker={"state": "open", "openings": 2}, in_flight={"HEAVY": 1}, requests=1)
    answers = [{"instances": [row()], "departing": []}, {"instances": [worse, row(name="b")], "departing": []}]
    joined = READS["/instances"](answers)["instances"]
    assert [each["name"] for each in joined] == ["a", "b"]
    assert joined[0]["requests"] == 3
    assert joined[0]["in_flight"] == {"WARM": 2, "HEAVY": 1}
    assert joined[0]["healthy"] is False
    assert joined[0]["breaker"] == {"state": "open", "openings": 3}


def test_how_slow_an_instance_is_is_the_mean_of_the_workers_that_know() -> None:
    def slowness(*values: float | None) -> Any:
        answers = [{"instances": [{"name": "a", "slowness": each}], "departing": []} for each in values]
        return READS["/instances"](answers)["instances"][0]["slowness"]

    assert slowness(0.5, None, 0.6) == 0.55
    assert slowness(None, None) is None


def test_ready_needs_every_worker_and_shows_the_account_of_one_that_is_not() -> None:
    good = {"name": "records", "ok": True, "detail": "rows are recorded"}
    bad = {"name": "records", "ok": False, "detail": "writing failed"}
    joined = READS["/ready"](
        [
            {"ready": True, "healthy_instances": ["a", "b"], "conditions": [good]},
            {"ready": False, "healthy_instances": ["b"], "conditions": [bad]},
        ]
    )
    assert joined == {"ready": False, "healthy_instances": ["b"], "conditions": [bad]}


def test_hit_rates_are_weighted_by_the_prompt_tokens_of_each_worker() -> None:
    def meters(tokens: int, achieved: float | None) -> dict[str, Any]:
        fleet = {"window_requests": 1, "prompt_tokens": tokens, "achieved": achieved, "loss": {"routing": 0.5}}
        return {"fleet": fleet, "instances": {}}

    fleet = READS["/meters"]([meters(100, 0.9), meters(300, 0.5), meters(0, None)])["fleet"]
    assert fleet["prompt_tokens"] == 400
    assert fleet["achieved"] == 0.6
    assert fleet["loss"] == {"routing": 0.5}


def test_figures_of_shadows_are_summed_and_their_means_made_of_the_sums() -> None:
    def shadow(requests: int, agreed: int) -> dict[str, Any]:
        regret = {"total": 1.0, "mean": 1.0 / requests, "live_worse": 1.0, "live_better": 0.0}
        figures = {"part": "policy", "name": "linear", "requests": requests, "agreed": agreed, "regret_s": regret}
        return {"requests": requests, "policies": [figures], "latest": [{"unix_s": requests}]}

    joined = READS["/shadow"]([shadow(10, 10), shadow(30, 10)])
    assert joined["requests"] == 40
    assert joined["policies"][0]["agreement"] == 0.5
    assert joined["policies"][0]["regret_s"] == {"total": 2.0, "mean": 0.05, "live_worse": 2.0, "live_better": 0.0}
    assert [each["unix_s"] for each in joined["latest"]] == [30, 10]


def test_requests_that_change_something_reach_every_worker() -> None:
    changes = [("PUT", "/policy"), ("PUT", "/admission"), ("PUT", "/shadow"), ("POST", "/reload")]
    changes += [("POST", "/instances"), ("PUT", "/instances/a"), ("DELETE", "/instances/a")]
    changes += [("POST", "/instances/a/drain"), ("POST", "/instances/a/undrain")]
    assert all(changes_workers(*each) for each in changes)
    for method, path in (("GET", "/policy"), ("POST", "/explain"), ("GET", "/instances"), ("POST", "/v1/completions")):
        assert not changes_workers(method, path)
    assert join_of("GET", "/policy") is None


def page(rows: list[int], before: int | None, after: int, started_unix_s: float = 1.0) -> PeerAnswer:
    body = {
        "rows": [{"row": number, "text": "é"} for number in rows],
        "next": {"before": before, "after": after},
        "proxy_started_unix_s": started_unix_s,
        "unix_s": 2.0,
    }
    return PeerAnswer(0, 200, "application/json", msgspec.json.encode(body))


def test_pages_are_joined_by_number_and_cut_to_the_limit() -> None:
    body, _ = PageQuery(b"limit=3", NOW_S).joined([page([1, 4, 6], None, 6), page([2, 3, 5], 2, 5)])
    found = msgspec.json.decode(body)
    assert [row["row"] for row in found["rows"]] == [4, 5, 6]
    assert found["next"] == {"before": 4, "after": 6}


def test_a_page_names_the_start_of_every_worker_that_answers() -> None:
    body, _ = PageQuery(b"", NOW_S).joined([page([1], None, 1, 4.5), page([2], None, 2, 3.25)])
    found = msgspec.json.decode(body)
    assert (found["proxy_started_unix_s"], found["workers_started_unix_s"]) == (3.25, [3.25, 4.5])


def test_a_page_after_a_row_begins_with_the_oldest() -> None:
    body, _ = PageQuery(b"limit=3&after=0", NOW_S).joined([page([1, 4, 6], 1, 6), page([2, 3, 5], 1, 5)])
    found = msgspec.json.decode(body)
    assert [row["row"] for row in found["rows"]] == [1, 2, 3]
    assert found["next"] == {"before": 1, "after": 3}


def test_rows_that_end_while_workers_are_asked_wait_for_the_next_page() -> None:
    query = PageQuery(b"after=0", NOW_S)
    later = 2**53
    body, _ = query.joined([page([1, later], 1, later), page([2], 1, 2)])
    found = msgspec.json.decode(body)
    assert [row["row"] for row in found["rows"]] == [1, 2]
    assert found["next"]["after"] < later


def test_lines_of_a_download_keep_their_order() -> None:
    query = PageQuery(b"format=jsonl&limit=10", NOW_S)
    assert "format" not in query.target
    body, kind = query.joined([page([2], None, 2), page([1, 3], None, 3)])
    assert kind == "application/x-ndjson"
    assert [msgspec.json.decode(line)["row"] for line in body.splitlines()] == [1, 2, 3]


def test_a_stream_that_resumes_begins_a_second_earlier() -> None:
    assert resumed({b"last-event-id": b"1000000"}) == {"last-event-id": str(1_000_000 - 640_000)}
    assert resumed({}) == {}
    assert resumed({b"last-event-id": b"x"}) == {}


def test_the_ranks_of_an_engine_are_joined_one_by_one() -> None:
    def row(rank: int, requests: int) -> dict[str, Any]:
        return {"name": f"a/{rank}", "breaker": {"state": "closed", "openings": 0}, "requests": requests}

    drained = join_of("POST", "/instances/a/drain")
    removed = join_of("DELETE", "/instances/a")
    assert drained is not None
    assert removed is not None
    joined = drained([{"name": "a", "ranks": [row(0, 1), row(1, 2)]}, {"name": "a", "ranks": [row(0, 3), row(1, 4)]}])
    assert [(each["name"], each["requests"]) for each in joined["ranks"]] == [("a/0", 4), ("a/1", 6)]
    answers = [{"name": "a", "removed": True, "cut_requests": number} for number in (1, 2)]
    assert removed(answers) == {"name": "a", "removed": True, "cut_requests": 3}
