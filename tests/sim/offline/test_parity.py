"""The offline router against the proxy's router: one simulation run with each gives equal results."""

from __future__ import annotations

import types
from typing import Any

import pytest

import proxy.routing.router
from policies.admission.base import DEFAULT_RULE, Admit
from policies.admission.line import Held
from policies.registry import make_admission, make_planner, make_routing
from policies.session import Routed
from policies.types import RequestView, Role
from proxy.request.parse import Endpoint
from proxy.routing.router import Router
from proxy.settings import Settings
from replayer.records.runs import RequestRecord
from replayer.replay.plan import PlanOptions, make_plan
from replayer.replay.prompts import BodyTemplate, PromptBuilder
from replayer.traces.trace import Trace
from sim.offline.fleet import make_fleet
from sim.offline.loop import Simulation
from sim.offline.options import SimOptions
from sim.offline.records import record_of
from sim.offline.router import OfflineRouter
from sim.offline.sessions import ClosedLoopSource
from sim.virtual import VirtualFleet
from tests.sim.offline.offline_runs import agents

TRACE = agents(160, rate_per_s=20.0, length_scale=0.15)


class LiveRouter:
    """The proxy's router on virtual time. It reads real bodies of token ids; the offline router gets block ids."""

    def __init__(self, trace: Trace, fleet: VirtualFleet, options: SimOptions, policy: str, planner: str) -> None:
        self._fleet = fleet
        self._requests = {f"{trace.sha256[:8]}-{request.chat_id}": request for request in trace.requests}
        self._builder = PromptBuilder(trace.block_tokens)
        self._bodies = BodyTemplate(model="m")
        roles = dict(zip(fleet.engines, options.roles(), strict=True))
        instances = [
            {
                "name": name,
                "url": f"http://127.0.0.1:{9000 + place}",
                "role": roles[name].value,
                "transport": "tcp",
                "host": "",
                "bootstrap_url": f"http://127.0.0.1:{8000 + place}",
            }
            for place, name in enumerate(fleet.engines)
        ]
        self.router = Router(
            Settings.model_validate(
                {"instances": instances, "policy": {"name": policy}, "offload": {"planner": planner}}
            )
        )
        self.routing = self.router.routing
        self.router.set_block_tokens(trace.block_tokens)
        for name, engine in fleet.engines.items():
            config = engine.config
            self.router.state.set_capacity(name, config.num_blocks * config.block_tokens, config.block_tokens)

    def probe(self, now_s: float) -> None:
        for name, engine in self._fleet.engines.items():
            engine.catch_up(now_s)
            capacity = engine.config.num_blocks * engine.config.block_tokens
            self.router.state.set_usage(name, int(engine.kv_usage * capacity))

    def offer(self, request: RequestView, now_s: float) -> Admit | Held:
        return self.routing.offer(request, set(self._fleet.engines), now_s)

    def admitted(self, now_s: float) -> Held | None:
        return self.routing.admitted(set(self._fleet.engines), now_s)

    def route(self, request: RequestView, now_s: float, room_on: frozenset[str]) -> tuple[int, Routed]:
        body = self._bodies.body(self._builder, self._requests[request.request_id])
        parsed = self.router.parse(Endpoint.COMPLETIONS, body)
        view = self.router.view(parsed, request.request_id, request.session_id)
        assert len(view.block_hashes) == len(request.block_hashes)
        assert (view.prompt_tokens, view.max_tokens) == (request.prompt_tokens, request.max_tokens)
        return 0, self.router.route(view, set(self._fleet.engines), room_on)

    def routing_of(self, exchange: Any) -> Any:
        return self.routing

    def changed(self, exchange: Any, now_s: float) -> None:
        pass

    def computed(self, exchange: Any, instance: str, now_s: float) -> None:
        pass


def simulated(options: SimOptions, policy: str, planner: str, live: bool, monkeypatch: pytest.MonkeyPatch) -> Any:
    fleet, roles, profile = make_fleet(options, TRACE.block_tokens)
    monkeypatch.setattr(proxy.routing.router, "time", types.SimpleNamespace(monotonic=lambda: fleet.now_s))
    router: Any
    if live:
        router = LiveRouter(TRACE, fleet, options, policy, planner)
        state = router.router.state
    else:
        transport = options.proven_transport(profile)
        rules = (make_routing(policy), make_planner(planner), make_admission(DEFAULT_RULE))
        router = OfflineRouter(options, fleet.engines, roles, transport, *rules)
        state = router.state
    records: list[RequestRecord] = []
    decisions: list[Any] = []

    def finished(exchange: Any, ended_s: float) -> None:
        records.append(record_of(exchange, ended_s))
        decisions.append((exchange.decision, exchange.legs, exchange.offload_reason))

    turns = ClosedLoopSource(make_plan(TRACE, options.plan).sessions, options.max_inflight_sessions)
    Simulation(options, turns, fleet, router, TRACE.block_tokens, finished).run()
    assert not any(state.ledger.totals().values())
    return records, decisions


@pytest.mark.parametrize(
    ("policy", "planner", "options"),
    [
        ("warm", "never", {"pool_tokens": 60_000}),
        ("linear", "never", {"pool_tokens": 60_000}),
        ("lmetric", "never", {"pool_tokens": 60_000}),
        ("session_sticky", "never", {"pool_tokens": 60_000}),
        ("unified", "threshold", {"role": Role.KV_BOTH, "pool_tokens": 100_000}),
        ("lmetric", "cost_model", {"role": Role.KV_BOTH, "transport": "tcp", "plan": PlanOptions(time_scale=4.0)}),
        ("least_loaded", "static_pd", {"prefill_instances": 2}),
    ],
)
def test_decisions_are_those_of_the_live_router(
    monkeypatch: pytest.MonkeyPatch, policy: str, planner: str, options: dict[str, Any]
) -> None:
    settings = SimOptions(instances=4, **options)
    records, decisions = simulated(settings, policy, planner, False, monkeypatch)
    live_records, live_decisions = simulated(settings, policy, planner, True, monkeypatch)
    assert len(records) == len(TRACE.requests)
    assert decisions == live_decisions
    assert records == live_records
    if planner == "static_pd":
        assert sum(record.prefill_instance is not None for record in records) > 20
