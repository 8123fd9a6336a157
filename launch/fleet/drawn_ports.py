"""Ports from which Mooncake draws its own listeners: an engine that starts later finds a port of the fleet file taken.

Each engine with a Mooncake connector opens one or two ports, drawn at random, whatever the transport
(`findAvailableTcpPort` and `ValidatePortRange` of Mooncake's transfer engine).
"""

from __future__ import annotations

from collections.abc import Mapping

DRAWN_PORTS = range(15_000, 17_001)
"""The default range."""
_LOWEST = ("MC_MIN_RPC_PORT", "MC_MIN_PRC_PORT")
_HIGHEST = ("MC_MAX_RPC_PORT", "MC_MAX_PRC_PORT")
"""Environment variables by precedence; the second spelling is the one of older releases."""
_EPHEMERAL = range(32_768, 61_000)
_FIRST_UNRESERVED = 1_024
_LAST = 65_535


def drawn_ports(environment: Mapping[str, str]) -> range:
    """Ports from which Mooncake draws, by an engine's environment.

    A range that Mooncake refuses (out of order, below 1024, ending among the ephemeral ports) has no effect.
    """
    lowest = _given(environment, _LOWEST, DRAWN_PORTS[0])
    highest = _given(environment, _HIGHEST, DRAWN_PORTS[-1])
    usable = _FIRST_UNRESERVED <= lowest <= highest <= _LAST and not {lowest, highest} & set(_EPHEMERAL)
    return range(lowest, highest + 1) if usable else DRAWN_PORTS


def _given(environment: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    for name in names:
        text = environment.get(name, "").strip()
        if text:
            return int(text) if text.isdecimal() else 0
    return default
