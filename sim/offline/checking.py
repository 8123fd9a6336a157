"""Command ``python -m sim check``: engines of several simulations, for callers that do not import the simulator.

It reads a JSON array of `sim.offline.setup.Setup` with ``block_tokens`` from stdin, and prints an array of errors in
the same order, null where the engines can exist.
"""

from __future__ import annotations

import sys

import msgspec

from sim.offline.options import SimulationError
from sim.offline.setup import Setup


def engine_error(setup: Setup) -> str | None:
    """Reason why a setup's engines cannot exist, with the remedy; None if they can."""
    try:
        options = setup.options()
        for role in dict.fromkeys(options.roles()):
            options.engine(role, setup.block_tokens or 1)
    except SimulationError as error:
        return str(error)
    return None


def check_command() -> None:
    """Check the engines of the setups on stdin; their errors go to stdout."""
    setups = msgspec.json.decode(sys.stdin.buffer.read(), type=list[Setup])
    sys.stdout.buffer.write(msgspec.json.encode([engine_error(setup) for setup in setups]))
