"""``python -m launch`` with the stub in place of the simulated engine, for tests that need a launcher process."""

from __future__ import annotations

import sys
from pathlib import Path

from launch.engines.commands import KINDS, SimEngine
from launch.fleet.file import FleetFile

STUB = Path(__file__).with_name("stub_engine.py")


class StubEngine(SimEngine):
    """Stub engine kind: same ports, cheaper process."""

    def __init__(self, *arguments: str) -> None:
        self.arguments = arguments

    def command(self, fleet: FleetFile, index: int) -> tuple[str, ...]:
        ports = (str(fleet.base_port + index), str(fleet.base_bootstrap_port + index))
        return (sys.executable, str(STUB), *ports, *self.arguments)


if __name__ == "__main__":
    KINDS["sim"] = StubEngine()
    from launch.__main__ import app

    app()
