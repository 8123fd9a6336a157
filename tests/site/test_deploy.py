"""The files of configs/deploy are valid, hardened as the page says, and refer to files and commands that exist."""

from __future__ import annotations

import configparser
import importlib
import json
import re
import shlex
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.settings import load_settings
from tests.command_line.commands import root
from tests.command_line.documents import CommandLine, problem
from tests.integration.fleet import free_port
from tests.proxy.sharing.store_server import PROGRAM, needs_store

# It has no type stubs.
jsonschema: Any = importlib.import_module("jsonschema")

ROOT = Path(__file__).parents[2]
LOADER = ROOT / ".compose" / "cmd"
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
        "pull_policy": {"const": "never"},
        "user": {"type": "string"},
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
        "stop_signal": {"const": "SIGQUIT"},
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


def test_the_documented_reload_signals_the_proxy_only() -> None:
    """A search for command lines also finds shells, editors and other proxies."""
    pages = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}
    assert "$ sudo systemctl reload warmroute" in pages["operations.md"]
    assert [name for name, text in pages.items() if "pgrep -f" in text or "pkill -f" in text] == []


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


@pytest.mark.parametrize("name", ["compose.yaml", REPLICAS])
def test_no_service_needs_the_capabilities_that_it_lacks(name: str) -> None:
    """Images start as root, to change to a user of their own, except the one that is built here."""
    for service in compose(name)["services"].values():
        if service.get("cap_drop") == ["ALL"]:
            assert service["image"] == "warmroute" or service.get("user", "root") != "root", service


@pytest.mark.parametrize("name", ["compose.yaml", REPLICAS])
def test_every_image_without_a_version_is_built_once(name: str) -> None:
    services = compose(name)["services"].values()
    built = [service["image"] for service in services if "build" in service]
    assert built == ["warmroute"]
    for service in services:
        if service["image"] == "warmroute" and "build" not in service:
            assert service["pull_policy"] == "never", (
                "no registry is asked for a name that somebody else may have there"
            )


@pytest.mark.parametrize("name", ["compose.yaml", REPLICAS])
def test_the_loader_of_compose_accepts_the_file_and_finds_every_path(name: str, tmp_path: Path) -> None:
    if not LOADER.exists():
        pytest.skip("the loader of Docker Compose is not built: make compose-loader")
    loaded = json.loads(_load(FOLDER / name).stdout)
    assert loaded["services"].keys() == compose(name)["services"].keys()
    for service in loaded["services"].values():
        for mount in service.get("volumes", []):
            assert mount["type"] == "volume" or Path(mount["source"]).exists(), mount
        if "build" in service:
            assert (Path(service["build"]["context"]) / service["build"]["dockerfile"]).is_file()
    wrong = tmp_path / "compose.yaml"
    wrong.write_text("name: a\nservices: {a: {image: b, ulimit: 1}}\n", encoding="utf-8")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        _load(wrong)
    assert "ulimit" in caught.value.stderr


def _load(path: Path) -> subprocess.CompletedProcess[str]:
    command = [str(LOADER), "-format", "json", str(path)]
    return subprocess.run(command, cwd=path.parent, capture_output=True, text=True, timeout=60, check=True)


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


def test_the_balancer_lets_every_body_through_that_a_replica_accepts() -> None:
    balancer = (FOLDER / "nginx-replicas.conf").read_text(encoding="utf-8")
    (found,) = re.findall(r"client_max_body_size (\d+)m;", balancer)
    assert int(found) * 1024 * 1024 >= load_settings(ROOT / "configs" / "proxy.yaml").limits.body_bytes
    assert re.findall(r"listen (\S+);", balancer) == ["127.0.0.1:9090"]


def test_the_balancer_is_stopped_as_gently_as_a_replica() -> None:
    """It is stopped first, and breaks the streams that it still passes on when it is killed."""
    services = compose(REPLICAS)["services"]
    balancer, replica = services["balancer"], services["replica-1"]
    assert set(balancer["depends_on"]) == set(replicas())
    # SIGTERM ends nginx at once.
    assert balancer["stop_signal"] == "SIGQUIT"
    assert balancer["stop_grace_period"] == replica["stop_grace_period"]


def test_the_balancer_has_the_descriptors_that_its_workers_set() -> None:
    balancer = (FOLDER / "nginx-replicas.conf").read_text(encoding="utf-8")
    (workers,) = re.findall(r"worker_rlimit_nofile (\d+);", balancer)
    assert compose(REPLICAS)["services"]["balancer"]["ulimits"]["nofile"] >= int(workers)


def test_the_image_has_the_extra_that_the_replicas_need() -> None:
    assert "[redis]" in (ROOT / "Containerfile").read_text(encoding="utf-8")


@needs_store
def test_the_store_accepts_its_flags_and_answers(tmp_path: Path) -> None:
    """The server of this machine instead of the image's: Redis and Valkey have the same flags."""
    _, *flags = compose(REPLICAS)["services"]["store"]["command"]
    port = free_port()
    flags[flags.index("--port") + 1] = str(port)
    with (tmp_path / "store.log").open("wb") as log:
        process = subprocess.Popen([str(PROGRAM), *flags], cwd=tmp_path, stdout=log, stderr=log)
    try:
        assert _pong(process, port), (tmp_path / "store.log").read_text(encoding="utf-8")
        assert [path.name for path in tmp_path.iterdir()] == ["store.log"], "nothing is kept on disk"
    finally:
        process.kill()
        process.wait()


def _pong(process: subprocess.Popen[bytes], port: int) -> bool:
    for _ in range(300):
        if process.poll() is not None:
            return False
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            time.sleep(0.1)
    return False


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
