"""KV events of engines that listen on IPv6, from the simulated engine's publisher to the index, over real sockets."""

from __future__ import annotations

import asyncio
import socket

import pytest

from policies.predict.exact_index import ExactIndex
from proxy.events.endpoint import needs_ipv6
from proxy.events.subscriber import EventSubscriber
from proxy.settings import EventSettings, InstanceSettings
from sim.core.content import chain_keys, token_bytes
from sim.core.kvevents import BlocksStored
from sim.server.kvevents import KvEventPublisher

SIZE = 4


def has_ipv6() -> bool:
    """True if this machine has the loopback address of IPv6."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def free_port() -> int:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
        return int(listener.getsockname()[1])


needs_loopback = pytest.mark.skipif(not has_ipv6(), reason="no ::1 on this machine")


@needs_loopback
async def test_events_and_replays_of_an_engine_on_an_ipv6_address_arrive() -> None:
    port, replay_port = free_port(), free_port()
    publisher = KvEventPublisher("::1", port, replay_port, block_tokens=SIZE)
    publisher.open()
    instance = InstanceSettings(
        url="http://[::1]:1",
        name="a",
        events_url=f"tcp://[::1]:{port}",
        events_replay_url=f"tcp://[::1]:{replay_port}",
    )
    index = ExactIndex(SIZE)
    index.add_instance("a")
    subscriber = EventSubscriber((instance,), EventSettings(join_interval_s=60.0), index)
    tokens = token_bytes(range(SIZE))
    (key,) = chain_keys(tokens, SIZE)
    publisher.publish([BlocksStored((key,), None, tokens)])  # before the subscription: only a replay has it
    tasks = [asyncio.create_task(subscriber.run()), asyncio.create_task(publisher.run())]
    try:
        for number in range(1, 3_000):  # until the replay and a batch of the subscription have arrived
            if subscriber.figures("a")["batches"] >= 2:
                break
            await asyncio.sleep(0.01)
            if subscriber.figures("a")["blocks"]:
                tokens = token_bytes(range(SIZE * number, SIZE * (number + 1)))
                publisher.publish([BlocksStored(tuple(chain_keys(tokens, SIZE)), None, tokens)])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        publisher.close()
    assert subscriber.figures("a")["batches"] >= 2


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("tcp://[::1]:5557", True),
        ("tcp://127.0.0.1:5557", False),
        ("tcp://localhost:5557", False),  # often both: an engine on 0.0.0.0 answers on IPv4 alone
        ("ipc:///tmp/events", False),
    ],
)
async def test_ipv6_is_used_where_ipv4_reaches_nothing(endpoint: str, expected: bool) -> None:
    assert await needs_ipv6(endpoint) is expected


async def test_a_name_that_cannot_be_resolved_yet_is_resolved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def found(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        asked.append(host)
        if len(asked) == 1:
            raise socket.gaierror(socket.EAI_NONAME, "not known")
        return [(socket.AF_INET6, None, None, "", ("fd00::7", 0, 0, 0))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", found)
    monkeypatch.setattr("proxy.events.endpoint._RESOLVE_AGAIN_S", 0.0)
    assert await needs_ipv6("tcp://engine-0.engines:5557") is True
    assert asked == ["engine-0.engines"] * 2
