"""``simulate``: one trace, one fleet, one policy, in virtual time; the run has the format of a replay's."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from policies.admission.base import AdmissionRule
from policies.admission.never_hold import NeverHold
from policies.costs.book import CostBook
from policies.offload.base import OffloadPlanner
from policies.offload.never import Never
from policies.routing.base import RoutingPolicy
from policies.state import FleetState
from replayer.records.runs import RequestRecord, Run, RunEnd
from replayer.replay.plan import Plan, SessionPlan, make_plan
from replayer.traces.trace import Trace
from sim.offline.exchange import SimulatedExchange
from sim.offline.fleet import InstanceTotals, make_fleet, totals
from sim.offline.loop import Simulation
from sim.offline.options import HandOffBounds, Noise, SimOptions, SimulationError
from sim.offline.records import TraceSource, breakdown_row, header_of, idle_costs, record_of
from sim.offline.router import OfflineRouter
from sim.offline.sessions import ClosedLoopSource, SessionOver, TurnSource

__all__ = ["HandOffBounds", "Noise", "OfflineRun", "SimOptions", "SimResult", "SimulationError", "simulate"]

COLLECT_AFTER_OBJECTS = 100_000
"""Objects made, less those dropped, between two collections of the youngest."""
OnRecord = Callable[[RequestRecord], None]
OnRow = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimResult:
    """Results of a simulation."""

    run: Run
    """The run as the replayer writes it; records in the order in which requests ended."""
    instances: list[InstanceTotals]
    decisions: list[dict[str, Any]] = field(default_factory=list)
    """Rows in the format of the proxy's /breakdown, in the same order; empty unless ``SimOptions.decisions`` is set."""
    held_s: dict[str, float] = field(default_factory=dict)
    """Seconds for which admission held a request, by request id; of those that it held."""
    ledger: dict[str, int] = field(default_factory=dict)
    """Requests that the router still counts as in flight at the end: all zero."""
    index_blocks: dict[str, int] = field(default_factory=dict)
    """Blocks the router's shadow index holds for each instance at the end."""


class OfflineRun:
    """One prepared simulation: fleet, router, turns and header. Call ``run`` once.

    Args:
        source: Origin of the trace, for the header.
        turns: The turns and their send times.
        plan: The plan, if the trace is known beforehand.
        options: Fleet, load and noise.
        policy: Chooses the instance.
        planner: Whether to offload prefills; None: never.
        admission: When a request is sent; None: at once.

    Raises:
        SimulationError: options that make no sense.
    """

    def __init__(
        self,
        source: TraceSource,
        turns: TurnSource,
        plan: Plan | None,
        options: SimOptions,
        policy: RoutingPolicy,
        planner: OffloadPlanner | None = None,
        admission: AdmissionRule | None = None,
    ) -> None:
        options.check()
        self._options = options
        self._turns = turns
        self._block_tokens = source.block_tokens
        self._fleet, self._roles, self._profile = make_fleet(options, source.block_tokens)
        transport = options.proven_transport(self._profile)
        planner = Never() if planner is None else planner
        admission = NeverHold() if admission is None else admission
        constants = self._profile.cost_constants
        self._router = OfflineRouter(
            options,
            self._fleet.engines,
            self._roles,
            transport,
            policy,
            planner,
            admission,
            CostBook if constants is None else constants.book,
        )
        configs = [each.config for each in self._fleet.engines.values()]
        capacity = min(config.num_blocks * config.block_tokens for config in configs)
        costs = idle_costs(self._profile, configs[0].max_num_batched_tokens)
        self.header = header_of(options, self._router, source, plan, capacity, costs)

    @classmethod
    def of_trace(
        cls,
        trace: Trace,
        options: SimOptions,
        policy: RoutingPolicy,
        planner: OffloadPlanner | None = None,
        plan: Plan | None = None,
        admission: AdmissionRule | None = None,
    ) -> OfflineRun:
        """A simulation of a trace in memory; arguments and errors as for ``simulate``."""
        options.check()
        if plan is None:
            plan = make_plan(trace, options.plan)
        turns = ClosedLoopSource(jittered(plan.sessions, options), options.max_inflight_sessions)
        source = TraceSource(
            trace.name, trace.sha256, trace.block_tokens, trace.notes, plan.cut_session, trace.read_with
        )
        return cls(source, turns, plan, options, policy, planner, admission)

    def run(
        self,
        on_record: OnRecord,
        on_row: OnRow | None = None,
        on_over: SessionOver | None = None,
        on_held: Callable[[str, float], None] | None = None,
    ) -> tuple[RunEnd, list[InstanceTotals]]:
        """Simulate: every record goes to ``on_record``, and its breakdown row to ``on_row``, as its request ends.

        ``on_over`` is called after a session's last turn; in a stream, only once the session is known to be over.
        ``on_held`` is called with the id of a request that admission held, and for how many seconds.
        """
        if on_over is not None:
            self._turns.on_over = on_over
        for each in self._router.replicas:
            each.scored = on_row is not None  # records have no scores
        count = ok = 0
        last_s: float | None = None
        planner = self._router.routing.planner.name

        def finished(exchange: SimulatedExchange, ended_s: float) -> None:
            nonlocal count, ok, last_s
            record = record_of(exchange, ended_s)
            count += 1
            ok += record.ok
            last_s = ended_s
            if on_held is not None and exchange.held_s:
                on_held(record.request_id, exchange.held_s)
            on_record(record)
            if on_row is not None:
                on_row(breakdown_row(exchange, planner, ended_s))

        simulation = Simulation(self._options, self._turns, self._fleet, self._router, self._block_tokens, finished)
        with fewer_collections():
            end_s = simulation.run()
        # Timers and abandoned pulls outlive the last answer.
        end = RunEnd(finished_unix_s=end_s if last_s is None else last_s, requests=count, ok=ok)
        return end, totals(self._fleet, self._roles, self._profile.timing)

    @property
    def state(self) -> FleetState:
        """The router's state: index, ledger, sessions and hotspots; of several replicas the first one's."""
        return self._router.state

    def in_flight(self) -> dict[str, int]:
        """Sums over all instances and replicas, as ``Ledger.totals``."""
        return self._router.in_flight()


def simulate(
    trace: Trace,
    options: SimOptions,
    policy: RoutingPolicy,
    planner: OffloadPlanner | None = None,
    *,
    plan: Plan | None = None,
    admission: AdmissionRule | None = None,
) -> SimResult:
    """Replay a trace on a simulated fleet in virtual time. Equal arguments give equal results.

    Args:
        trace: The trace to replay.
        options: Fleet, load and noise.
        policy: Chooses the instance.
        planner: Whether to offload prefills; None: never.
        plan: Result of ``make_plan(trace, options.plan)``, if it is made once for many simulations.
        admission: When a request is sent; None: at once.

    Raises:
        SimulationError: options that make no sense.
        TraceError: nothing to send, or a scale that is not positive.
    """
    prepared = OfflineRun.of_trace(trace, options, policy, planner, plan, admission)
    records: list[RequestRecord] = []
    rows: list[dict[str, Any]] = []
    held_s: dict[str, float] = {}
    on_row = rows.append if options.decisions else None
    end, instances = prepared.run(records.append, on_row, on_held=held_s.__setitem__)
    return SimResult(
        run=Run(prepared.header, records, end),
        instances=instances,
        decisions=rows,
        held_s=held_s,
        ledger=prepared.in_flight(),
        index_blocks={row.instance: prepared.state.index.blocks(row.instance) for row in instances},
    )


@contextmanager
def fewer_collections() -> Iterator[None]:
    """Run the garbage collector less often inside the context.

    A simulation makes few cycles but, with a thousand instances, thousands of tuples per decision that are dropped at
    once; looking for cycles among them took a third of its time.
    """
    before = gc.get_threshold()
    gc.set_threshold(COLLECT_AFTER_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def jittered(sessions: list[SessionPlan], options: SimOptions) -> list[SessionPlan]:
    """Sessions in order of arrival, each shifted by the noise (never before the start)."""
    if not options.noise.arrival_jitter_s:
        return sorted(sessions, key=lambda session: session.arrival_s)
    draw = random.Random(f"{options.seed}/arrivals")
    shifted = [
        msgspec.structs.replace(session, arrival_s=max(session.arrival_s + options.noise.shift_s(draw), 0.0))
        for session in sessions
    ]
    return sorted(shifted, key=lambda session: session.arrival_s)
