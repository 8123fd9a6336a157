"""Ports that Mooncake draws at random: a fleet file that assigns one of them is refused, with the remedy."""

from __future__ import annotations

from typing import Any

import pytest

from launch.fleet.drawn_ports import DRAWN_PORTS, drawn_ports
from launch.fleet.file import FleetError, parse_fleet

FLEET: dict[str, Any] = {"kind": "vllm", "count": 2, "model": "m", "role": "kv_both"}
EVENTS = {"events": {"enabled": True}}


@pytest.mark.parametrize(
    ("environment", "ports"),
    [
        ({}, DRAWN_PORTS),
        ({"MC_MIN_RPC_PORT": "20000", "MC_MAX_RPC_PORT": "21000"}, range(20000, 21001)),
        ({"MC_MIN_PRC_PORT": "20000", "MC_MAX_PRC_PORT": "21000"}, range(20000, 21001)),
        ({"MC_MIN_RPC_PORT": "16000", "MC_MIN_PRC_PORT": "16500"}, range(16000, 17001)),
        ({"MC_MAX_RPC_PORT": "15500"}, range(15000, 15501)),
        ({"MC_MIN_RPC_PORT": "1024", "MC_MAX_RPC_PORT": "32767"}, range(1024, 32768)),
        ({"MC_MIN_RPC_PORT": "61000", "MC_MAX_RPC_PORT": "65535"}, range(61000, 65536)),
        # refused by Mooncake, which then uses its default
        ({"MC_MIN_RPC_PORT": "18000"}, DRAWN_PORTS),
        ({"MC_MIN_RPC_PORT": "80", "MC_MAX_RPC_PORT": "443"}, DRAWN_PORTS),
        ({"MC_MIN_RPC_PORT": "32768", "MC_MAX_RPC_PORT": "40000"}, DRAWN_PORTS),
        ({"MC_MIN_RPC_PORT": "61000", "MC_MAX_RPC_PORT": "65536"}, DRAWN_PORTS),
        ({"MC_MIN_RPC_PORT": "many"}, DRAWN_PORTS),
    ],
)
def test_ports_follow_the_environment_of_the_engine(environment: dict[str, str], ports: range) -> None:
    assert drawn_ports(environment) == ports


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"base_events_port": 15701, "vllm": EVENTS}, "port 15701 of inst-0 (KV events) is one of 15000 to 17000"),
        ({"base_port": 17000}, "port 17000 of inst-0 is one of 15000 to 17000, from which Mooncake in inst-0 draws"),
        ({"base_port": 14999}, "port 15000 of inst-1 is one of"),
        ({"proxy": {"port": 16000}}, "port 16000 of the proxy is one of"),
        ({"env": {"MC_MAX_RPC_PORT": "29600"}}, "(MASTER_PORT) is one of 15000 to 29600"),
    ],
)
def test_a_port_that_an_engine_may_draw_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(FleetError) as refused:
        parse_fleet({**FLEET, **values})
    assert message in str(refused.value)
    assert "env.MC_MIN_RPC_PORT" in str(refused.value)


@pytest.mark.parametrize(
    "values",
    [
        {"base_port": 17001},
        {"base_port": 14998},
        {"base_port": 15701, "env": {"MC_MIN_RPC_PORT": "20000", "MC_MAX_RPC_PORT": "21000"}},
        {"base_port": 15701, "role": "none"},
        {"kind": "sim", "count": 2, "base_port": 15701},
    ],
)
def test_ports_that_no_engine_draws_are_taken(values: dict[str, Any]) -> None:
    fields = values if "kind" in values else {**FLEET, **values}
    assert parse_fleet(fields).base_port == values["base_port"]
