"""The fleet file: every mistake is named before anything starts."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.engines.commands import engine_specs, proxy_spec
from launch.fleet.file import FLEETS, FleetError, FleetFile, find_fleet, load_fleet, parse_fleet, ports_in_use
from launch.fleet.wall_time import in_wall_time
from proxy.settings import PolicySettings, load_settings
from tests.launch.conftest import fleet_values

GOOD: dict[str, Any] = {"kind": "sim", "count": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cuont": 3}, "cuont: unknown key"),
        ({"sim": {"profil": "h20"}}, "sim.profil: unknown key; did you mean profile"),
        ({"sim": {"profile": "h2000"}}, "sim.profile: no profile 'h2000'; known: h100-nvlink, h100-nvlink-128, h20,"),
        ({"sim": {"profile": "mine/h2000.yaml"}}, "sim.profile: no file at mine/h2000.yaml"),
        ({"count": 0}, "count: Input should be greater than or equal to 1"),
        ({"count": "many"}, "count: Input should be a valid integer"),
        ({"kind": "tgi"}, "kind: Input should be 'sim' or 'vllm'"),
        ({"role": "both"}, "role: Input should be"),
        ({"base_port": 80}, "base_port: Input should be greater than or equal to 1024"),
        ({"base_port": 65535}, "inst-1 would get port 65536"),
        ({"base_port": 9101}, "port 9101 is assigned to both inst-0 and inst-0 (bootstrap)"),
        ({"proxy": {"port": 8102}}, "port 8102 is assigned to both inst-1 and the proxy"),
        ({"proxy": {"prot": 1}}, "prot: unknown key"),
        ({"proxy": {"policy": {"name": "nonesuch"}}}, "nonesuch"),
        ({"proxy": {"instances": []}}, "remove the key"),
        ({"sim": {"time_scale": 0}}, "sim.time_scale: Input should be greater than 0"),
        ({"restart": "always"}, "restart: Input should be 'never' or 'on_failure'"),
        ({"env": {"A": 1}}, "env.A: Input should be a valid string"),
        ({"proxy": {"offload": "never"}}, "offload: "),
        ({"proxy": {"port": 0}}, "the proxy would get port 0"),
        ({"role": "kv_producer"}, "role: producers without consumers"),
        ({"role": "kv_consumer"}, "role: consumers without producers"),
        (
            {"sim": {"abort_timeout_s": 30}, "proxy": {"offload": {"hold_s": 480}}},
            "proxy.offload.hold_s: 480 contradicts sim.abort_timeout_s, by which P holds KV for 30 s; remove",
        ),
    ],
)
def test_every_mistake_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FleetError) as caught:
        parse_fleet({**GOOD, **change}, "fleet.yaml")
    assert message in str(caught.value)
    assert str(caught.value).startswith("fleet.yaml")


def test_without_a_connector_bootstrap_ports_cannot_clash() -> None:
    fleet = parse_fleet({**GOOD, "base_port": 9101, "role": "none"})
    assert fleet.bootstrap_url(0) is None
    assert "--bootstrap-port" not in engine_specs(fleet)[0].command


def test_an_ipv6_host_is_in_brackets_in_urls() -> None:
    fleet = parse_fleet({**GOOD, "host": "::1"})
    assert fleet.url(0) == f"http://[::1]:{fleet.base_port}"
    assert {entry["url"] for entry in fleet.proxy_config()["instances"]} == {fleet.url(0), fleet.url(1)}


def test_files_that_are_no_fleets(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    with pytest.raises(FleetError, match=r"no fleet file at .*sim-4x"):
        load_fleet(path)
    path.write_text("- 1\n")
    with pytest.raises(FleetError, match="expected keys"):
        load_fleet(path)
    path.write_text("a: [\n")
    with pytest.raises(FleetError, match="not YAML"):
        load_fleet(path)


def test_a_port_in_use_is_reported() -> None:
    fleet = parse_fleet(fleet_values())
    assert ports_in_use(fleet) == []
    with socket.create_server(("127.0.0.1", fleet.base_port + 1)):
        [problem] = ports_in_use(fleet)
    assert problem.startswith(f"port {fleet.base_port + 1} for inst-1 is not free")
    assert "move the ports" in problem
    assert problem.endswith("(`warmroute status` shows if a fleet of yours runs, `warmroute down` stops it)")
    for host in ("nowhere.invalid", "192.0.2.1"):
        [problem] = ports_in_use(parse_fleet({**fleet_values(), "host": host}))
        assert problem.startswith(f"host: '{host}' is no address of this machine")
    with socket.create_server(("127.0.0.1", fleet.proxy_port)):
        assert len(ports_in_use(fleet)) == 1
        assert ports_in_use(fleet, with_proxy=False) == []


@pytest.mark.parametrize("path", sorted(FLEETS.glob("sim-*.yaml")), ids=lambda path: path.stem)
def test_shipped_simulated_fleets_give_whole_command_lines(path: Path, tmp_path: Path) -> None:
    fleet = load_fleet(path)
    specs = engine_specs(fleet)
    assert len(specs) == fleet.count == len(fleet.members)
    for index, spec in enumerate(specs):
        options = dict(zip(spec.command[3::2], spec.command[4::2], strict=True))
        assert spec.command[1:3] == ("-m", "sim")
        assert options["--port"] == str(fleet.base_port + index)
        assert options["--role"] == fleet.role.value
        assert options["--profile"] == fleet.sim.profile
        assert options.get("--bootstrap-port") == (
            str(fleet.base_bootstrap_port + index) if fleet.has_bootstrap else None
        )
        assert spec.ready_urls[0] == f"{fleet.url(index)}/health"
        assert len(spec.ready_urls) == 1 + fleet.has_bootstrap
    config = tmp_path / "proxy.yaml"
    config.write_text(yaml.safe_dump(fleet.proxy_config()))
    settings = load_settings(config)
    assert [instance.url for instance in settings.instances] == [spec.url for spec in specs]
    assert proxy_spec(fleet, config).command[1:] == ("-m", "proxy", "--config", str(config))


def test_engines_differ_in_ports_only() -> None:
    first, second = engine_specs(parse_fleet({**GOOD, "sim": {"seed": 5, "kv_capacity_tokens": 1000}}))
    changed = [after for before, after in zip(first.command, second.command, strict=True) if before != after]
    assert changed == ["8102", "9102"]
    assert "--kv-capacity-tokens" in first.command
    assert "--max-num-seqs" not in first.command


def test_a_shipped_fleet_may_be_named() -> None:
    assert find_fleet(Path("sim-4x")) == FLEETS / "sim-4x.yaml"


def test_the_launcher_finds_the_admin_side_of_a_proxy_that_others_reach() -> None:
    def fleet(**more: Any) -> FleetFile:
        return parse_fleet({"kind": "sim", "model": "m", "count": 2, "base_port": 31000, **more})

    local = fleet(proxy={"port": 32000})
    assert (local.admin_port, local.admin_url()) == (None, "http://127.0.0.1:32000")
    assert "admin" not in local.proxy_config()
    exposed = fleet(host="10.0.0.1", proxy={"port": 32000})
    assert (exposed.proxy_url(), exposed.admin_url()) == ("http://10.0.0.1:32000", "http://127.0.0.1:32001")
    assert load_settings(**exposed.proxy_config()).admin.port == 32001
    assert (32001, "the proxy's admin listener") in exposed.ports()
    reported = fleet(host="10.0.0.1", proxy={"port": 32000, "admin": {"port": 40000, "open_metrics": True}})
    assert reported.admin_url() == "http://127.0.0.1:40000"
    assert load_settings(**reported.proxy_config()).admin.open_metrics


@pytest.mark.parametrize(
    ("change", "hold_s"),
    [
        ({"sim": {"abort_timeout_s": 30}}, 30.0),
        ({"sim": {"abort_timeout_s": 30, "time_scale": 20}}, 1.5),
        ({"sim": {"time_scale": 20}}, 24.0),
        ({"sim": {"abort_timeout_s": 30}, "proxy": {"offload": {"hold_s": 30, "planner": "threshold"}}}, 30.0),
        ({}, 480.0),
        ({"role": "none", "sim": {"abort_timeout_s": 30}}, 480.0),
    ],
)
def test_the_proxy_counts_a_failed_hand_off_for_as_long_as_the_engines_hold_it(
    change: dict[str, Any], hold_s: float
) -> None:
    """In the proxy's time: simulated engines run ``time_scale`` times faster than its clock."""
    assert load_settings(**parse_fleet({**GOOD, **change}).proxy_config()).offload.hold_s == hold_s


@pytest.mark.parametrize("path", sorted(FLEETS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_fleets_route_by_the_default_policy_or_joint_in_their_engines_time(path: Path) -> None:
    fleet = load_fleet(path)
    name = "joint" if path.stem in {"elastic-4x-kv-both", "elastic-8x-kv-both"} else PolicySettings().name
    in_time = in_wall_time({"policy": {"name": name}}, fleet.sim.time_scale)["policy"]
    shipped = load_settings(**fleet.proxy_config()).policy
    assert shipped.name == name
    assert shipped.params == pytest.approx(in_time.get("params", {}))
