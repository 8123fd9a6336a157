"""The doctor's probe and command on this machine."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import MappingProxyType

import psutil
import pytest
import trustme
import yaml
from typer.testing import CliRunner

from launch.__main__ import app
from launch.doctor.probe import gather
from launch.doctor.probes.clocks import ask_clocks, certain_offset
from launch.doctor.probes.conditions import ask_proxy
from launch.doctor.probes.python import ask_python
from launch.fleet.file import parse_fleet
from tests.launch.conftest import fleet_values
from tests.launch.fake_nvml import FakeGpu, FakeNvml

CONDITIONS = b'{"ready": true, "conditions": [{"name": "accepting", "ok": true, "detail": "yes"}]}'
SCHEMES = "give a URL that begins with http:// or https://, as http://127.0.0.1:9090"
Serve = Callable[..., ThreadingHTTPServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers of one answer each, for HTTP or with a context HTTPS; their paths asked are in ``asked``."""
    with contextlib.ExitStack() as running:

        def start(
            status: int,
            body: bytes = b"",
            headers: Mapping[str, str] = MappingProxyType({}),
            port: int = 0,
            context: ssl.SSLContext | None = None,
            asked: list[str] | None = None,
        ) -> ThreadingHTTPServer:
            class Handler(BaseHTTPRequestHandler):
                def do_GET(self) -> None:
                    if asked is not None:
                        asked.append(self.path)
                    self.send_response_only(status)
                    for name, value in {**headers, "Content-Length": str(len(body))}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(body)

                def log_message(self, *arguments: object) -> None:
                    """No log."""

            server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
            running.callback(server.server_close)
            if context is not None:
                server.socket = context.wrap_socket(server.socket, server_side=True)
            thread = Thread(target=server.serve_forever)
            thread.start()
            running.callback(thread.join)
            running.callback(server.shutdown)
            return server

        yield start


def test_this_machine() -> None:
    facts = gather(engine_python=sys.executable, environment={"MC_FORCE_TCP": "1"})
    assert facts.host.memory_total_bytes == psutil.virtual_memory().total
    assert facts.host.nofile.soft is None or facts.host.nofile.soft > 0
    assert (facts.environment, facts.fleet, facts.clocks) == ({"MC_FORCE_TCP": "1"}, None, [])
    assert (facts.engine_python.error, facts.engine_python.executable) == (None, sys.executable)
    assert facts.engine_python.python == ".".join(map(str, sys.version_info[:3]))
    assert "torch" not in sys.modules


def test_the_gpus_come_from_the_library_given() -> None:
    facts = gather(engine_python=sys.executable, library=FakeNvml(FakeGpu(uuid="GPU-x")), environment={})
    assert [gpu.uuid for gpu in facts.gpus.gpus] == ["GPU-x"]


def python_with(tmp_path: Path, **files: str) -> str:
    """A Python with fake distributions and packages, through a wrapper script."""
    for name, text in files.items():
        path = tmp_path / "site" / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "site"} exec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    return str(wrapper)


def test_packages_are_reported_without_importing_them(tmp_path: Path) -> None:
    site = tmp_path / "site"
    for name, version in (("vllm", "0.20.2"), ("torch", "2.11.0+cu130"), ("mooncake_transfer_engine_cuda13", "0.3.14")):
        folder = site / f"{name}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    for package in ("torch", "vllm", "mooncake"):
        (site / package).mkdir()
        (site / package / "__init__.py").write_text("raise SystemExit('imported')\n")
    (site / "torch" / "version.py").write_text("__version__ = '2.11.0+cu130'\ncuda: str | None = '13.0'\nhip = None\n")
    found = ask_python(python_with(tmp_path))
    assert found.error is None
    assert found.packages == {
        "vllm": "0.20.2",
        "torch": "2.11.0+cu130",
        "mooncake-transfer-engine-cuda13": "0.3.14",
    }
    assert (found.torch_cuda, found.openmp, found.mooncake_missing) == ("13.0", None, [])


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (None, "cannot be run (No such file"),
        ("#!/bin/sh\necho oops >&2; exit 3\n", "could not list its packages (oops)"),
        ("#!/bin/sh\necho hello\n", "is it a Python?"),
    ],
)
def test_what_is_no_python_is_reported(tmp_path: Path, script: str | None, words: str) -> None:
    path = tmp_path / "python"
    if script is not None:
        path.write_text(script)
        path.chmod(0o755)
    assert words in (ask_python(str(path)).error or "")


@pytest.mark.parametrize(
    ("date", "sent", "received", "offset"),
    [
        (100.0, 100.5, 100.6, 0.0),
        (99.0, 100.5, 100.6, 0.0),
        (105.0, 100.5, 100.6, 4.4),
        (90.0, 100.5, 100.6, -8.5),
    ],
)
def test_the_offset_is_what_is_certain(date: float, sent: float, received: float, offset: float) -> None:
    assert certain_offset(date, sent, received) == pytest.approx(offset)


def test_clocks_are_read_from_real_answers(serve: Serve) -> None:
    fleet = parse_fleet(fleet_values(count=1))
    serve(404, headers={"Date": formatdate(time.time() + 3600, usegmt=True)}, port=fleet.members[0].port)
    engine, proxy = ask_clocks(fleet)
    assert engine.error is None
    assert 3590 < engine.offset_s <= 3601
    assert "does not answer" in (proxy.error or "")


@pytest.mark.parametrize(
    ("body", "conditions", "error"),
    [
        (b'{"ready": false, "conditions": [{"name": "instances", "ok": false, "detail": "0 of 1"}]}', 1, None),
        (b'{"ready": true}', 0, "answered 503 without conditions"),
        (b"hello", 0, "answered 503 without conditions"),
    ],
)
def test_conditions_are_read_from_a_running_proxy(
    serve: Serve, body: bytes, conditions: int, error: str | None
) -> None:
    asked: list[str] = []
    server = serve(503, body, asked=asked)
    found = ask_proxy(None, f"http://127.0.0.1:{server.server_port}/")
    assert found is not None
    assert (len(found.conditions), found.error, asked) == (conditions, error, ["/ready?verbose"])
    assert found.remedy == (None if error is None else "is a warmroute proxy there? --proxy names it")


def test_a_proxy_that_does_not_answer_is_no_error_of_the_doctor() -> None:
    assert ask_proxy(None, None) is None
    fleet = parse_fleet(fleet_values(count=1))
    found = ask_proxy(fleet, None)
    assert found is not None
    assert (found.url, found.error, found.remedy) == (fleet.proxy_url(), "does not answer (ConnectError)", None)


def test_a_proxy_s_certificate_is_trusted_by_ca_file_and_named_as_the_problem_without(
    serve: Serve, tmp_path: Path
) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    server = serve(200, CONDITIONS, context=context)

    def conditions(scheme: str, host: str, *flags: str) -> tuple[str, str]:
        _, output = doctor("--json", "--proxy", f"{scheme}://{host}:{server.server_port}", *flags)
        (asked,) = [one for one in json.loads(output)["findings"] if one["check"] == "conditions"]
        return asked["status"], f"{asked['found']}; {asked['fix']}"

    trusted = ("--ca-file", str(tmp_path / "ca.pem"))
    assert conditions("https", "localhost", *trusted)[0] == "ok"
    for host, flags, why in (("localhost", (), "unable to get"), ("127.0.0.1", trusted, "IP address mismatch")):
        status, text = conditions("https", host, *flags)
        assert (status, why in text, "--ca-file" in text) == ("warning", True, True), text
    assert "begin --proxy with https://" in conditions("http", "localhost")[1]


def test_a_proxy_without_tls_is_to_be_asked_over_http(serve: Serve) -> None:
    found = ask_proxy(None, f"https://127.0.0.1:{serve(200).server_port}")
    assert found is not None
    assert found.remedy == "if it serves plain HTTP, begin --proxy with http://"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--ca-file", "ca.pem"), "--ca-file is for --proxy: give its URL too"),
        (("--cert-file", "me.pem"), "--cert-file is for --proxy: give its URL too"),
        (("--proxy", "https://h:1", "--ca-file", "none.pem"), "--ca-file none.pem: No such file or directory"),
        (("--proxy", "localhost:9090"), f"--proxy localhost:9090: {SCHEMES}"),
        (("--proxy", "ftp://h"), f"--proxy ftp://h: {SCHEMES}"),
        (("--proxy", "http://h:x"), "--proxy http://h:x: Invalid port: 'x'"),
    ],
)
def test_a_proxy_that_cannot_be_asked_as_given_is_refused(flags: tuple[str, ...], message: str) -> None:
    assert doctor(*flags) == (2, f"error: {message}\n")


def doctor(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", "--engine-python", sys.executable, *arguments])
    return result.exit_code, result.output


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MC_INTRANODE_NVLINK", "MC_FORCE_TCP", "PYTORCH_CUDA_ALLOC_CONF", "PROMETHEUS_MULTIPROC_DIR"):
        monkeypatch.delenv(name, raising=False)
    values = fleet_values()
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump(values))
    code, output = doctor("--fleet", str(path), "--json")
    reported = json.loads(output)
    assert (reported["schema"], reported["problems"]) == (
        2,
        sum(one["status"] == "problem" for one in reported["findings"]),
    )
    assert code == (1 if reported["problems"] else 0)
    ports = [one for one in reported["findings"] if one["check"] == "ports"]
    assert [one["status"] for one in ports] == ["ok"]

    with socket.create_server(("127.0.0.1", values["base_port"] + 1)):
        code, output = doctor("--fleet", str(path), "--json")
    assert code == 1
    (busy,) = [one for one in json.loads(output)["findings"] if one["check"] == "ports"]
    assert (busy["status"], f"port {values['base_port'] + 1} for inst-1" in busy["found"]) == ("problem", True)

    monkeypatch.setenv("MC_INTRANODE_NVLINK", "0")
    code, output = doctor()
    assert code == 1
    assert "turns NVLink on" in " ".join(output.replace("│", " ").split())

    monkeypatch.delenv("MC_INTRANODE_NVLINK")
    _, output = doctor("--json", "--proxy", f"http://127.0.0.1:{values['base_port']}")
    (asked,) = [one for one in json.loads(output)["findings"] if one["check"] == "conditions"]
    assert (asked["status"], "does not answer" in asked["found"]) == ("warning", True)
    assert asked["fix"] == "is the proxy running? --proxy names it"

    assert doctor("--fleet", str(tmp_path / "none.yaml"))[0] == 2
    code, output = doctor("--list")
    assert (code, "| check | looks at |" in output) == (0, True)
