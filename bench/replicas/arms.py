"""One arm: fresh simulated engines, a store, some replicas, one replay in turns, and the engines' own hit counters."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np

from bench.replicas.processes import free_port, replica_processes
from replayer.replay.plan import PlanOptions
from replayer.replay.replay import ReplayOptions, replay_trace
from replayer.traces.trace import Trace

_READY_S = 120.0
_INTERVAL_S = 0.05
"""The setting's default, here in engine seconds."""
_LEAST_INTERVAL_S = 0.01
"""The setting's bound."""
_COUNTER = re.compile(r"^vllm:prefix_cache_(hits|queries)_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class NoStoreError(RuntimeError):
    """Neither Redis nor Valkey is installed."""


class ReplicaArm(msgspec.Struct, frozen=True):
    """Variables of one arm."""

    replicas: int
    events: bool
    """The replicas follow the engines' KV events; else their shadow indexes predict."""
    sharing: bool

    @property
    def label(self) -> str:
        """Name of its folder and row."""
        return f"{self.replicas}-{'events' if self.events else 'shadow'}-{'shared' if self.sharing else 'alone'}"


class ReplicaLoad(msgspec.Struct, frozen=True):
    """Constants of all arms."""

    engines: int
    profile: str
    engine_speed: float
    policy: str


class ReplicaFigures(msgspec.Struct, frozen=True):
    """Figures of one arm; times are engine seconds."""

    arm: ReplicaArm
    requests: int
    failed: int
    hit_rate: float
    """Of the prompt tokens, by the engines' own counters."""
    ttft_p50_s: float
    ttft_p90_s: float
    wall_s: float


def run_arm(arm: ReplicaArm, load: ReplicaLoad, trace: Trace, folder: Path) -> ReplicaFigures:
    """Run one arm. Raises TimeoutError if a process does not become ready, NoStoreError."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.jsonl").unlink(missing_ok=True)
    began_s = time.monotonic()
    with _engines(load, folder) as engines, _store(arm, folder) as store:

        def settings(number: int) -> dict[str, Any]:
            # The engines' clock runs faster than the replicas', so news would be as much older there.
            interval_s = max(_LEAST_INTERVAL_S, _INTERVAL_S / load.engine_speed)
            shared = {"url": store, "replica": f"replica-{number}", "publish_interval_s": interval_s}
            return {
                "instances": [engine.instance(arm.events) for engine in engines],
                "policy": {"name": load.policy},
                "log_level": "warning",
                "sharing": {} if store is None else shared,
            }

        with replica_processes(arm.replicas, folder, settings) as replicas:
            for each in replicas:
                _until_ready(f"{each.url}/ready")
            urls = [each.url for each in replicas]
            options = ReplayOptions(
                endpoint=urls[0],
                further_endpoints=tuple(urls[1:]),
                label=arm.label,
                clock_scale=load.engine_speed,
                plan=PlanOptions(),
            )
            run = asyncio.run(replay_trace(trace, folder / "run.jsonl", options))
            hits, queries = _counted([engine.url for engine in engines])
    good = [record.ttft_s for record in run.records if record.ok and record.ttft_s is not None]
    return ReplicaFigures(
        arm,
        len(run.records),
        sum(not record.ok for record in run.records),
        round(hits / max(1.0, queries), 4),
        round(float(np.quantile(good, 0.5)), 3),
        round(float(np.quantile(good, 0.9)), 3),
        round(time.monotonic() - began_s, 1),
    )


class _Engine:
    def __init__(self, number: int, load: ReplicaLoad) -> None:
        self.number = number
        self.port, self.bootstrap, self.events, self.replay = (free_port() for _ in range(4))
        self.command = [sys.executable, "-m", "warmroute", "sim", "engine", "--port", str(self.port)]
        self.command += ["--bootstrap-port", str(self.bootstrap), "--profile", load.profile, "--role", "none"]
        self.command += ["--kv-events-port", str(self.events), "--kv-events-replay-port", str(self.replay)]
        self.command += ["--engine-speed", str(load.engine_speed)]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def instance(self, events: bool) -> dict[str, Any]:
        followed = {
            "events_url": f"tcp://127.0.0.1:{self.events}",
            "events_replay_url": f"tcp://127.0.0.1:{self.replay}",
        }
        return {"name": f"inst-{self.number}", "url": self.url, **(followed if events else {})}


@contextlib.contextmanager
def _engines(load: ReplicaLoad, folder: Path) -> Iterator[list[_Engine]]:
    engines = [_Engine(number, load) for number in range(load.engines)]
    with contextlib.ExitStack() as stack:
        for engine in engines:
            stack.enter_context(_process(engine.command, folder / f"engine-{engine.number}.log"))
        for engine in engines:
            _until_ready(f"{engine.url}/health")
        yield engines


@contextlib.contextmanager
def _store(arm: ReplicaArm, folder: Path) -> Iterator[str | None]:
    if not arm.sharing:
        yield None
        return
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        raise NoStoreError("neither redis-server nor valkey-server is on the PATH: `make store` installs one")
    port = free_port()
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    with _process(command, folder / "store.log"):
        yield f"redis://127.0.0.1:{port}/0"


@contextlib.contextmanager
def _process(command: Sequence[str], log: Path) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield
        finally:
            process.kill()
            process.wait()


def _until_ready(url: str) -> None:
    ends_s = time.monotonic() + _READY_S
    while time.monotonic() < ends_s:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5.0, trust_env=False).status_code == httpx.codes.OK:
                return
        time.sleep(0.2)
    raise TimeoutError(f"{url} did not become ready within {_READY_S:g} s")


def _counted(engines: Sequence[str]) -> tuple[float, float]:
    sums = {"hits": 0.0, "queries": 0.0}
    for engine in engines:
        for name, value in _COUNTER.findall(httpx.get(f"{engine}/metrics", timeout=10.0, trust_env=False).text):
            sums[name] += float(value)
    return sums["hits"], sums["queries"]
