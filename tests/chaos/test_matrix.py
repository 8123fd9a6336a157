"""Every cell of the failure matrix, with the faulty engine alone and beside a good one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from tests.chaos.conftest import BODY, CHAT, SHORT, Chaos, StartChaos
from tests.chaos.rig.engine import ChaosEngine, good
from tests.chaos.rig.faults import Moment, at, close, hang, rst
from tests.chaos.rig.matrix import CELLS, Cell, Health, Sees, View
from tests.chaos.rig.wire import EVENTS, good_body, reset


def params() -> list[object]:
    return [
        pytest.param(
            cell,
            alone,
            id=f"{cell.id}-{'alone' if alone else 'beside'}",
        )
        for cell in CELLS
        for alone in (True, False)
    ]


@contextlib.contextmanager
def full_backlog(port: int) -> Iterator[None]:
    """A port that listens without accepting: further connections wait forever."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        yield


@contextlib.asynccontextmanager
async def faulty(cell: Cell, engine: ChaosEngine) -> AsyncIterator[None]:
    """Make the engine misbehave as described by the cell."""
    with contextlib.ExitStack() as stack:
        if callable(cell.fault):
            engine.fault = cell.fault
        elif cell.fault == "close_on_accept":
            engine.accept_fault = lambda writer: writer.close()
        elif cell.fault == "reset_on_accept":
            engine.accept_fault = reset
        else:
            await engine.stop()
            if cell.fault == "full_backlog":
                stack.enter_context(full_backlog(engine.port))
        yield
    engine.fault, engine.accept_fault = good, None
    if not callable(cell.fault) and "accept" not in cell.fault:
        await engine.start()


def check_content(answer: httpx.Response, cell: Cell, view: View) -> None:
    whole = "".join(event.decode() for event in EVENTS) if cell.stream else good_body().decode()
    match view.sees:
        case Sees.ANSWER:
            assert answer.text == whole
        case Sees.ERROR:
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["code"] in {"upstream_error", "upstream_timeout"}
        case Sees.AS_SENT:
            assert answer.content in {b'{"error":{"message":"as reported","type":"stub"}}', b""}
        case Sees.BROKEN:
            events = [event for event in answer.text.split("\n\n") if event]
            assert events[0] == EVENTS[0].decode().strip()
            contents = [json.loads(event.removeprefix("data: ")) for event in events]
            assert [bool(content.get("choices")) for content in contents] == [True] * (len(events) - 1) + [False]
            assert contents[-1]["error"]["code"] == "stream_broken"
            assert whole.startswith("".join(event + "\n\n" for event in events[:-1]))


def check_health(proxy: Chaos, health: Health, *, alone: bool) -> None:
    instance = proxy.instance()
    if health is Health.COUNTED_BESIDE:
        health = Health.NONE if alone else Health.COUNTED
    seen = (instance.healthy, instance.failures_in_a_row)
    assert seen == {Health.NONE: (True, 0), Health.COUNTED: (True, 1), Health.OUT: (False, 1)}[health]


@pytest.mark.parametrize(("cell", "alone"), params())
async def test_cell(start_chaos: StartChaos, cell: Cell, alone: bool) -> None:
    engines = [ChaosEngine() for _ in range(1 if alone else 2)]
    proxy = await start_chaos(*engines, timeouts=SHORT if cell.waits else {})
    path, body = ("/v1/chat/completions", CHAT) if cell.chat else ("/v1/completions", BODY)
    view = cell.expected.alone if alone else cell.expected.beside
    async with faulty(cell, engines[0]):
        answer = await proxy.client.post(path, json={**body, "stream": cell.stream}, headers={"x-request-id": "r"})
        await proxy.until(lambda: not engines[0].busy)
    assert (answer.status_code, answer.headers["x-request-id"]) == (view.status, "r")
    check_content(answer, cell, view)
    [row] = await proxy.rows()
    assert (row["status"], row["outcome"], len(row["attempts"])) == (view.status, view.outcome, view.attempts)
    check_health(proxy, cell.expected.health, alone=alone)
    await proxy.nothing_left()
    # Excess bytes of one answer must not be taken for the next one.
    proxy.instance().healthy = True
    for _ in range(2):
        after = await proxy.client.post(path, json={**body, "stream": cell.stream})
        check_content(after, cell, View(200, Sees.ANSWER, "ok"))
    await proxy.nothing_left()


@pytest.mark.parametrize("faults", [[rst, close], [close, hang], [hang, rst]])
async def test_the_third_instance_answers_when_two_fail(start_chaos: StartChaos, faults: list[object]) -> None:
    first, second = (ChaosEngine(at(Moment.BEFORE_HEADERS, act)) for act in faults)  # type: ignore[arg-type]
    # The second turn of round robin, among the two remaining ones, is the last one's.
    proxy = await start_chaos(first, ChaosEngine(), second, timeouts=SHORT)
    answer = await proxy.client.post("/v1/completions", json={**BODY, "stream": True})
    assert answer.content == b"".join(EVENTS)
    [row] = await proxy.rows()
    assert [attempt["instance"] for attempt in row["attempts"]] == ["inst-0", "inst-2"]
    assert (row["outcome"], row["instance"]) == ("ok", "inst-1")
    await proxy.nothing_left()


async def test_no_more_instances_are_tried_than_max_attempts(start_chaos: StartChaos) -> None:
    engines = [ChaosEngine(at(Moment.BEFORE_HEADERS, close)) for _ in range(4)]
    proxy = await start_chaos(*engines, limits={"max_attempts": 3})
    answer = await proxy.client.post("/v1/completions", json=BODY)
    assert answer.status_code == 502
    assert sum(len(engine.posts) for engine in engines) == 3
    await proxy.nothing_left()


@pytest.mark.parametrize("moment", [Moment.BEFORE_HEADERS, Moment.MID_STREAM])
async def test_failures_in_a_row_take_an_instance_out_and_a_probe_takes_it_back(
    start_chaos: StartChaos, moment: Moment
) -> None:
    engine = ChaosEngine(at(moment, close))
    proxy = await start_chaos(engine, health={"interval_s": 3.0, "unhealthy_after": 3})
    for _ in range(3):
        await proxy.client.post("/v1/completions", json={**BODY, "stream": True})
    assert not proxy.instance().healthy
    engine.fault = good
    refused = await proxy.client.post("/v1/completions", json=BODY)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "3")
    await proxy.until(lambda: proxy.instance().healthy)
    assert (await proxy.client.post("/v1/completions", json=BODY)).status_code == 200


async def test_a_hundred_streams_survive_the_end_of_one_of_two_engines(start_chaos: StartChaos) -> None:
    release = asyncio.Event()

    async def slow(talk: object) -> None:
        await release.wait()
        await good(talk)  # type: ignore[arg-type]

    engines = [ChaosEngine(slow), ChaosEngine(slow)]
    proxy = await start_chaos(*engines)
    requests = [
        asyncio.create_task(proxy.client.post("/v1/completions", json={**BODY, "stream": True})) for _ in range(100)
    ]
    await proxy.until(lambda: sum(engine.busy for engine in engines) == 100)
    await engines[0].stop()
    release.set()
    answers = await asyncio.gather(*requests)
    assert {answer.content for answer in answers} == {b"".join(EVENTS)}
    assert {answer.headers["x-warmroute-instance"] for answer in answers} == {"inst-1"}
    await proxy.nothing_left()
