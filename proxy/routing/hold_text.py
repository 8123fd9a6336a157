"""Admission answers as sentences, for statistics and explanations."""

from __future__ import annotations

from policies.admission.base import AdmissionReason, Admit, Hold

_PLACES = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
_CAUSES = {
    AdmissionReason.WORKING_SET: "no KV pool has room for its context beside those in use",
    AdmissionReason.AT_CAP: "as many sessions as permitted are in flight or kept",
}


def held_sentence(hold: Hold, held_s: float) -> str:
    """Sentence on a held request, for example ``held 12 s: no instance has room for 85,000 tokens: best has 61,000,
    working set 1.91 of 1.92 M tokens, third in line``.
    """
    return f"held {held_s:.0f} s: {_state(hold)}"


def hold_reason(hold: Hold) -> str:
    """Reason for holding a request, and its place in line."""
    return _state(hold)


def offer_sentence(answer: Admit | Hold) -> str:
    """Sentence on a request that was not sent yet."""
    if isinstance(answer, Admit):
        return f"would be sent at once: {answer.reason.value.replace('_', ' ')}"
    return f"would be held: {_state(answer)}"


def _state(hold: Hold) -> str:
    parts = [_cause(hold), f"{_place(hold.behind)} in line"]
    if hold.tenant:
        parts.append(f"{_place(hold.behind_in_tenant)} of tenant {hold.tenant}")
    if hold.expected_wait_s:
        parts.append(f"expected wait {hold.expected_wait_s:.0f} s")
    return ", ".join(parts)


def _cause(hold: Hold) -> str:
    if hold.needed_tokens and hold.pool_tokens:
        fleet = f"working set {_tokens(hold.needed_tokens, hold.pool_tokens)} tokens"
        if not hold.own_tokens:
            return fleet
        return f"no instance has room for {hold.own_tokens:,} tokens: best has {hold.free_tokens:,}, {fleet}"
    return _CAUSES.get(hold.reason, hold.reason.value.replace("_", " "))


def _tokens(needed: int, pool: int) -> str:
    """``needed of pool`` in the pool's unit."""
    for unit, size, digits in ((" M", 1e6, 2), (" k", 1e3, 1)):
        if pool >= size:
            return f"{needed / size:.{digits}f} of {pool / size:.{digits}f}{unit}"
    return f"{needed} of {pool}"


def _place(behind: int) -> str:
    return _PLACES[behind] if behind < len(_PLACES) else f"number {behind + 1}"
