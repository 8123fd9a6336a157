"""A real Redis or Valkey server of the test's own, on a free port, without files."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from bench.replicas.processes import free_port

PROGRAM = next((found for name in ("redis-server", "valkey-server") if (found := shutil.which(name))), None)

needs_store = pytest.mark.skipif(
    PROGRAM is None, reason="no redis-server or valkey-server on the PATH: `make store` installs one"
)


class StoreServer:
    """``start`` and ``kill`` may alternate; what it held is lost in between. Its port stays the same."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        assert PROGRAM is not None
        command = [PROGRAM, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            [*command, "--dir", str(self._folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for _ in range(500):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            if self._process.poll() is not None:
                raise AssertionError(f"{PROGRAM} ended with {self._process.returncode}")
            time.sleep(0.02)
        raise AssertionError(f"{PROGRAM} does not listen on {self.port}")

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """End the process at once, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
