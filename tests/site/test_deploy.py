"""The files of configs/deploy are valid, hardened as the page says, and refer to files and commands that exist."""

from __future__ import annotations

import configparser
import importlib
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.settings import load_settings
from tests.command_line.commands import root
from tests.command_line.documents import CommandLine, problem

# It has no type stubs.
jsonschema: Any = importlib.import_module("jsonschema")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs" / "deploy"
UNIT = FOLDER / "warmroute.service"
MONITORING = ROOT / "configs" / "monitoring"
PAGE = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")

_SERVICE: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["image", "network_mode", "restart"],
    "properties": {
        "build": {
            "type": "object",
            "additionalProperties": False,
            "required": ["context", "dockerfile"],
            "properties": {"context": {"type": "string"}, "dockerfile": {"type": "string"}},
        },
        # A short name with a version, or the image that is built here: no host.
        "image": {"type": "string", "pattern": r"^(warmroute|[a-z]+/[a-z]+:v?\d+\.\d+\.\d+)$"},
        "network_mode": {"const": "host"},
        "command": {"type": "array", "items": {"type": "string"}},
        "environment": {
            "anyOf": [
                {"type": "array", "items": {"type": "string"}},
                {"type": "object", "additionalProperties": {"type": "string"}},
            ]
        },
        "volumes": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["type", "source", "target"],
                "properties": {
                    "type": {"enum": ["bind", "volume"]},
                    "source": {"type": "string"},
                    "target": {"type": "string", "pattern": "^/"},
                    "read_only": {"type": "boolean"},
                },
            },
        },
        "read_only": {"type": "boolean"},
        "cap_drop": {"type": "array", "items": {"type": "string"}},
        "security_opt": {"type": "array", "items": {"type": "string"}},
        "ulimits": {"type": "object", "additionalProperties": {"type": "integer"}},
        "stop_grace_period": {"type": "string", "pattern": r"^\d+s$"},
        "depends_on": {"type": "array", "items": {"type": "string"}},
        "restart": {"enum": ["no", "on-failure", "always", "unless-stopped"]},
    },
}
COMPOSE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "services", "volumes"],
    "properties": {
        "name": {"type": "string"},
        "services": {"type": "object", "additionalProperties": _SERVICE},
        "volumes": {"type": "object", "additionalProperties": {"type": "object"}},
    },
}
"""The part of the Compose specification that the file uses; an unknown or misspelt key fails."""


def compose(name: str = "compose.yaml") -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


REPLICAS = "compose-replicas.yaml"


def unit() -> dict[str, list[tuple[str, str]]]:
    """Section -> its keys and values, repeated keys kept."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for line in UNIT.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            current = sections.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            current.append((key, value))
    return sections


# systemd


def test_the_unit_has_the_three_sections_and_no_key_twice() -> None:
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text(encoding="utf-8"))
    assert parser.sections() == ["Unit", "Service", "Install"]


def test_the_unit_is_hardened_and_restarts() -> None:
    service = dict(unit()["Service"])
    expected = {
        "DynamicUser": "yes",
        "ProtectSystem": "strict",
        "ProtectHome": "yes",
        "NoNewPrivileges": "yes",
        "CapabilityBoundingSet": "",
        "Restart": "on-failure",
        "StateDirectory": "warmroute",
    }
    assert {key: service[key] for key in expected} == expected
    assert int(service["LimitNOFILE"]) >= 65_536
    assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"


def test_the_unit_leaves_running_streams_their_time() -> None:
    settings = load_settings(ROOT / "configs" / "proxy.yaml")
    assert int(dict(unit()["Service"])["TimeoutStopSec"]) >= settings.drain_delay_s + settings.grace_s + 10
    assert int(compose()["services"]["proxy"]["stop_grace_period"].rstrip("s")) >= settings.grace_s + 10


def test_the_unit_s_command_is_one_that_is_accepted() -> None:
    program, *words = shlex.split(dict(unit()["Service"])["ExecStart"])
    assert program == "/opt/warmroute/bin/warmroute"
    assert problem(CommandLine("unit", tuple(words)), root()) is None
    assert words[words.index("--config") + 1] == "/etc/warmroute/proxy.yaml"


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed on this machine")
    program = tmp_path / "warmroute"
    program.write_text("#!/bin/sh\n", encoding="utf-8")
    program.chmod(0o755)
    copy = tmp_path / "warmroute.service"
    text = UNIT.read_text(encoding="utf-8")
    copy.write_text(text.replace("/opt/warmroute/bin/warmroute", str(program)), encoding="utf-8")
    verify = ["systemd-analyze", "verify", "--man=no", str(copy)]
    done = subprocess.run(verify, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    copy.write_text(
        copy.read_text(encoding="utf-8").replace("Restart=on-failure", "Restart=sometimes"), encoding="utf-8"
    )
    done = subprocess.run(verify, capture_output=True, text=True, timeout=60, check=False)
    assert "restart" in done.stderr


# Compose


def test_the_compose_file_has_the_form_of_the_specification() -> None:
    jsonschema.validate(compose(), COMPOSE_SCHEMA)
    wrong = compose()
    wrong["services"]["proxy"]["volume"] = []
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, COMPOSE_SCHEMA)


def test_every_mounted_file_and_named_volume_exists() -> None:
    content = compose()
    assert sorted(content["services"]) == ["grafana", "prometheus", "proxy"]
    for name, service in content["services"].items():
        for mount in service["volumes"]:
            if mount["type"] == "volume":
                assert mount["source"] in content["volumes"], name
                continue
            assert mount["read_only"] is True, mount
            source = (FOLDER / mount["source"]).resolve()
            assert source.exists() or source == MONITORING, f"{name}: {source}"
        assert set(service.get("depends_on", [])) < set(content["services"])
    build = content["services"]["proxy"]["build"]
    assert (FOLDER / build["context"] / build["dockerfile"]).is_file()


def test_the_mounted_folder_has_what_prometheus_and_grafana_read() -> None:
    if not MONITORING.exists():
        pytest.skip("configs/monitoring is not there")
    command = compose()["services"]["prometheus"]["command"]
    (config,) = [word.partition("=")[2] for word in command if word.startswith("--config.file=")]
    assert (MONITORING / Path(config).name).is_file()
    for path in MONITORING.glob("*.json"):
        assert json.loads(path.read_text(encoding="utf-8"))["title"]


def test_the_ports_of_the_parts_fit_and_are_on_loopback() -> None:
    services = compose()["services"]
    (listen,) = [each for each in services["prometheus"]["command"] if each.startswith("--web.listen-address=")]
    source = yaml.safe_load((FOLDER / "grafana" / "datasource.yaml").read_text(encoding="utf-8"))
    assert source["datasources"][0]["url"] == f"http://{listen.partition('=')[2]}"
    assert listen.endswith("=127.0.0.1:9095")
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert load_settings(ROOT / "configs" / "proxy.yaml").host == "127.0.0.1"
    provider = yaml.safe_load((FOLDER / "grafana" / "dashboards.yaml").read_text(encoding="utf-8"))["providers"][0]
    assert provider["options"]["path"] in {mount["target"] for mount in services["grafana"]["volumes"]}


def test_the_proxy_s_command_is_one_that_is_accepted() -> None:
    service = compose()["services"]["proxy"]
    assert problem(CommandLine("compose", ("serve", *service["command"])), root()) is None
    config = service["command"][service["command"].index("--config") + 1]
    assert config in {mount["target"] for mount in service["volumes"]}


# Compose with replicas


def replicas() -> dict[str, Any]:
    return {name: service for name, service in compose(REPLICAS)["services"].items() if name.startswith("replica-")}


def test_the_compose_file_of_replicas_has_the_form_of_the_specification() -> None:
    content = compose(REPLICAS)
    jsonschema.validate(content, COMPOSE_SCHEMA)
    for service in content["services"].values():
        for mount in service.get("volumes", []):
            assert mount["read_only"] is True
            assert (FOLDER / mount["source"]).resolve().is_file(), mount
        assert set(service.get("depends_on", [])) < set(content["services"])


def test_the_replicas_settings_are_valid_and_differ_in_name_and_port(monkeypatch: pytest.MonkeyPatch) -> None:
    store = compose(REPLICAS)["services"]["store"]["command"]
    seen = set()
    for service in replicas().values():
        assert problem(CommandLine("compose", ("serve", *service["command"])), root()) is None
        with monkeypatch.context() as variables:
            for name, value in service["environment"].items():
                variables.setenv(name, value)
            port = int(service["command"][service["command"].index("--port") + 1])
            settings = load_settings(ROOT / "configs" / "proxy.yaml", port=port)
        assert settings.sharing.url == f"redis://127.0.0.1:{store[store.index('--port') + 1]}/0"
        assert service["environment"]["HEALTH_URL"] == f"http://127.0.0.1:{port}/health"
        assert int(service["stop_grace_period"].rstrip("s")) >= settings.drain_delay_s + settings.grace_s + 10
        seen.add((settings.sharing.replica, port))
    assert len({name for name, _ in seen}) == len({port for _, port in seen}) == 2
    balancer = (FOLDER / "nginx-replicas.conf").read_text(encoding="utf-8")
    assert sorted(re.findall(r"server 127\.0\.0\.1:(\d+)", balancer)) == sorted(str(port) for _, port in seen)


def test_nginx_accepts_its_configuration(tmp_path: Path) -> None:
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if program is None:
        pytest.skip("nginx is not installed on this machine")
    command = [program, "-t", "-c", str(FOLDER / "nginx-replicas.conf"), "-p", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


# the page


def test_the_page_names_every_file() -> None:
    for path in FOLDER.rglob("*"):
        if path.is_file() and FOLDER / "helm" not in path.parents:
            assert f"configs/deploy/{path.relative_to(FOLDER).as_posix()}" in PAGE, path
    for path in re.findall(r"`(configs/deploy/[^`]+)`", PAGE):
        assert (ROOT / path).exists(), path
