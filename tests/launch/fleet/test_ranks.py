"""Data-parallel ranks in a fleet file: flags, devices, ports and the proxy's settings."""

from __future__ import annotations

from typing import Any

import pytest

from launch.engines.commands import engine_specs
from launch.fleet.file import FleetError, parse_fleet
from launch.run.recycling import RecycleRequests
from proxy.settings import load_settings

TWO: dict[str, Any] = {
    "kind": "vllm",
    "count": 2,
    "model": "m",
    "vllm": {
        "tensor_parallel_size": 2,
        "data_parallel_size": 3,
        "events": {"enabled": True, "replay": True},
    },
}


def test_each_instance_has_devices_and_event_ports_for_all_its_ranks() -> None:
    fleet = parse_fleet(TWO)
    specs = engine_specs(fleet)
    assert [spec.environment["CUDA_VISIBLE_DEVICES"] for spec in specs] == ["0,1,2,3,4,5", "6,7,8,9,10,11"]
    for spec in specs:
        assert spec.command[spec.command.index("--data-parallel-size") + 1] == "3"
    ports = [port for port, owner in fleet.ports() if "KV events)" in owner]
    assert ports == list(range(5701, 5707))
    assert [member.replay_port for member in fleet.members] == [5801, 5804]


def test_the_proxy_gets_every_rank_as_an_instance() -> None:
    settings = load_settings(None, **parse_fleet(TWO).proxy_config())
    assert [each.name for each in settings.instances] == [f"inst-{n}/{rank}" for n in range(2) for rank in range(3)]
    assert [each.events_url for each in settings.instances] == [f"tcp://127.0.0.1:{5701 + n}" for n in range(6)]
    assert len({each.url for each in settings.instances}) == 2
    assert len({each.bootstrap_url for each in settings.instances}) == 2


def test_simulated_engines_have_ranks_too() -> None:
    fleet = parse_fleet({"kind": "sim", "count": 1, "sim": {"data_parallel_size": 2}})
    command = engine_specs(fleet)[0].command
    assert command[command.index("--data-parallel-size") + 1] == "2"
    assert [each["data_parallel_size"] for each in fleet.proxy_config()["instances"]] == [2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": None, "devices": [0, 1, 2, 3]}, "4 devices cannot be divided into 6"),
        ({"vllm": {"extra_args": ["--data-parallel-size", "2"]}}, "use vllm.data_parallel_size"),
        ({"base_events_replay_port": 5703}, "port 5703 is assigned to both"),
    ],
)
def test_what_does_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FleetError, match=message):
        parse_fleet({key: value for key, value in {**TWO, **changes}.items() if value is not None})


def test_an_engine_is_recycled_for_any_rank_once_all_are_idle() -> None:
    now = [0.0]
    requests = RecycleRequests(drain_limit_s=30, clock=lambda: now[0])
    leaking = {"name": "a/1", "data_parallel_rank": 1, "requests": 0, "recycle_wanted": "it leaks"}
    other = {"name": "a/0", "data_parallel_rank": 0, "requests": 2, "recycle_wanted": None}
    assert requests.due([other, leaking]) == {}
    assert requests.due([{**other, "requests": 0}, leaking]) == {"a": "it leaks"}
    requests.approve("a")
    assert requests.due([{**other, "requests": 0}, leaking]) == {}
    requests.due([other, {**leaking, "recycle_wanted": None}])
    now[0] = 100.0
    assert requests.due([other, leaking]) == {}
    now[0] = 130.0
    assert requests.due([other, leaking]) == {"a": "it leaks"}
