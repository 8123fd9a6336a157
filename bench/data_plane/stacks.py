"""The stacks under test as processes: start, readiness, CPU and memory use, stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from bench.data_plane import cpu
from bench.data_plane.launches import (
    BASELINE,
    HOST,
    LAUNCHES,
    OURS,
    VARIANTS,
    Launch,
    StackError,
    free_ports,
    warmroute,
)
from bench.data_plane.load.client import LoadTarget
from bench.data_plane.stub.answers import MODEL

READY_TIMEOUT_S = 60.0
STOP_GRACE_S = 8.0
BODY = b'{"model":"%b","prompt":"ready?","max_tokens":80,"stream":true}' % MODEL.encode()


DIRECT = "direct"


@dataclass(kw_only=True)
class Stack:
    """A running stack."""

    name: str
    targets: list[LoadTarget]
    note: str = ""
    process: subprocess.Popen[bytes] | None = None
    companions: list[subprocess.Popen[bytes]] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)
    """Its process and its children at the time it became ready."""
    metrics: tuple[str, str | tuple[str, ...]] | None = None
    """(URL of its metrics, names of those to report), from ``Launch.evidence``."""
    endings: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGKILL)
    """Sent to its process group, each after a grace time."""

    def cpu_s(self) -> float:
        """CPU seconds so far."""
        return cpu.cpu_s(self.pids)

    def rss_bytes(self) -> int:
        """Resident memory."""
        return cpu.rss_bytes(self.pids)

    def evidence(self) -> list[str]:
        """Its own counters, which show whether a router fell back to a cheaper path. Raises StackError."""
        if any(companion.poll() is not None for companion in self.companions):
            raise StackError(f"{self.name}: a process that observes it has ended")
        if self.metrics is None:
            return []
        url, name = self.metrics
        answer = httpx.get(url, timeout=10, trust_env=False).raise_for_status()
        return [line for line in answer.text.splitlines() if line.startswith(name)]

    def stop(self) -> None:
        """Stop it, all its child processes and its companions."""
        for companion in self.companions:
            companion.kill()
            companion.wait()
        if self.process is None:
            return
        for ending in self.endings:
            try:
                os.killpg(self.process.pid, ending)
                self.process.wait(STOP_GRACE_S)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
            else:
                break
        # The leader may exit before its children.
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def start(
    name: str, engines: list[LoadTarget], folder: Path, profile: Path | None = None, baseline_tree: Path | None = None
) -> Stack:
    """Start one stack and wait until it answers a request; ``baseline_tree`` is the source of the stack ``baseline``.

    Raises:
        NotInstalledError: its program is not installed.
        StackError: it exited, or did not become ready.
    """
    if name == DIRECT:
        return Stack(name=name, targets=engines, note="the load generator straight to the engine stub")
    folder = folder / name
    folder.mkdir(parents=True)
    port = free_ports(1)[0]
    launch: Launch
    if name in {OURS, BASELINE}:
        launch = warmroute(port, engines, folder, profile, baseline_tree if name == BASELINE else None)
    else:
        launch = {**LAUNCHES, **VARIANTS}[name](port, engines, folder)
    log_path = folder / "log.txt"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            launch.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    stack = Stack(
        name=name, targets=[LoadTarget(HOST, port)], note=launch.note, process=process, metrics=launch.evidence
    )
    if profile is not None:
        # Profilers write their output on an interrupt; a SIGTERM would end them without it.
        stack.endings = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
    try:
        _wait_ready(stack, log_path)
        stack.pids = cpu.tree(process.pid)
        for command in launch.companions:
            stack.companions.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
            )
    except BaseException:
        stack.stop()
        raise
    return stack


def _wait_ready(stack: Stack, log_path: Path) -> None:
    assert stack.process is not None
    url = f"http://{HOST}:{stack.targets[0].port}/v1/completions"
    give_up_s = time.monotonic() + READY_TIMEOUT_S
    problem = "no answer"
    with httpx.Client(timeout=5, trust_env=False) as client:
        while time.monotonic() < give_up_s:
            if stack.process.poll() is not None:
                problem = f"it exited with {stack.process.returncode}"
                break
            try:
                answer = client.post(url, content=BODY, headers={"content-type": "application/json"})
            except httpx.HTTPError as error:
                problem = repr(error)
            else:
                if answer.status_code == 200 and "[DONE]" in answer.text:
                    return
                problem = f"{answer.status_code}: {answer.text[:200]}"
            time.sleep(0.1)
    tail = log_path.read_text(encoding="utf-8", errors="replace")[-1500:]
    raise StackError(f"{stack.name} did not become ready: {problem}\n{tail}")


def machine() -> dict[str, object]:
    """CPU, cores, Python version and load of this machine."""
    cpuinfo = Path("/proc/cpuinfo")
    names = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    return {
        "cpu": next((line.partition(":")[2].strip() for line in names if line.startswith("model name")), "unknown"),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": list(os.getloadavg()),
        "python": sys.version.split()[0],
        "kernel": os.uname().release,
    }
