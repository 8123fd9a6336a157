"""The process of the router under test: started, waited for, and ended by one owner."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import psutil

from bench.routers.launches import RouterLaunch, RouterLaunchError

READY_S = 90.0
_POLL_S = 0.2
_CONTROL_S = 5.0
_ANSWER_S = 60.0
_GRACE_S = 10.0
_LOG_TAIL = 1500


class _Readiness(msgspec.Struct):
    """Answer of a router that is ready: vLLM Router's and SGLang's count, or warmroute's names."""

    healthy_workers: int | None = None
    healthy_instances: list[str] | None = None

    @property
    def engines(self) -> int:
        return self.healthy_workers if self.healthy_workers is not None else len(self.healthy_instances or ())


class _EventsState(msgspec.Struct):
    trusted: bool
    not_trusted_because: str | None = None


class _InstanceRow(msgspec.Struct):
    name: str
    kv_events: _EventsState | None = None


class _Instances(msgspec.Struct):
    instances: list[_InstanceRow]


class RunningRouter:
    """A started router.

    Args:
        launch: its command and addresses.
        process: leader of a process group of its own.
        log: file of its output.
    """

    def __init__(self, launch: RouterLaunch, process: subprocess.Popen[bytes], log: Path) -> None:
        self.launch = launch
        self._process = process
        self._log = log

    @property
    def pid(self) -> int:
        """Of its first process."""
        return self._process.pid

    def cpu_s(self) -> float:
        """CPU seconds of its processes so far; 0 once it has ended."""
        try:
            leader = psutil.Process(self._process.pid)
            times = [each.cpu_times() for each in (leader, *leader.children(recursive=True))]
        except psutil.Error:
            return 0.0
        return float(sum(each.user + each.system for each in times))

    async def until_ready(self, http: httpx.AsyncClient, engines: int, model: str) -> None:
        """Wait until it knows all engines and answers a request.

        Raises:
            RouterLaunchError: it ended, or was not ready within `READY_S`; with the end of its log.
        """
        deadline_s = time.monotonic() + READY_S
        while problem := await self._problem(http, engines, model):
            if self._process.poll() is not None:
                raise RouterLaunchError(f"it ended with {self._process.returncode}\n{self._tail()}")
            if time.monotonic() > deadline_s:
                raise RouterLaunchError(f"not ready after {READY_S:g} s: {problem}\n{self._tail()}")
            await asyncio.sleep(_POLL_S)

    async def _problem(self, http: httpx.AsyncClient, engines: int, model: str) -> str:
        """Reason why it is not ready; empty once it is."""
        try:
            answer = await http.get(self.launch.url + self.launch.ready_path, timeout=_CONTROL_S)
            found = msgspec.json.decode(answer.content, type=_Readiness).engines if answer.is_success else 0
            if found != engines:
                return f"it knows {found} of {engines} engines ({answer.status_code})"
            # Less than a block: no cache keeps it.
            body = {"model": model, "prompt": "ready?", "max_tokens": 1, "temperature": 0}
            said = await http.post(f"{self.launch.url}/v1/completions", json=body, timeout=_ANSWER_S)
        except (httpx.HTTPError, msgspec.MsgspecError) as error:
            return str(error) or type(error).__name__
        return "" if said.is_success else f"a request got {said.status_code}: {said.text[:200]}"

    async def untrusted_events(self, http: httpx.AsyncClient) -> list[str]:
        """Engines whose KV events it follows and cannot use yet, with the reason. Raises RouterLaunchError."""
        if not self.launch.events_path:
            return []
        try:
            answer = await http.get(self.launch.url + self.launch.events_path, timeout=_CONTROL_S)
            rows = msgspec.json.decode(answer.content, type=_Instances).instances
        except (httpx.HTTPError, msgspec.MsgspecError) as error:
            raise RouterLaunchError(f"{self.launch.events_path}: {error or type(error).__name__}") from error
        events = [(row.name, row.kv_events) for row in rows]
        return [f"{name}: {each.not_trusted_because}" for name, each in events if each and not each.trusted]

    async def evidence(self, http: httpx.AsyncClient) -> list[str]:
        """Lines of its own metrics that show how it decided; none where they cannot be read."""
        try:
            page = (await http.get(self.launch.metrics_url, timeout=_CONTROL_S)).text
        except httpx.HTTPError:
            return []  # evidence, not a result: the run stands without it
        return [line for line in page.splitlines() if line.startswith(self.launch.evidence)]

    def check_running(self) -> None:
        """Raise RouterLaunchError if it has ended."""
        if self._process.poll() is not None:
            raise RouterLaunchError(f"it ended with {self._process.returncode} during the run\n{self._tail()}")

    def _tail(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL:]


@contextlib.contextmanager
def running_router(launch: RouterLaunch, log: Path) -> Iterator[RunningRouter]:
    """Start a router; end it and all its children when the block ends, within 20 s.

    Raises:
        RouterLaunchError: its program cannot be started.
    """
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                launch.command,
                env=launch.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise RouterLaunchError(f"{launch.command[0]} cannot be started: {error}") from error
        try:
            yield RunningRouter(launch, process, log)
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    for ending in (signal.SIGTERM, signal.SIGKILL):
        # The leader may end before its children: the group is signalled as long as it exists.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, ending)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
