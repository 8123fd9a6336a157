"""Failures on demand: the faults that ``POST /sim/faults`` sets."""

from __future__ import annotations

from typing import Literal

import msgspec

from sim.core.sequence import KvTransfer, Request

Mode = Literal[
    "none",
    "refuse",
    "hang",
    "error",
    "slow",
    "hang_mid_stream",
    "reset_mid_stream",
    "kv_pull_hang",
    "kv_pull_error",
    "p_eos",
    "no_kv_events",
]
Leg = Literal["any", "prefill", "decode", "plain"]


class Fault(msgspec.Struct, forbid_unknown_fields=True):
    """One fault; docs/simulator.md describes each mode.

    It applies to ``count`` requests (null: all until it is replaced) of the kind that ``leg`` names: the prefill or the
    decode leg of a hand-off, or plain requests.
    """

    mode: Mode = "none"
    count: int | None = None
    leg: Leg = "any"
    status: int = 500
    """error: the HTTP status answered."""
    delay_s: float = 1.0
    """slow: engine seconds a request waits before the engine sees it."""
    after_tokens: int = 1
    """hang_mid_stream, reset_mid_stream: tokens sent before it happens."""
    health: bool = False
    """refuse, hang, error: the fault applies to /health too."""
    force: bool = False
    """p_eos: even where min_tokens forbids it."""


_PULL_MODES = {"kv_pull_hang", "kv_pull_error"}
_NO_REQUESTS = {"none", "no_kv_events", *_PULL_MODES}


class Faults:
    """The active fault and the number of requests it still applies to."""

    def __init__(self) -> None:
        self.current = Fault()

    def set(self, body: bytes) -> Fault:
        """Replace the fault by a JSON description.

        Raises:
            msgspec.DecodeError, msgspec.ValidationError: it is not one.
        """
        self.current = msgspec.json.decode(body, type=Fault)
        return self.current

    def for_request(self, transfer: KvTransfer | None) -> Fault | None:
        """The fault that applies to a generation request, if any; counts it."""
        fault = self.current
        if fault.mode in _NO_REQUESTS:
            return None
        if fault.mode == "p_eos" and (transfer is None or not transfer.do_remote_decode):
            return None
        return self._hit() if fault.leg in {"any", _leg(transfer)} else None

    def for_pull(self) -> Fault | None:
        """The fault that applies to a KV pull, if any; counts it."""
        return self._hit() if self.current.mode in _PULL_MODES else None

    @property
    def mutes_events(self) -> bool:
        """True while KV events are numbered and kept for replays, but not sent."""
        return self.current.mode == "no_kv_events"

    def for_health(self) -> Fault | None:
        """The fault that applies to a health probe, if any; probes are not counted."""
        fault = self.current
        return fault if fault.health and fault.mode in {"refuse", "hang", "error"} else None

    def _hit(self) -> Fault | None:
        fault = self.current
        if fault.count is not None:
            if fault.count < 1:
                return None
            fault.count -= 1
            if not fault.count:
                self.current = Fault()
        return fault


def end_at_first_token(request: Request, force: bool) -> Request:
    """The request, changed to end at its first token where ``min_tokens`` allows it (or with ``force``)."""
    return request._replace(stop_after=1, min_tokens=0 if force else request.min_tokens)


def _leg(transfer: KvTransfer | None) -> Leg:
    if transfer is None:
        return "plain"
    if transfer.do_remote_decode:
        return "prefill"
    return "decode" if transfer.do_remote_prefill else "plain"
