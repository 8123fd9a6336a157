"""Cost of admission in the routing step: processor time per request with ``never_hold``, with a rule, and without any.

``python -m bench.never_hold [--instances 8] [--batches 400] [--sessions 400]`` routes requests of growing sessions and
releases them 32 requests later. *No admission* is a path without it: nothing is asked before a request is routed, and
no session's context is counted; what is left there are the calls of two empty methods. ``never_hold`` enters the
proxy's line (`proxy.routing.holding.HoldingLine.enter`) and counts contexts, since metrics, other replicas, prefill
specialists, shadow rules and a later switch of the rule read the sums. It counts several turns at once, whose whole
time is in its figure: each measurement of 25 requests has one or two such counts. ``working_set``, the default, decides
as well. The arms take turns in batches of 25 requests, each in another order, with their own state and the same
requests. The difference to no admission is the median over the batches, with its quartiles, and the mean.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from bench.figures.machine import machine
from policies.admission.accounts import SessionAccounts
from policies.admission.never_hold import NeverHold
from policies.admission.turns import Turn
from policies.costs.formulas import PrefillModel
from policies.row import Row
from policies.session import Routed
from policies.types import RequestView
from proxy.fleet.instances import Instances
from proxy.routing.admission import Admission
from proxy.routing.holding import HoldingLine
from proxy.routing.router import Router
from proxy.settings import InstanceSettings, load_settings

BUDGET_US = 10.0
"""Goal for ``never_hold`` above no admission."""
_BATCH = 25
_IN_FLIGHT = 32
_SESSIONS = 400
"""So many that each one's account has left the processor's caches when its next turn comes."""


class NoAccounts(SessionAccounts):
    """Counts no sessions: a proxy without admission."""

    def __init__(self) -> None:
        super().__init__()
        self._turn = Turn()

    def sent(self, *_args: Any, **_more: Any) -> Turn:
        """Count nothing."""
        return self._turn

    def ended(self, turn: Turn, now_s: float | None, cached_tokens: int | None, model: PrefillModel) -> None:
        """Count nothing."""


class AdmissionArm:
    """One fleet with its rule, fed request by request."""

    def __init__(self, instances: int, rule: str | None) -> None:
        """``rule``: its name; None: no admission."""
        self._names = [f"inst-{number}" for number in range(instances)]
        fleet = tuple([InstanceSettings(name=name, url=f"http://{name}:8000") for name in self._names])
        settings = load_settings(None, instances=fleet, admission={"name": rule or NeverHold.name})
        router = Router(settings)
        self.state, self._routing, self._rule = router.state, router.routing, rule
        if rule is None:
            self.state.accounts = NoAccounts()
        for name in self._names:
            self.state.set_capacity(name, 738_432, 256.0)
        known = Instances(fleet, settings.health)
        admission = Admission(settings.limits, known, router, self.state.ledger)
        self._line = HoldingLine(settings.admission, router, known, admission)
        self._seat, self._row = admission.seat(None), Row("request", "/v1/completions", 0.0)
        self._in_flight: deque[Routed] = deque()

    def serve(self, requests: Sequence[tuple[RequestView, float]]) -> float:
        """Processor time of these requests, microseconds each."""
        routing, in_flight, names = self._routing, self._in_flight, self._names
        line, seat, row = self._line, self._seat, self._row
        enters, offers = self._rule == NeverHold.name, self._rule not in {None, NeverHold.name}
        began_ns = time.process_time_ns()
        for request, now_s in requests:
            if enters:
                line.enter(request, seat, row)
            elif offers:  # as the line does, in the time of the requests; none is left to wait
                routing.offer(request, names, now_s)
            in_flight.append(routing.route(request, names, (), now_s))
            if len(in_flight) > _IN_FLIGHT:
                done = in_flight.popleft()
                done.commitment.decode.first_token()
                done.commitment.release(now_s, 0.0, done.decision.cached_tokens)
        return (time.process_time_ns() - began_ns) / len(requests) / 1e3


def requests(count: int, seed: int = 0, sessions: int = _SESSIONS) -> list[tuple[RequestView, float]]:
    """Turns of sessions whose prompts grow by five blocks of 256 tokens each, and their times: 100 a second."""
    draw = random.Random(seed)
    prompts = {number: [draw.getrandbits(63) for _ in range(draw.randint(20, 120))] for number in range(sessions)}
    made = []
    for number in range(count):
        session = draw.randrange(sessions)
        prompts[session] = [*prompts[session], *[draw.getrandbits(63) for _ in range(5)]]
        if len(prompts[session]) > 130:
            prompts[session] = prompts[session][:20]
        blocks = prompts[session]
        view = RequestView(f"request-{number}", 256 * len(blocks), tuple(blocks), 256.0, f"session-{session}")
        made.append((view, number / 100))
    return made


def measure(instances: int, batches: int, seed: int = 0, sessions: int = _SESSIONS) -> dict[str, list[float]]:
    """Microseconds of processor time per request, by arm and batch."""
    arms = {
        "no admission": AdmissionArm(instances, None),
        "never_hold": AdmissionArm(instances, "never_hold"),
        "working_set": AdmissionArm(instances, "working_set"),
    }
    todo, draw = requests(_BATCH * batches, seed, sessions), random.Random(seed)
    took: dict[str, list[float]] = {name: [] for name in arms}
    for start in range(0, len(todo), _BATCH):
        for name in draw.sample(list(arms), len(arms)):
            took[name].append(arms[name].serve(todo[start : start + _BATCH]))
    return {name: each[batches // 10 :] for name, each in took.items()}


def main(
    instances: Annotated[int, typer.Option(min=1, help="Instances of the fleet.")] = 8,
    batches: Annotated[int, typer.Option(min=20, help="Batches of 25 requests for each arm; a tenth warms up.")] = 400,
    seed: Annotated[int, typer.Option(help="Seed of the requests and of the order.")] = 0,
    sessions: Annotated[int, typer.Option(min=1, help="Sessions that take turns.")] = _SESSIONS,
) -> None:
    """Measure what admission adds to the routing step."""
    took = measure(instances, batches, seed, sessions)
    table = Table(title=f"Routing step with {instances} instances, µs of processor time per request")
    for head in ("admission", "median", "above no admission", "quartiles", "mean"):
        table.add_column(head, justify="left" if head == "admission" else "right")
    without = np.array(took["no admission"])
    for name, each in took.items():
        above = np.array(each) - without
        low, more, high = np.percentile(above, [25, 50, 75])
        mark = " *" if name == "never_hold" and more > BUDGET_US else ""
        table.add_row(
            name, f"{np.median(each):.1f}", f"{more:.1f}{mark}", f"{low:.1f} to {high:.1f}", f"{above.mean():.1f}"
        )
    Console().print(table)
    Console().print(f"* above {BUDGET_US:g} µs; " + ", ".join(f"{key} {value}" for key, value in machine().items()))


if __name__ == "__main__":
    typer.run(main)
