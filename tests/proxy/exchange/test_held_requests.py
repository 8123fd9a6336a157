"""Requests that the admission rule holds, through the proxy: what they wait for, what ends it, and what is recorded."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from typing import Any, ClassVar

import httpx
import pytest
from aiohttp import web

from policies.admission.base import AdmissionReason, AdmissionView, Admit, Hold, SessionView
from policies.admission.line import AdmittedFlow
from policies.types import RequestView
from tests.proxy.conftest import Running, StartProxy, ledger_is_zero
from tests.proxy.stub_engine import StubEngine

ONE_AT_A_TIME = {"name": "session_cap", "params": {"sessions": 1, "keep_s": 0.0}}


@dataclasses.dataclass
class GatedEngine(StubEngine):
    """Answers no request before ``open`` is set."""

    open: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await self.open.wait()
        return await super()._answer(request, body)


class Fleet:
    """A proxy in front of gated engines, and its clients, one session each."""

    def __init__(self, running: Running, engines: list[GatedEngine]) -> None:
        self.running = running
        self.engines = engines
        self.core = running.core
        self.tasks: dict[str, asyncio.Task[httpx.Response]] = {}

    def ask(self, session: str, name: str | None = None, **fields: Any) -> asyncio.Task[httpx.Response]:
        body = {"model": "stub", "prompt": list(range(100)), "max_tokens": 4, **fields}
        headers = {"x-session-id": session, "x-request-id": name or session}
        asking = self.running.client.post("/v1/completions", json=body, headers=headers)
        task = self.tasks[name or session] = asyncio.create_task(asking)
        return task

    async def held(self, count: int) -> None:
        await self.running.until(lambda: len(self.core.holding) == count)

    async def at_engines(self, count: int) -> None:
        await self.running.until(lambda: sum(engine.running for engine in self.engines) == count)

    async def one_runs_and_waits(self, *others: str) -> None:
        """Session ``a`` is at an engine, and the ``others`` are held, in this order."""
        self.ask("a")
        await self.at_engines(1)
        for count, other in enumerate(others, 1):
            self.ask(other)
            await self.held(count)

    def open(self) -> None:
        for engine in self.engines:
            engine.open.set()

    async def answers(self) -> dict[str, httpx.Response]:
        return {name: await task for name, task in self.tasks.items()}

    async def row(self, name: str) -> dict[str, Any]:
        await self.running.settled()
        return await self.row_of_finished(name)

    async def row_of_finished(self, name: str) -> dict[str, Any]:
        """The row of a request that has ended, while others are in progress."""
        for _ in range(400):
            if rows := await self.running.rows(request_id=name):
                return rows[0]
            await asyncio.sleep(0.02)
        raise AssertionError(f"no row of {name}")

    async def put(self, **body: Any) -> dict[str, Any]:
        answer = await self.running.client.put("/admission", json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def metric(self, sample: str) -> float:
        for line in (await self.running.client.get("/metrics")).text.splitlines():
            if line.startswith(f"{sample} "):
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"no sample {sample}")

    async def nothing_left(self) -> None:
        stats = await self.running.settled()
        assert ledger_is_zero(stats)
        assert (stats["holding"]["held"], stats["holding"]["line"]) == (0, [])
        accounts, holding = self.core.router.state.accounts, self.core.holding
        assert (accounts.active_sessions, accounts.active_tokens) == (0, 0)
        assert len(self.core.router.routing.gate) == 0
        assert holding._timer is None


@pytest.fixture
def start(start_proxy: StartProxy) -> Any:
    async def started(count: int = 1, **settings: Any) -> Fleet:
        engines = [GatedEngine() for _ in range(count)]
        settings["admission"] = {**ONE_AT_A_TIME, **settings.get("admission", {})}
        return Fleet(await start_proxy(engines=engines, **settings), engines)

    return started


async def test_a_held_request_costs_no_engine_and_is_sent_when_there_is_room(start: Any) -> None:
    fleet = await start()
    await fleet.one_runs_and_waits("b", "c")
    stats = (await fleet.running.client.get("/stats")).json()
    assert (stats["admission"]["in_flight"], stats["admission"]["waiting"], stats["ledger"]["requests"]) == (1, 0, 1)
    assert [len(engine.seen) for engine in fleet.engines] == [1]
    fleet.open()
    answers = await fleet.answers()
    assert {answer.status_code for answer in answers.values()} == {200}
    assert "x-warmroute-held-s" not in answers["a"].headers
    assert 0 < float(answers["b"].headers["x-warmroute-held-s"]) < 60
    first, held = await fleet.row("a"), await fleet.row("b")
    assert (first["admission"], first["held_s"], "held" in first["stages_ms"]) == ("below_cap", 0.0, False)
    assert (held["admission"], held["outcome"]) == ("below_cap", "ok")
    assert held["stages_ms"]["held"] == pytest.approx(held["held_s"] * 1e3, abs=1.0)
    assert held["stages_ms"]["total"] >= held["stages_ms"]["held"] > 0
    await fleet.nothing_left()


async def test_a_turn_of_a_session_in_flight_is_not_held(start: Any) -> None:
    fleet = await start()
    await fleet.one_runs_and_waits("b")
    fleet.ask("a", "a-again")
    await fleet.at_engines(2)
    assert len(fleet.core.holding) == 1
    fleet.open()
    await fleet.answers()
    assert (await fleet.row("a-again"))["admission"] == "resident"
    await fleet.nothing_left()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_session_is_kept_from_the_end_of_its_request_on(start: Any, stream: bool) -> None:
    fleet = await start(admission={"params": {"sessions": 1, "keep_s": 600.0}})
    fleet.ask("a", stream=stream)
    await fleet.at_engines(1)
    running_s = time.monotonic()
    fleet.open()
    await fleet.answers()
    await fleet.running.settled()
    accounts = fleet.core.router.state.accounts
    assert (accounts.active_sessions, accounts.kept_sessions) == (0, 1)
    [kept] = accounts._kept.values()
    assert kept.since_s > running_s
    fleet.ask("b")
    await fleet.held(1)  # the first session is kept
    assert (await fleet.ask("a", "a-again")).status_code == 200
    assert (await fleet.row_of_finished("a-again"))["admission"] == "resident"
    fleet.tasks.pop("b").cancel()
    await fleet.held(0)
    await fleet.nothing_left()


async def test_nobody_is_held_beyond_the_bound(start: Any) -> None:
    fleet = await start(admission={"max_hold_s": 0.3})
    fleet.ask("a")
    await fleet.at_engines(1)
    fleet.ask("b")
    await fleet.at_engines(2)  # although the first is not answered yet
    fleet.open()
    answers = await fleet.answers()
    assert float(answers["b"].headers["x-warmroute-held-s"]) >= 0.3
    assert (await fleet.row("b"))["admission"] == "held_long_enough"
    assert await fleet.metric('warmroute_hold_seconds_count{end="at_bound"}') == 1
    await fleet.nothing_left()


async def test_bounds_on_queue_and_connections_do_not_end_a_hold(start: Any) -> None:
    short = {"header_s": 0.2, "body_s": 0.2, "client_stall_s": 0.2}
    fleet = await start(timeouts=short, limits={"queue_timeout_s": 0.2})
    await fleet.one_runs_and_waits("b")
    await asyncio.sleep(1.2)  # several times each of the bounds
    assert len(fleet.core.holding) == 1
    fleet.open()
    assert {answer.status_code for answer in (await fleet.answers()).values()} == {200}
    await fleet.nothing_left()


async def test_a_client_that_leaves_is_forgotten_at_once(start: Any) -> None:
    fleet = await start()
    await fleet.one_runs_and_waits("b", "c")
    fleet.tasks.pop("b").cancel()
    await fleet.held(1)
    assert len(fleet.core.router.routing.gate) == 1
    fleet.open()
    assert (await fleet.answers())["c"].status_code == 200
    row = await fleet.row("b")
    assert (row["outcome"], row["admission"], row["instance"]) == ("client_gone", None, None)
    assert row["held_s"] > 0
    assert [len(engine.seen) for engine in fleet.engines] == [2]
    assert await fleet.metric('warmroute_hold_seconds_count{end="left"}') == 1
    assert await fleet.metric('warmroute_hold_seconds_count{end="sent"}') == 1
    await fleet.nothing_left()


async def test_held_requests_survive_other_switches_and_follow_a_switch_of_the_rule(start: Any) -> None:
    fleet = await start(admission={"max_hold_s": 600.0})
    await fleet.one_runs_and_waits("b", "c", "d")
    assert (await fleet.running.client.put("/policy", json={"name": "lmetric"})).status_code == 200
    assert (await fleet.put(max_hold_s=500.0))["held"] == 3
    switched = await fleet.put(params={"sessions": 2, "keep_s": 0.0})
    assert (switched["name"], switched["params"]["sessions"], switched["max_hold_s"]) == ("session_cap", 2, 500.0)
    await fleet.held(2)
    await fleet.at_engines(2)
    await fleet.put(name="never_hold")
    await fleet.held(0)
    await fleet.at_engines(4)
    fleet.open()
    assert {answer.status_code for answer in (await fleet.answers()).values()} == {200}
    assert (await fleet.row("d"))["admission"] == "never_holds"
    await fleet.nothing_left()


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"name": "nope"}, "session_cap"),
        ({"name": "session_cap", "params": {"session": 3}}, "sessions"),
        ({"params": {"sessions": 0}}, "sessions"),
        ({"params": {"keep_s": 1e300}}, "keep_s"),
        ({"max_hold_s": 0}, "max_hold_s"),
        ({"nmae": "session_cap"}, "nmae"),
    ],
)
async def test_a_bad_switch_changes_nothing_and_says_what_exists(start: Any, body: dict[str, Any], named: str) -> None:
    fleet = await start()
    before = (await fleet.running.client.get("/admission")).json()
    answer = await fleet.running.client.put("/admission", json=body)
    assert (answer.status_code, named in answer.json()["error"]["message"]) == (400, True)
    assert (await fleet.running.client.get("/admission")).json() == before
    assert before["known_rules"] == ["never_hold", "session_cap", "working_set"]


async def test_numbers_without_end_are_refused(start: Any) -> None:
    fleet = await start()
    answer = await fleet.running.client.put(
        "/admission",
        content=b'{"name": "working_set", "params": {"fill": 1e999}}',
        headers={"content-type": "application/json"},
    )
    assert (answer.status_code, "finite" in answer.text) == (400, True)


async def test_above_max_held_requests_are_sent(start: Any) -> None:
    fleet = await start(admission={"max_held": 1})
    await fleet.one_runs_and_waits("b")
    fleet.ask("c")
    await fleet.at_engines(2)
    assert len(fleet.core.holding) == 1
    fleet.open()
    await fleet.answers()
    assert (await fleet.row("c"))["admission"] == "line_full"
    await fleet.nothing_left()


async def test_a_long_expected_wait_is_answered_at_once_if_so_configured(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = await start(admission={"reject_above_s": 30.0})
    await fleet.one_runs_and_waits("b")
    monkeypatch.setattr(AdmittedFlow, "wait_s", lambda *_: 41.2)
    refused = await fleet.ask("c")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "wait_too_long")
    assert refused.headers["retry-after"] == "42"
    monkeypatch.setattr(AdmittedFlow, "wait_s", lambda *_: 29.0)
    fleet.ask("d")
    await fleet.held(2)
    fleet.open()
    assert (await fleet.answers())["d"].status_code == 200
    assert (await fleet.row("c"))["outcome"] == "wait_too_long"
    assert await fleet.metric("warmroute_hold_refused_total") == 1
    await fleet.nothing_left()


async def test_a_retry_is_not_held(start: Any) -> None:
    fleet = await start(2, policy={"name": "round_robin"}, admission={"params": {"sessions": 2, "keep_s": 0.0}})
    fleet.ask("a")
    await fleet.at_engines(1)
    [first], [other] = ([each for each in fleet.engines if bool(each.running) is busy] for busy in (True, False))
    fleet.ask("b")
    await fleet.at_engines(2)
    await fleet.put(params={"sessions": 1, "keep_s": 0.0})  # a new session would be held now
    first.mode = "error"
    first.open.set()
    await fleet.running.until(lambda: other.running == 2)
    fleet.open()
    assert {answer.status_code for answer in (await fleet.answers()).values()} == {200}
    row = await fleet.row("a")
    assert (len(row["attempts"]), row["held_s"], row["admission"]) == (1, 0.0, "below_cap")
    await fleet.nothing_left()


async def test_an_admitted_request_still_waits_for_a_place(start: Any) -> None:
    fleet = await start(limits={"max_in_flight_per_instance": 1})
    await fleet.one_runs_and_waits("b", "c")
    await fleet.put(name="never_hold")
    await fleet.running.until(lambda: fleet.core.admission.waiting >= 1)
    assert fleet.engines[0].running == 1
    fleet.open()
    assert {answer.status_code for answer in (await fleet.answers()).values()} == {200}
    assert (await fleet.row("b"))["stages_ms"]["queued"] > 0
    await fleet.nothing_left()


async def test_the_line_waits_while_no_instance_is_well_and_is_sent_when_one_is(start: Any) -> None:
    fleet = await start(health={"interval_s": 600.0, "timeout_s": 5.0})
    await fleet.one_runs_and_waits("b")
    instance = fleet.core.instances["inst-0"]
    fleet.core.instances.probe_failed(instance, "gone", refused=True)
    assert not instance.healthy
    refused = await fleet.ask("c")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_instance")
    fleet.open()
    assert (await fleet.tasks["a"]).status_code == 200
    await fleet.running.until(lambda: not fleet.core.router.state.accounts.active_sessions)
    fleet.core.holding._look()
    assert len(fleet.core.holding) == 1
    fleet.core.instances.probed(instance)
    assert (await fleet.tasks["b"]).status_code == 200
    await fleet.nothing_left()


async def test_statistics_and_explanations_have_a_sentence(start: Any) -> None:
    fleet = await start()
    body = {"model": "stub", "prompt": list(range(100)), "max_tokens": 4}
    explained = (await fleet.running.client.post("/explain", json=body)).json()["admission"]
    assert (explained["answer"], explained["reason"]) == ("send", "below_cap")
    assert explained["sentence"] == "would be sent at once: below cap"
    await fleet.one_runs_and_waits("b", "c")
    explained = (await fleet.running.client.post("/explain", json=body)).json()["admission"]
    assert (explained["rule"], explained["answer"], explained["behind"]) == ("session_cap", "hold", 2)
    assert explained["sentence"] == (
        "would be held: as many sessions as permitted are in flight or kept, third in line"
    )
    line = (await fleet.running.client.get("/stats")).json()["holding"]["line"]
    assert [(each["request_id"], each["session_id"]) for each in line] == [("b", "b"), ("c", "c")]
    assert line[1]["sentence"].startswith("held ")
    assert len(fleet.core.holding) == 2  # explaining has added nobody
    fleet.open()
    await fleet.answers()
    await fleet.nothing_left()


async def test_metrics_have_the_line_and_the_working_set(start: Any) -> None:
    fleet = await start(2)
    await fleet.one_runs_and_waits("b")
    assert await fleet.metric("warmroute_held_requests") == 1
    assert await fleet.metric('warmroute_working_set_tokens{state="active"}') == 100
    assert await fleet.metric("warmroute_pool_tokens") == 2 * 160_000
    assert await fleet.metric("warmroute_recomputation_ratio") == 0
    fleet.open()
    await fleet.answers()
    await fleet.running.settled()
    assert await fleet.metric("warmroute_held_requests") == 0
    assert await fleet.metric('warmroute_working_set_tokens{state="active"}') == 0
    assert await fleet.metric('warmroute_admissions_total{reason="below_cap"}') == 2
    assert await fleet.metric('warmroute_hold_seconds_count{end="sent"}') == 1


async def test_tokens_that_no_engine_holds_any_more_are_counted_as_lost(start: Any) -> None:
    fleet = await start(2, policy={"name": "round_robin"}, admission={"name": "never_hold", "params": {}})
    fleet.open()
    for turn in range(2):
        assert (await fleet.ask("a", f"turn {turn}")).status_code == 200
    # Round robin has sent the second turn to the other engine, which computes again what the first one still holds.
    assert await fleet.metric("warmroute_lost_tokens_total") == 0
    assert await fleet.metric("warmroute_recomputation_ratio") == 0
    for name in fleet.core.router.state.instances:
        fleet.core.router.state.restarted(name)
    assert (await fleet.ask("a", "turn 2")).status_code == 200
    # The 6 full blocks of 16 tokens.
    assert await fleet.metric("warmroute_lost_tokens_total") == 96
    assert await fleet.metric("warmroute_recomputation_ratio") > 0


@dataclasses.dataclass(frozen=True)
class Odd:
    """A rule that gives a scripted answer."""

    answer: Any
    keep_s: float = 0.0
    name: ClassVar[str] = "odd"

    def admit(self, request: RequestView, session: SessionView, fleet: AdmissionView) -> Admit | Hold:
        if isinstance(self.answer, Exception):
            raise self.answer
        answer: Admit | Hold = self.answer
        return answer


@pytest.mark.parametrize(
    "answer",
    [
        KeyError("a key that every request lacks"),
        None,
        "hold",
        Admit("mine"),  # type: ignore[arg-type]
        Hold(AdmissionReason.AT_CAP, "many"),  # type: ignore[arg-type]
        (AdmissionReason.AT_CAP,),
        Admit(AdmissionReason.ROOM, ["engine"]),  # type: ignore[arg-type]
    ],
    ids=["raises", "none", "text", "a reason of its own", "no number", "a tuple", "a list of instances"],
)
async def test_a_failing_rule_fails_no_request(start: Any, answer: Any) -> None:
    fleet = await start()
    await fleet.one_runs_and_waits("b")
    router = fleet.core.router
    router.routing.set_admission(Odd(answer), 600.0, 0.0)
    fleet.core.holding.wake()
    await fleet.held(0)
    fleet.ask("c")
    await fleet.at_engines(3)
    fleet.open()
    assert {answer.status_code for answer in (await fleet.answers()).values()} == {200}
    assert {(await fleet.row(name))["admission"] for name in "bc"} == {"rule_failed"}
    assert await fleet.metric('warmroute_policy_failures_total{name="odd",part="admission"}') == 2
    conditions = (await fleet.running.client.get("/ready?verbose")).json()["conditions"]
    [shown] = [each for each in conditions if each["name"] == "admission"]
    assert (shown["ok"], "odd failed 2 times" in shown["detail"], "PUT /admission" in shown["remedy"]) == (
        False,
        True,
        True,
    )
    explained = (
        await fleet.running.client.post("/explain", json={"model": "stub", "prompt": [1, 2], "max_tokens": 1})
    ).json()
    assert explained["admission"]["reason"] == "rule_failed"
    failures = (await fleet.running.client.get("/stats")).json()["policy_failures"]["failures"]
    assert [(each["part"], each["count"]) for each in failures] == [("admission", 2)]
    await fleet.nothing_left()


async def test_requests_are_sent_where_the_rule_found_room_held_before_or_not(start: Any) -> None:
    fleet = await start(2)
    await fleet.one_runs_and_waits()
    fleet.ask("b", prompt=list(range(1_000, 1_100)))
    await fleet.held(1)
    first, second = (instance.name for instance in fleet.core.instances)
    router = fleet.core.router
    router.routing.set_admission(Odd(Admit(AdmissionReason.ROOM, frozenset({second}))), 600.0, 0.0)
    fleet.core.holding.wake()
    await fleet.held(0)
    for number, session in enumerate("cde", 2):
        fleet.ask(session, prompt=list(range(number * 1_000, number * 1_000 + 100)))
    await fleet.at_engines(5)
    explained = (
        await fleet.running.client.post("/explain", json={"model": "stub", "prompt": [1, 2], "max_tokens": 1})
    ).json()
    assert explained["admission"]["instances"] == [second]
    assert {decision["instance"] for decision in explained["decisions"].values()} == {second}
    assert [view["instance"] for view in explained["fleet"]] == [first, second]
    fleet.open()
    await fleet.answers()
    assert {(await fleet.row(session))["instance"] for session in "bcde"} == {second}
    await fleet.nothing_left()


async def test_an_instance_that_has_left_the_fleet_has_no_room(start: Any) -> None:
    fleet = await start(2)
    fleet.core.router.routing.set_admission(Odd(Admit(AdmissionReason.ROOM, frozenset({"gone"}))), 600.0, 0.0)
    fleet.open()
    assert (await fleet.ask("a")).status_code == 200
    await fleet.nothing_left()


async def test_streams_have_the_header_too(start: Any) -> None:
    fleet = await start()
    fleet.ask("a")
    await fleet.at_engines(1)
    fleet.ask("b", stream=True)
    await fleet.held(1)
    fleet.open()
    answer = (await fleet.answers())["b"]
    assert float(answer.headers["x-warmroute-held-s"]) > 0
    assert json.loads(answer.text.split("\n\n")[0].removeprefix("data: "))["choices"]
    await fleet.nothing_left()
