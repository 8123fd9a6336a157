"""A proxy process in front of simulated engines, with traffic, and an admin client for it."""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import yaml

from tests.integration.fleet import ROOT, SimEngine, free_port

KEY = "wr-for-the-dashboard"
KEYS = {"admin": [{"name": "ops", "sha256": hashlib.sha256(KEY.encode()).hexdigest()}]}
HOSTILE = "<img src=x onerror=document.title='owned'>"
"""Session id of a client that tries to inject HTML."""
_WAIT_S = 30.0


class LiveProxy:
    """The proxy as a process on a fixed port, so that it can be stopped and started again."""

    def __init__(self, folder: Path, engines: list[SimEngine], **settings: Any) -> None:
        """``settings`` replace those below."""
        self.engines = engines
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._config = folder / "proxy.yaml"
        self._log = folder / "proxy.log"
        instances = [
            {"name": f"engine-{at}", "url": each.url, "bootstrap_url": each.bootstrap_url, "role": "kv_both"}
            for at, each in enumerate(engines)
        ]
        given = {
            "port": self.port,
            "instances": instances,
            "keys": KEYS,
            "health": {"interval_s": 0.5},
            "offload": {"planner": "threshold", "params": {"min_decode_requests": 0}},
            "limits": {"slow_decision_s": 1.0},  # what is slow on a busy machine is no matter of these tests
            "grace_s": 1.0,
            **settings,
        }
        self._config.write_text(yaml.safe_dump(given), encoding="utf-8")
        self._process: subprocess.Popen[bytes] | None = None
        self.client = httpx.Client(
            base_url=self.url, timeout=30, trust_env=False, headers={"authorization": f"Bearer {KEY}"}
        )

    def start(self) -> None:
        command = [sys.executable, "-m", "proxy", "--config", str(self._config)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        until(self._ready, "the proxy is ready")

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=10)
        self._process = None

    def get(self, path: str, **query: Any) -> Any:
        answer = self.client.get(path, params=query or None)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def complete(self, prompt: list[int], session: str, *, max_tokens: int = 16, **more: Any) -> httpx.Response:
        body = {"model": "warm-sim", "prompt": prompt, "max_tokens": max_tokens, **more}
        return self.client.post("/v1/completions", json=body, headers={"x-session-id": session})

    def _ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()
        try:
            return self.client.get("/ready").status_code == 200
        except httpx.HTTPError:
            return False


class Traffic:
    """Agentic sessions, a few at once, until it is stopped: every turn repeats the prompt before it."""

    def __init__(self, proxy: LiveProxy, workers: int = 6) -> None:
        self._proxy = proxy
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(workers)]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(timeout=20)

    def _run(self, worker: int) -> None:
        draw, number = Random(worker), 0
        while not self._stopped.is_set():
            number += 1
            # Every third session begins with more new tokens than a HEAVY request needs, so it is handed over.
            size = 24_000 if number % 3 == 1 else draw.randrange(1_000, 9_000)
            prompt = [draw.randrange(1_000, 90_000) for _ in range(size)]
            for _ in range(4):
                if self._stopped.is_set():
                    return
                with contextlib.suppress(httpx.HTTPError):  # the proxy is being restarted
                    self._proxy.complete(
                        prompt, f"agent-{worker}-{number}", max_tokens=draw.randrange(40, 200), stream=True
                    )
                prompt += [draw.randrange(1_000, 90_000) for _ in range(draw.randrange(100, 900))]
                self._stopped.wait(0.3)


@contextlib.contextmanager
def live_proxy(folder: Path, engines: int = 4) -> Iterator[LiveProxy]:
    """A proxy with simulated engines that run 8 times faster than real ones."""
    started = [SimEngine(folder / f"engine-{number}.log", ("--engine-speed", "8")) for number in range(engines)]
    proxy = LiveProxy(folder, started)
    try:
        for engine in started:
            engine.start()
        until(lambda: all(map(answers, started)), "the engines answer")
        proxy.start()
        yield proxy
    finally:
        proxy.stop()
        proxy.client.close()
        for engine in started:
            engine.kill()


def answers(engine: SimEngine) -> bool:
    """True if the engine's process serves."""
    assert engine.process is not None
    assert engine.process.poll() is None, engine.log.read_text()
    try:
        return httpx.get(f"{engine.url}/health", timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait for an external condition."""
    deadline = time.monotonic() + _WAIT_S
    while time.monotonic() < deadline:
        if holds():
            return
        time.sleep(0.05)
    raise AssertionError(f"not within {_WAIT_S:g} s: {what}")
