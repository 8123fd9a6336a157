"""Priority scheduling in a fleet file: the engines' flags and the proxy's settings."""

from __future__ import annotations

from typing import Any

import pytest

from launch.engines.commands import engine_specs
from launch.fleet.file import FleetError, FleetFile, parse_fleet
from proxy.settings import load_settings

VLLM: dict[str, Any] = {"kind": "vllm", "count": 2, "model": "m"}
FLAG = "--scheduling-policy"


def flags(fleet: FleetFile) -> list[str | None]:
    """The value of the flag in each engine's command line; None: it is not there."""
    commands = [spec.command for spec in engine_specs(fleet)]
    return [command[command.index(FLAG) + 1] if FLAG in command else None for command in commands]


def ordered(fleet: FleetFile) -> list[bool]:
    """``priority_scheduling`` of each of the proxy's instances."""
    return [each.priority_scheduling for each in load_settings(None, **fleet.proxy_config()).instances]


def test_vllm_has_its_own_default_unless_the_file_says_priority() -> None:
    for plain in (parse_fleet(VLLM), parse_fleet({**VLLM, "vllm": {"scheduling_policy": "fcfs"}})):
        assert flags(plain) == [None, None]
        assert ordered(plain) == [False, False]
    fleet = parse_fleet({**VLLM, "vllm": {"scheduling_policy": "priority"}})
    assert flags(fleet) == ["priority", "priority"]
    assert ordered(fleet) == [True, True]


def test_a_group_may_differ_and_all_ranks_of_an_engine_are_ordered() -> None:
    priority = {"scheduling_policy": "priority", "data_parallel_size": 2}
    groups = [{"count": 1, "name_prefix": "a-"}, {"count": 1, "name_prefix": "b-", "vllm": priority}]
    fleet = parse_fleet({"kind": "vllm", "model": "m", "groups": groups})
    assert flags(fleet) == [None, "priority"]
    assert ordered(fleet) == [False, True, True]


def test_simulated_engines_have_the_key_too() -> None:
    fleet = parse_fleet({"kind": "sim", "count": 1, "sim": {"scheduling_policy": "priority"}})
    assert flags(fleet) == ["priority"]
    assert ordered(fleet) == [True]
    assert ordered(parse_fleet({"kind": "sim", "count": 1})) == [False]


def test_a_peer_says_it_itself() -> None:
    peers = [{"url": "http://10.0.0.2:8000", "priority_scheduling": True}, {"url": "http://10.0.0.3:8000"}]
    assert ordered(parse_fleet({**VLLM, "host": "10.0.0.1", "peers": peers})) == [False, False, True, False]


@pytest.mark.parametrize("extra", [[FLAG, "priority"], [f"{FLAG}=priority"], [f"{FLAG}=fcfs"]])
def test_the_flag_among_further_arguments_is_refused_with_the_key(extra: list[str]) -> None:
    with pytest.raises(FleetError, match=r"sets --scheduling-policy itself; use vllm\.scheduling_policy"):
        parse_fleet({**VLLM, "vllm": {"extra_args": extra}})


def test_other_policies_are_refused() -> None:
    with pytest.raises(FleetError, match="scheduling_policy"):
        parse_fleet({**VLLM, "vllm": {"scheduling_policy": "lifo"}})
