"""Before the proxy serves: ports in use, variables that are no settings, and the line on access."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from proxy.settings import load_settings
from proxy.start.address import ListenError, check_addresses
from proxy.start.environment import unknown_variables
from proxy.start.openness import is_exposed, openness
from tests.proxy.serve_process import serve_process
from warmroute import build

RUNNER = CliRunner(env={"COLUMNS": "160", "NO_COLOR": "1"})
ONE = {"instances": ["http://127.0.0.1:1"]}


def settings(**given: Any) -> Any:
    return load_settings(None, **{**ONE, **given})


@pytest.mark.parametrize("which", ["port", "admin"])
def test_a_port_in_use_ends_the_start_with_the_remedy(which: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        flags = ["--port", str(port)] if which == "port" else ["--port", "0", "--admin-port", str(port)]
        answer = RUNNER.invoke(build(), ["serve", "--instance", "http://127.0.0.1:1", *flags])
    assert answer.exit_code == 2
    assert f"port {port} of 127.0.0.1 is in use by another process" in answer.output
    assert ("--admin-port" if which == "admin" else "(--port)") in answer.output
    assert "startup" not in answer.output


def test_addresses_that_are_free_pass_and_stay_free() -> None:
    for host in ("127.0.0.1", "localhost"):
        check_addresses(settings(host=host, port=0, admin={"port": 0}))
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
    for _ in range(2):
        check_addresses(settings(port=port))


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ListenError, match=r"host '192\.0\.2\.1' is no address of this machine"):
        check_addresses(settings(host="192.0.2.1"))
    with pytest.raises(ListenError, match=r"host 'nowhere\.invalid' is no address of this machine"):
        check_addresses(settings(host="nowhere.invalid"))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("WARMROUTE_POLCY__NAME", "WARMROUTE_POLICY__NAME"),
        ("WARMROUTE_POLICY_NAME", "WARMROUTE_POLICY__NAME"),
        ("WARMROUTE_LIMITS_BODY_BYTES", "WARMROUTE_LIMITS__BODY_BYTES"),
        ("WARMROUTE_LOGLEVEL", "WARMROUTE_LOG_LEVEL"),
        ("warmroute_prot", "WARMROUTE_PORT"),
    ],
)
def test_a_misspelt_variable_is_named_with_the_nearest_setting(name: str, meant: str) -> None:
    [sentence] = unknown_variables({name: "x"}, settings())
    assert name in sentence
    assert f"did you mean {meant}?" in sentence


def test_a_variable_like_no_setting_refers_to_the_list() -> None:
    [sentence] = unknown_variables({"WARMROUTE_QQQQQQQQQQ": "x"}, settings())
    assert "`warmroute settings` lists" in sentence


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WARMROUTE_PORT", "9090"),
        ("WARMROUTE_POLICY__NAME", "warm"),
        ("warmroute_policy__name", "warm"),
        ("WARMROUTE_TRACES", "/traces"),
        ("WARMROUTE_ENGINE_PYTHON", "/python"),
        ("WARMROUTE_TEST_ENGINES", "1"),
        ("WARMROUTE_SERVICE_HOST", "10.0.0.1"),
        ("WARMROUTE_SERVICE_PORT_HTTP", "9090"),
        ("WARMROUTE_PORT_9090_TCP_ADDR", "10.0.0.1"),
        ("WARMROUTE_METRICS_PORT", "tcp://10.0.0.1:9091"),
        ("OTHER", "x"),
    ],
)
def test_settings_and_known_variables_are_not_named(name: str, value: str) -> None:
    assert unknown_variables({name: value}, settings()) == []


def test_every_variable_of_the_other_commands_is_known() -> None:
    root = Path(__file__).resolve().parents[3]
    modules = [path for folder in ("bench", "launch", "replayer", "sim") for path in (root / folder).rglob("*.py")]
    named = {name for path in modules for name in re.findall(r'"(WARMROUTE_[A-Z_]*[A-Z])"', path.read_text())}
    assert {"WARMROUTE_ENGINE_PYTHON", "WARMROUTE_TRANSFER_RECORDS"} <= named
    assert unknown_variables(dict.fromkeys(named, "x"), settings()) == []


def test_variables_that_hold_keys_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMROUTE_FLEET_SECRET", "x")
    monkeypatch.setenv("WARMROUTE_OWN_SECRET", "x")
    instance = {"url": "http://127.0.0.1:1", "api_key_env": "WARMROUTE_OWN_SECRET"}
    with_keys = settings(instances=[instance], engine_key_env="WARMROUTE_FLEET_SECRET")
    assert unknown_variables({"WARMROUTE_FLEET_SECRET": "x", "WARMROUTE_OWN_SECRET": "x"}, with_keys) == []


def test_a_port_that_kubernetes_has_set_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMROUTE_PORT", "tcp://10.0.0.1:9090")
    answer = RUNNER.invoke(build(), ["serve", "--instance", "http://127.0.0.1:1"])
    assert answer.exit_code == 2
    assert "enableServiceLinks: false" in answer.output


async def test_a_start_logs_access_unknown_variables_and_unreachable_engines(tmp_path: Path) -> None:
    given = {"instances": ["http://127.0.0.1:1"], "port": 0, "health": {"interval_s": 600.0}}
    async with serve_process(tmp_path / "proxy.yaml", given, WARMROUTE_POLCY__NAME="warm") as served:
        variable = await served.logged(r"WARNING .*WARMROUTE_POLCY__NAME is no setting")
        access = await served.logged(r"INFO .*API on 127\.0\.0\.1:0: open to this machine")
        engine = await served.logged(r"WARNING .*127\.0\.0\.1:1 is not used: connection refused")
        running = await served.logged("Uvicorn running")
        order = [served.lines.index(found.string) for found in (variable, access, engine, running)]
        assert order == sorted(order)


@pytest.mark.parametrize(
    ("given", "client", "admin"),
    [
        ({}, "open to this machine", "there too: open to this machine, except changes"),
        ({"host": "0.0.0.0"}, "open to everyone who can reach it", "there too: closed, because 0.0.0.0"),
        (
            {"host": "::1", "port": 9090, "admin": {"host": "::1", "port": 9091}},
            "API on [::1]:9090: open to this machine",
            "on [::1]:9091: open to this machine",
        ),
        (
            {"host": "0.0.0.0", "admin": {"port": 9091}},
            "open to everyone",
            "on 127.0.0.1:9091: open to this machine",
        ),
        (
            {
                "host": "0.0.0.0",
                "keys": {"client": [{"name": "a", "sha256": "0" * 64}], "admin": [{"name": "b", "sha256": "1" * 64}]},
            },
            "open to holders of a client key",
            "open to holders of an admin key",
        ),
        ({"host": "0.0.0.0", "admin": {"open_metrics": True}}, "open to everyone", "except GET /metrics"),
    ],
)
def test_one_line_says_what_is_open_to_whom(given: dict[str, Any], client: str, admin: str) -> None:
    api, rest = re.split("; (?=admin endpoints)", openness(settings(**given)))
    assert client in api
    assert admin in rest
    assert is_exposed(settings(**given)) == ("everyone" in client)
