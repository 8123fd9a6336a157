"""`configs/deploy/compose-replicas.yaml` as it is, brought up by a container engine; run by `make test-compose`.

Two simulated engines listen where `configs/proxy.yaml` expects them. Every port is the file's own.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.integration.fleet import ROOT, SimEngine

pytestmark = [pytest.mark.compose, pytest.mark.timeout(600)]

FILE = ROOT / "configs" / "deploy" / "compose-replicas.yaml"
BALANCER, *REPLICAS = (f"http://127.0.0.1:{port}" for port in (9090, 9091, 9092))
ENGINES = ((8000, 8998), (8001, 8999))
"""Ports of each engine's API and of its bootstrap server."""
PORTS = (6379, 9090, 9091, 9092, *(port for engine in ENGINES for port in engine))
SESSIONS = 8
STREAM = 1500
"""Tokens of an answer that takes several seconds."""


def compose(*words: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a command of Docker Compose on the file."""
    command = ["docker", "compose", "-f", str(FILE), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)


def done(*words: str, timeout_s: float = 120) -> None:
    """Run a command of Docker Compose that has to succeed."""
    result = compose(*words, timeout_s=timeout_s)
    assert result.returncode == 0, result.stdout + result.stderr


def reason_to_skip() -> str | None:
    """The reason for which the file cannot be brought up here."""
    if shutil.which("docker") is None:
        return "docker is not installed"
    for words in (["compose", "version"], ["info"]):
        result = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=60, check=False)
        if result.returncode != 0:
            first, _, _ = result.stderr.strip().partition("\n")
            return f"docker {' '.join(words)}: {first}"
    if used := [port for port in PORTS if listens(port)]:
        return f"ports in use on this machine: {used}"
    return None


def listens(port: int) -> bool:
    """True if a connection to the port is accepted."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=60, trust_env=False) as opened:
        yield opened


@pytest.fixture(scope="module", autouse=True)
def deployment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Engines and everything that the file has; ended after the last test."""
    if "compose" not in (request.config.getoption("markexpr") or "").split():
        pytest.skip("run by `make test-compose`")
    if reason := reason_to_skip():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("engines")
    engines = [
        SimEngine(folder / f"{api}.log", ("--engine-speed", "2"), port=api, bootstrap_port=bootstrap)
        for api, bootstrap in ENGINES
    ]
    try:
        for engine in engines:
            engine.start()
        done("up", "--build", "--detach", timeout_s=500)
        yield
    finally:
        compose("down")
        for engine in engines:
            engine.kill()


@pytest.fixture(autouse=True)
def both_ready(client: httpx.Client, deployment: None) -> None:
    """Two replicas that are ready and have heard of each other, behind the balancer."""
    until(lambda: all(answers(client, f"{url}/ready") for url in (*REPLICAS, BALANCER)))
    until(lambda: [len(others(client, url)) for url in REPLICAS] == [1, 1])


def until(holds: Callable[[], bool]) -> None:
    """Wait for a condition of the containers, at most a minute."""
    for _ in range(300):
        if holds():
            return
        time.sleep(0.2)
    raise AssertionError(compose("logs", "--tail", "30").stdout)


def answers(client: httpx.Client, url: str) -> bool:
    """True if the answer is 200."""
    try:
        return client.get(url).status_code == 200
    except httpx.TransportError:
        return False


def read(client: httpx.Client, url: str) -> Any:
    """Body of an admin endpoint."""
    return client.get(url).raise_for_status().json()


def others(client: httpx.Client, url: str) -> list[str]:
    """Names of the replicas that one of them has heard of."""
    return [other["replica"] for other in read(client, f"{url}/replicas")["others"]]


def others_load(client: httpx.Client, url: str) -> int:
    """Requests in flight that a replica has heard of from others."""
    return sum(other["requests"] for other in read(client, f"{url}/replicas")["others"])


def shared_state(client: httpx.Client, url: str) -> tuple[bool, bool]:
    """The condition ``shared_state`` and ``linked`` of a replica."""
    found = read(client, f"{url}/ready?verbose")
    (ok,) = [condition["ok"] for condition in found["conditions"] if condition["name"] == "shared_state"]
    return ok, read(client, f"{url}/replicas")["linked"]


def body(first: int, tokens: int = 320, answer: int = 4) -> dict[str, Any]:
    """A request whose prompt is shared with no other ``first``."""
    return {"model": "warm-sim", "prompt": [first * 1000 + each for each in range(tokens)], "max_tokens": answer}


def ask(client: httpx.Client, url: str, session: str, request: dict[str, Any]) -> tuple[str, int]:
    """Send a turn; gives its instance and the cached tokens that the engine reports."""
    answer = client.post(f"{url}/v1/completions", json=request, headers={"x-session-id": session}).raise_for_status()
    details = answer.json()["usage"]["prompt_tokens_details"] or {}
    return answer.headers["x-warmroute-instance"], details.get("cached_tokens", 0)


def served(client: httpx.Client) -> list[int]:
    """Requests that each replica has finished with success."""
    texts = [client.get(f"{url}/metrics").text for url in REPLICAS]
    return [sum(int(float(line.split()[-1])) for line in text.splitlines() if counts(line)) for text in texts]


def counts(line: str) -> bool:
    """True for a sample of the requests that succeeded."""
    return line.startswith("warmroute_requests_total{") and 'outcome="ok"' in line


@contextmanager
def streaming(client: httpx.Client, url: str, first: int) -> Iterator[Iterator[str]]:
    """A stream that has begun; gives the lines that follow."""
    request = body(first, answer=STREAM) | {"stream": True}
    with client.stream("POST", f"{url}/v1/completions", json=request) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        yield lines


def test_the_next_turn_through_the_other_replica_goes_where_the_prefix_is(client: httpx.Client) -> None:
    """The first test: sessions of others could still be on their way."""
    known = read(client, f"{REPLICAS[1]}/stats")["sessions"]
    first = [ask(client, REPLICAS[0], f"turns-{each}", body(200 + each, 640)) for each in range(SESSIONS)]
    assert len({instance for instance, _ in first}) == 2, "else the other replica would be right by chance"
    until(lambda: read(client, f"{REPLICAS[1]}/stats")["sessions"] == known + SESSIONS)
    # The load that the other replica reported last counts too: until its next report it may outweigh a prefix.
    until(lambda: not others_load(client, REPLICAS[1]))
    second = [ask(client, REPLICAS[1], f"turns-{each}", body(200 + each, 704)) for each in range(SESSIONS)]
    assert second == [(instance, 640) for instance, _ in first]


def test_the_balancer_spreads_requests_over_both_replicas(client: httpx.Client) -> None:
    before = served(client)
    for number in range(20):
        ask(client, BALANCER, f"spread-{number}", body(100 + number))
    gained = [after - earlier for after, earlier in zip(served(client), before, strict=True)]
    assert sum(gained) == 20
    assert min(gained) >= 5


def test_a_killed_replica_breaks_its_own_streams_only(client: httpx.Client) -> None:
    with streaming(client, REPLICAS[0], 300) as lost, streaming(client, REPLICAS[1], 301) as kept:
        done("kill", "--signal", "SIGKILL", "replica-1")
        with pytest.raises(httpx.TransportError):
            list(lost)
        for number in range(20):
            ask(client, BALANCER, f"killed-{number}", body(310 + number))
        assert "data: [DONE]" in list(kept)
    until(lambda: others(client, REPLICAS[1]) == [])
    done("up", "--no-build", "--detach")


def test_replicas_serve_without_the_store_and_report_it(client: httpx.Client) -> None:
    done("stop", "store")
    try:
        until(lambda: [shared_state(client, url) for url in REPLICAS] == [(False, False)] * 2)
        assert all(answers(client, f"{url}/ready") for url in REPLICAS)
        instances = Counter(ask(client, BALANCER, f"alone-{each}", body(400 + each))[0] for each in range(10))
        assert instances.total() == 10
    finally:
        done("start", "store")
    until(lambda: [shared_state(client, url) for url in REPLICAS] == [(True, True)] * 2)


def test_down_waits_for_the_streams_that_the_balancer_passes_on(client: httpx.Client) -> None:
    """The last test: nothing runs after it."""
    with streaming(client, BALANCER, 500) as lines:
        command = ["docker", "compose", "-f", str(FILE), "down"]
        ending = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            until(lambda: not listens(9090))
            assert "data: [DONE]" in list(lines)
            assert ending.wait(120) == 0
        finally:
            ending.kill()
            ending.wait()
    assert [port for port in (6379, 9090, 9091, 9092) if listens(port)] == []
    assert compose("ps", "--all", "--quiet").stdout.strip() == ""
