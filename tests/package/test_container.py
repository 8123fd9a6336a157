"""The container file: what a reader of it relies on, its health check, its steps, and its build where a runtime is."""

from __future__ import annotations

import json
import os
import re
import shutil
import socketserver
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement

from tests.package.conftest import ROOT, Installation, clean_environment, free_ports

FILE = ROOT / "Containerfile"
RUNTIMES = ("podman", "docker", "buildah")


class Step(NamedTuple):
    """One instruction."""

    name: str
    argument: str


def steps(text: str) -> list[Step]:
    """Instructions in order; comments left out, continued lines joined."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", " ", lines)
    return [Step(*line.split(None, 1)) for line in joined.splitlines() if line.strip()]


STEPS = steps(FILE.read_text(encoding="utf-8"))
STAGES = [number for number, step in enumerate(STEPS) if step.name == "FROM"]
BUILD, FINAL = STEPS[: STAGES[-1]], STEPS[STAGES[-1] :]


def argument(name: str) -> str:
    (found,) = [step.argument for step in FINAL if step.name == name]
    return found


def health_command() -> list[str]:
    """The health check's command, with this interpreter."""
    _, command = argument("HEALTHCHECK").split("CMD ", 1)
    words: list[str] = json.loads(command)
    assert words[0] == "/opt/warmroute/bin/python"
    return [sys.executable, *words[1:]]


# the file


def test_the_images_are_pinned_to_a_tested_python() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for number in STAGES:
        found = re.match(r"python:(3\.\d+)-slim\b", STEPS[number].argument)
        assert found, STEPS[number]
        assert f"Programming Language :: Python :: {found[1]}" in project["classifiers"]


def test_the_final_stage_is_small_and_not_root() -> None:
    assert len(STAGES) == 2
    names = [step.name for step in FINAL]
    assert {"ADD", "MAINTAINER"}.isdisjoint(step.name for step in STEPS)
    assert [step.argument for step in FINAL if step.name == "COPY"] == ["--from=build /opt/warmroute /opt/warmroute"]
    user = argument("USER")
    assert user.isdigit(), "a number: Kubernetes' runAsNonRoot cannot check a name"
    assert int(user) >= 10_000
    assert f"--uid {user} " in argument("RUN")
    assert names.index("USER") > names.index("RUN")


def test_the_entry_point_and_the_health_check_are_run_without_a_shell() -> None:
    assert json.loads(argument("ENTRYPOINT")) == ["/opt/warmroute/bin/warmroute", "serve"]
    assert "HEALTH_URL=http://127.0.0.1:9090/health" in [step.argument for step in FINAL if step.name == "ENV"]
    assert argument("EXPOSE") == "9090"
    assert len(health_command()) == 3


def test_packages_come_in_the_locked_versions() -> None:
    (install,) = [step.argument for step in BUILD if step.name == "RUN"]
    assert "--constraint requirements.lock" in install
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    locked = set(
        re.findall(r"^([a-z0-9._-]+)==", (ROOT / "requirements.lock").read_text(encoding="utf-8"), re.MULTILINE)
    )
    needed = {Requirement(each).name for each in project["dependencies"]}
    assert "sse-starlette" in needed
    assert needed <= locked
    assert "uv" in locked


def test_what_a_build_does_not_need_is_not_sent_to_the_builder() -> None:
    ignored = set((ROOT / ".dockerignore").read_text(encoding="utf-8").split())
    assert {".git", ".venv*", "runs", "dist", "site"} <= ignored


# the health check


@contextmanager
def answering(status: int) -> Iterator[str]:
    """A server that answers every request with this status; gives its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Stay silent."""

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/health"
        finally:
            server.shutdown()
            thread.join()


def check_health(url: str) -> int:
    environment = clean_environment() | {"HEALTH_URL": url, "http_proxy": "http://127.0.0.1:9"}
    return subprocess.run(health_command(), env=environment, capture_output=True, timeout=30, check=False).returncode


def test_the_health_check_passes_with_a_proxy_that_answers_and_fails_otherwise() -> None:
    with answering(200) as url:
        assert check_health(url) == 0
    assert check_health(url) != 0
    with answering(503) as url:
        assert check_health(url) != 0


# its steps


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of the source tree, as the builder receives them."""
    target = tmp_path_factory.mktemp("container") / "src"
    kept = (
        "warmroute.py",
        "warmroute_man.py",
        "warmroute_names.py",
        "warmroute_tls.py",
        "warmroute_yaml.py",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "requirements.lock",
    )
    target.mkdir()
    for name in kept:
        shutil.copy(ROOT / name, target)
    for name in ("policies", "proxy", "launch", "replayer", "sim", "bench", "configs"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    return target


@pytest.mark.package
@pytest.mark.timeout(600)
def test_its_steps_give_an_environment_that_serves(copied: Path, tmp_path: Path) -> None:
    (install,) = [step.argument for step in BUILD if step.name == "RUN"]
    environment, dist = tmp_path / "warmroute", tmp_path / "dist"
    install = install.replace("/opt/warmroute", str(environment)).replace("/dist", str(dist))
    install = re.sub(r"^python ", f"{sys.executable} ", install)
    done = subprocess.run(
        ["sh", "-c", install],
        cwd=copied,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (environment / "bin" / "uv").exists()
    program, *words = json.loads(argument("ENTRYPOINT"))
    assert program.startswith("/opt/warmroute/bin/")
    (port,) = free_ports(1)
    unrelated = tmp_path / "unrelated"
    unrelated.mkdir()
    installed = Installation(environment / "bin", unrelated)
    with installed.running(*words, "--port", str(port), "--instance", "http://127.0.0.1:9") as log:
        ends_s = time.monotonic() + 60
        while check_health(f"http://127.0.0.1:{port}/health") != 0:
            assert time.monotonic() < ends_s, log.read_text(encoding="utf-8")
            time.sleep(0.2)


# its build


def runtime() -> str | None:
    """A program that can build images here; None: none, or its service is not running."""
    for name in RUNTIMES:
        if shutil.which(name) is None:
            continue
        done = subprocess.run([name, "info"], capture_output=True, timeout=60, check=False)
        if done.returncode == 0:
            return name
    return None


def lacking(name: str) -> list[str]:
    """Base images that this machine has not and cannot pull."""
    inspect = ["inspect", "--type", "image"] if name == "buildah" else ["image", "inspect"]
    found = []
    for image in {STEPS[number].argument.split()[0] for number in STAGES}:
        ways = ([*inspect, image], ["pull", image])
        if all(subprocess.run([name, *way], capture_output=True, timeout=300, check=False).returncode for way in ways):
            found.append(image)
    return found


@pytest.mark.package
@pytest.mark.timeout(600)
def test_the_image_builds_and_serves(tmp_path: Path) -> None:
    name = runtime()
    if name is None:
        pytest.skip(f"none of {', '.join(RUNTIMES)} can build here (not installed, or its service is not running)")
    if images := lacking(name):
        pytest.skip(f"{name} has not and cannot pull {', '.join(images)}")
    tag = f"warmroute-test-{os.getpid()}"
    build = [name, "build", "-f", str(FILE), "-t", tag, str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    try:
        if name != "buildah":
            shown = subprocess.run(
                [name, "run", "--rm", tag, "--help"], capture_output=True, text=True, timeout=100, check=False
            )
            assert "--instance" in shown.stdout, shown.stderr
    finally:
        subprocess.run([name, "rmi", tag], capture_output=True, timeout=100, check=False)
