"""Cost of admission in the routing step: processor time per request with ``never_hold``, with a rule, and without any.

``python -m bench.never_hold [--instances 8] [--batches 400]`` sends requests of growing sessions through ``offer``,
``route`` and ``release`` of `policies.session.RoutingSession`. Without admission, no session's context is counted;
``never_hold`` counts them, since metrics, prefill specialists and shadow rules read the sums; ``working_set``, the
default, decides as well. The arms take turns in batches of 25 requests, each in another order, with their own state and
the same requests. The difference to no admission is the median over the batches, with its quartiles.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from bench.machine import machine
from policies.admission.accounts import ComputedPrompt, SessionAccounts
from policies.admission.base import AdmissionRule
from policies.admission.never_hold import NeverHold
from policies.admission.working_set import WorkingSet
from policies.classes import ClassThresholds
from policies.costs.formulas import PrefillModel
from policies.offload.never import Never
from policies.routing.warm import Warm
from policies.session import Routed, RoutingSession
from policies.state import FleetState
from policies.types import RequestView

BUDGET_US = 10.0
"""Goal for ``never_hold`` above no admission."""
_BATCH = 25
_IN_FLIGHT = 32
_SESSIONS = 400


class NoAccounts(SessionAccounts):
    """Counts no sessions: a proxy without admission."""

    def begin(self, name: str, prompt_tokens: int, now_s: float, instance: str = "", *, single: bool = False) -> None:
        """Do nothing."""

    def end(self, name: str, now_s: float | None) -> None:
        """Do nothing."""

    def compute(self, name: str, request_id: str, hashes: Sequence[int], block_tokens: float) -> int:
        """No tokens: nothing is remembered."""
        return 0

    def reported(self, model: PrefillModel, work: ComputedPrompt, cached_tokens: int, now_s: float | None) -> None:
        """Do nothing."""


class AdmissionArm:
    """One fleet with its rule, fed request by request."""

    def __init__(self, instances: int, rule: AdmissionRule, accounts: SessionAccounts | None = None) -> None:
        state = FleetState()
        if accounts is not None:
            state.accounts = accounts
        self._names = [f"inst-{number}" for number in range(instances)]
        for name in self._names:
            state.add_instance(name)
            state.set_capacity(name, 738_432, 256.0)
        self._routing = RoutingSession(state, Warm(), Never(), ClassThresholds(), admission=rule)
        self._in_flight: deque[Routed] = deque()

    def serve(self, requests: Sequence[tuple[RequestView, float]]) -> float:
        """Processor time of these requests, microseconds each."""
        routing, in_flight, names = self._routing, self._in_flight, self._names
        began_ns = time.process_time_ns()
        for request, now_s in requests:
            routing.offer(request, names, now_s)
            in_flight.append(routing.route(request, names, (), now_s))
            if len(in_flight) > _IN_FLIGHT:
                done = in_flight.popleft()
                done.commitment.decode.first_token()
                done.commitment.release(now_s, 0.0, done.decision.cached_tokens)
        return (time.process_time_ns() - began_ns) / len(requests) / 1e3


def requests(count: int, seed: int = 0) -> list[tuple[RequestView, float]]:
    """Turns of sessions whose prompts grow by five blocks of 256 tokens each, and their times: 100 a second."""
    draw = random.Random(seed)
    prompts = {number: [draw.getrandbits(63) for _ in range(draw.randint(20, 120))] for number in range(_SESSIONS)}
    made = []
    for number in range(count):
        session = draw.randrange(_SESSIONS)
        prompts[session] = [*prompts[session], *[draw.getrandbits(63) for _ in range(5)]]
        if len(prompts[session]) > 130:
            prompts[session] = prompts[session][:20]
        blocks = prompts[session]
        view = RequestView(f"request-{number}", 256 * len(blocks), tuple(blocks), 256.0, f"session-{session}")
        made.append((view, number / 100))
    return made


def measure(instances: int, batches: int, seed: int = 0) -> dict[str, list[float]]:
    """Microseconds of processor time per request, by arm and batch."""
    arms = {
        "no admission": AdmissionArm(instances, NeverHold(), NoAccounts()),
        "never_hold": AdmissionArm(instances, NeverHold()),
        "working_set": AdmissionArm(instances, WorkingSet()),
    }
    todo, draw = requests(_BATCH * batches, seed), random.Random(seed)
    took: dict[str, list[float]] = {name: [] for name in arms}
    for start in range(0, len(todo), _BATCH):
        for name in draw.sample(list(arms), len(arms)):
            took[name].append(arms[name].serve(todo[start : start + _BATCH]))
    return {name: each[batches // 10 :] for name, each in took.items()}


def main(
    instances: Annotated[int, typer.Option(min=1, help="Instances of the fleet.")] = 8,
    batches: Annotated[int, typer.Option(min=20, help="Batches of 25 requests for each arm; a tenth warms up.")] = 400,
    seed: Annotated[int, typer.Option(help="Seed of the requests and of the order.")] = 0,
) -> None:
    """Measure what admission adds to the routing step."""
    took = measure(instances, batches, seed)
    table = Table(title=f"Routing step with {instances} instances, µs of processor time per request")
    for head in ("admission", "median", "above no admission", "quartiles"):
        table.add_column(head, justify="left" if head == "admission" else "right")
    without = np.array(took["no admission"])
    for name, each in took.items():
        low, more, high = np.percentile(np.array(each) - without, [25, 50, 75])
        mark = " *" if name == "never_hold" and more > BUDGET_US else ""
        table.add_row(name, f"{np.median(each):.1f}", f"{more:.1f}{mark}", f"{low:.1f} to {high:.1f}")
    Console().print(table)
    Console().print(f"* above {BUDGET_US:g} µs; " + ", ".join(f"{key} {value}" for key, value in machine().items()))


if __name__ == "__main__":
    typer.run(main)
