"""Placement of a trace's requests on N caches, by rules that ignore the caches' content."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from replayer.traces.trace import Trace


class Placement(StrEnum):
    """A rule of placement."""

    ROUND_ROBIN = "round_robin"
    STICKY = "sticky"
    STICKY_BALANCED = "sticky_balanced"
    LEAST_TOKENS = "least_tokens"


WORDS = {
    Placement.ROUND_ROBIN: "request i on instance i mod N",
    Placement.STICKY: "sessions in order of first appearance, mod N",
    Placement.STICKY_BALANCED: "a new session goes to the instance with the fewest prompt tokens so far, and stays",
    Placement.LEAST_TOKENS: "each request goes to the instance with the fewest prompt tokens so far (ties: lowest id)",
}


def place(trace: Trace, instances: int, rule: Placement) -> list[int]:
    """The instance of every request, 0 to ``instances`` - 1."""
    return _RULES[rule](trace, instances)


def _round_robin(trace: Trace, instances: int) -> list[int]:
    return [index % instances for index in range(len(trace.requests))]


def _sticky(trace: Trace, instances: int) -> list[int]:
    home: dict[str, int] = {}
    return [home.setdefault(request.session_id, len(home) % instances) for request in trace.requests]


def _sticky_balanced(trace: Trace, instances: int) -> list[int]:
    tokens = [0] * instances
    home: dict[str, int] = {}
    places = []
    for request in trace.requests:
        if request.session_id not in home:
            home[request.session_id] = tokens.index(min(tokens))
        places.append(home[request.session_id])
        tokens[places[-1]] += request.input_length
    return places


def _least_tokens(trace: Trace, instances: int) -> list[int]:
    tokens = [0] * instances
    places = []
    for request in trace.requests:
        places.append(tokens.index(min(tokens)))
        tokens[places[-1]] += request.input_length
    return places


_RULES: dict[Placement, Callable[[Trace, int], list[int]]] = {
    Placement.ROUND_ROBIN: _round_robin,
    Placement.STICKY: _sticky,
    Placement.STICKY_BALANCED: _sticky_balanced,
    Placement.LEAST_TOKENS: _least_tokens,
}
