"""The two helper processes of a run: the engine stub and the load generator."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from types import TracebackType
from typing import Any, Self

import httpx
import msgspec

from bench.data_plane.load.client import LoadTarget
from bench.data_plane.load.jobs import JobResult, LoadJob

STOP_GRACE_S = 5.0


class ChildError(Exception):
    """A helper process ended; its own message is on standard error."""


class _Child:
    def __init__(self, *command: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self.pid = self._process.pid

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ChildError(f"{self._process.args!r} ended with {self._process.wait(STOP_GRACE_S)}")
        return line

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the child's standard input, which ends it; kill it after a grace time."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class StubProcess(_Child):
    """The engine stub."""

    def __init__(self, engines: int = 8) -> None:
        super().__init__("bench.data_plane.stub.server", str(engines))
        said = json.loads(self._line())
        self.engines = [LoadTarget("127.0.0.1", port) for port in said["ports"]]
        self._control = f"http://127.0.0.1:{said['control_port']}/stub/"

    def settings(self, **settings: Any) -> None:
        """Apply settings (`stub.state.StubSettings`) and reset the counts."""
        self._post("settings", settings)
        self._post("reset", {})

    def report(self) -> dict[str, Any]:
        """Counts and records since the last reset."""
        answer = httpx.get(self._control + "records", timeout=30, trust_env=False)
        report: dict[str, Any] = answer.raise_for_status().json()
        return report

    def settled(self, expected: int, timeout_s: float = 3.0) -> list[dict[str, Any]]:
        """The records, once there are ``expected`` or the timeout has passed."""
        give_up_s = time.monotonic() + timeout_s
        while True:
            records: list[dict[str, Any]] = self.report()["records"]
            if len(records) >= expected or time.monotonic() > give_up_s:
                return records
            time.sleep(0.1)

    def _post(self, path: str, body: dict[str, Any]) -> None:
        answer = httpx.post(self._control + path, json=body, timeout=10, trust_env=False)
        if answer.status_code != 200:
            raise ValueError(f"the stub rejected {path}: {answer.text}")


class LoadProcess(_Child):
    """The load generator."""

    def __init__(self) -> None:
        super().__init__("bench.data_plane.load.generator")

    def run(self, job: LoadJob) -> JobResult:
        """Run one job. Raises ChildError."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(job) + b"\n")
        self._process.stdin.flush()
        return msgspec.json.decode(self._line(), type=JobResult)
