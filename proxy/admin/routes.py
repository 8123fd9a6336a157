"""Read-only and policy routes: health, instances, statistics, explanations, policy switch."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from policies.admission.base import NO_INSTANCES, Admit
from policies.registry import UnknownPolicyError, parameters
from policies.types import NO_TENANT, Decision, NoCandidateError
from proxy.admin.admin_route import AdminRoute, refuse_empty
from proxy.admin.conditions import conditions
from proxy.admin.instance_rows import departure_row, instance_rows
from proxy.admin.tenant_rows import tenant_rows
from proxy.breakdown import plain
from proxy.core import Core
from proxy.errors import RequestError, no_instance_error
from proxy.fleet.reachability import outage
from proxy.operations.fleet_changes import FleetChanges
from proxy.request.agent import agent_of
from proxy.request.bodies import as_utf8
from proxy.request.parse import Endpoint


class PolicySwitch(BaseModel):
    """Body of ``PUT /policy``; omitted fields stay unchanged."""

    model_config = ConfigDict(extra="forbid")

    name: str | None = Field(None, description="routing policy to apply; default: the active one")
    params: dict[str, Any] = Field(default_factory=dict, description="its parameters; the others take their defaults")
    planner: str | None = Field(None, description="offload planner to apply; default: the active one")
    planner_params: dict[str, Any] = Field(default_factory=dict, description="its parameters")


def probe_routes(core: Core) -> APIRouter:
    """Routes over one core for probes and scrapers, which may add query parameters of their own."""
    routes = APIRouter()

    @routes.head("/health", include_in_schema=False)
    @routes.get("/health", summary="Liveness: the process responds")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @routes.head("/ready", include_in_schema=False)
    @routes.get("/ready", summary="Readiness: at least one instance can be sent requests")
    async def ready(
        verbose: Annotated[
            str | None, Query(description="list named conditions with their remedies; 0 or false: do not")
        ] = None,
    ) -> JSONResponse:
        healthy = sorted(core.instances.healthy())
        serving = bool(healthy) and not core.draining
        answer: dict[str, Any] = {"ready": serving, "healthy_instances": healthy}
        if verbose is not None and verbose not in {"0", "false"}:
            answer["conditions"] = [condition.as_dict() for condition in conditions(core)]
        return JSONResponse(answer, 200 if serving else 503)

    @routes.get("/metrics", summary="Prometheus exposition")
    async def metrics() -> Response:
        text = core.metrics.render(core.router, core.instances, core.events, time.monotonic())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return routes


def admin_routes(core: Core, fleet: FleetChanges) -> APIRouter:
    """Routes over one core."""
    routes = APIRouter(route_class=AdminRoute)

    @routes.get("/instances", summary="Every instance: health, identity, load, cache")
    async def instances() -> dict[str, Any]:
        return {
            "instances": instance_rows(core, fleet),
            "departing": [departure_row(each) for each in fleet.departures],
        }

    @routes.get("/stats", summary="Totals: requests, ledger, index, sessions, prediction error")
    async def stats() -> dict[str, Any]:
        return _stats(core)

    @routes.get("/policy", summary="The active policy and planner, and the installed ones")
    async def policy() -> dict[str, Any]:
        return _policy(core)

    @routes.put("/policy", summary="Switch policy or planner; index, sessions and ledger are kept")
    async def switch(wanted: PolicySwitch) -> dict[str, Any]:
        refuse_empty(wanted)
        try:
            core.router.switch(wanted.name, wanted.params, wanted.planner, wanted.planner_params)
        except ValueError as error:
            code = "unknown_policy" if isinstance(error, UnknownPolicyError) else "policy_refused"
            raise RequestError(400, str(error), code=code) from error
        return _policy(core)

    @routes.post("/explain", summary="Decision of every policy for a request, with all scores; changes no state")
    async def explain(
        request: Request,
        endpoint: Annotated[Endpoint | None, Query(description="the body's endpoint; by default by its fields")] = None,
        tenant: Annotated[
            str | None, Query(pattern=r"^[A-Za-z0-9._@-]{1,64}$", description="whose place in line to explain")
        ] = None,
    ) -> dict[str, Any]:
        return await _explain(core, dict(request.scope["headers"]), await request.body(), endpoint, tenant)

    return routes


def _stats(core: Core) -> dict[str, Any]:
    state, breakdown = core.router.state, core.breakdown
    return {
        "requests": {
            "started": breakdown.started,
            "finished": breakdown.finished,
            "in_flight": breakdown.started - breakdown.finished,
            "abandoned_pulls": len(core.abandoned),
            "outcomes": breakdown.outcomes,
        },
        "ledger": {
            **state.ledger.totals(),
            "offloads": state.offloads_in_flight,
            "held_tokens": state.holds.total(),
        },
        "admission": core.admission.as_dict(),
        "holding": core.holding.as_dict(),
        "tenants": tenant_rows(core),
        "retries": core.retries.as_dict(time.monotonic()),
        "sessions": len(state.sessions),
        "index": {"distinct_blocks": state.index.distinct_blocks, "block_tokens": core.router.block_tokens},
        "exact_index": {
            "distinct_blocks": state.predictor.exact.distinct_blocks,
            "trusted": sorted(state.predictor.exact.trusted_instances()),
            "promised_prompts": len(state.predictor.promises),
        },
        "discovery": core.discovery.as_dict(),
        "tokenizer": core.tokens.as_dict(),
        "event_loop_late_s": round(core.lag.late_s(10.0), 3),
        "prediction_error": core.metrics.errors.as_dict(),
        "bytes_per_token": core.router.text_ratios.as_dict(),
        "policy": core.router.policy.name,
        "planner": core.router.planner.name,
        "policy_failures": core.router.watch.as_dict(),
    }


def _policy(core: Core) -> dict[str, Any]:
    policy, planner = core.router.policy, core.router.planner
    return {
        "name": policy.name,
        "params": parameters(policy),
        "planner": planner.name,
        "planner_params": parameters(planner),
        "known_policies": sorted(core.router.known_policies),
        "broken_policies": core.router.broken_policies,
        "known_planners": core.router.known_planners,
    }


async def _explain(
    core: Core, headers: dict[bytes, bytes], body: bytes, endpoint: Endpoint | None, tenant: str | None
) -> dict[str, Any]:
    body = as_utf8(body)
    if endpoint is None:
        endpoint = Endpoint.CHAT if b'"messages"' in body else Endpoint.COMPLETIONS
    body, normalized = core.normalizer.normalized(endpoint.value, headers, body)
    parsed = await core.router.parse_fairly(endpoint, body)
    core.check_model(parsed.fields.model)
    text = parsed
    parsed = await core.tokenized(parsed)
    session = core.identify(headers, text, keep=False)
    whose = NO_TENANT if tenant is None else core.tenants.of_name(tenant)
    agent = agent_of(headers)
    request = core.router.view(parsed, "explain", session.session_id, whose, agent, session.parent_id)
    admission = core.holding.answer(request)
    room_on = admission.instances if isinstance(admission, Admit) else NO_INSTANCES
    needed = parsed.context_tokens(request.prompt_tokens)
    try:
        fleet, answers = core.router.explain(request, core.instances.healthy(parsed.fields.model, needed), room_on)
    except NoCandidateError as error:
        raise no_instance_error(core.settings.health.interval_s, outage(core.instances)) from error
    return {
        "request": {
            "endpoint": endpoint.value,
            "prompt_tokens": request.prompt_tokens,
            "exact": request.exact,
            "blocks": len(request.block_hashes),
            "block_tokens": request.block_tokens,
            "session_id": session.session_id,
            "session_source": session.source,
            "parent_session_id": session.parent_id,
            "tenant": whose.name or None,
            "agent": request.agent,
            "pinned_instance": fleet.pinned,
            "specialists": list(fleet.specialists),
            "normalized": normalized,
        },
        "cache_killer": core.cache_killers.explain(text, session.session_id),
        "fleet": [view._asdict() for view in fleet.instances],
        "prefill_only": [view._asdict() for view in fleet.prefill_instances if view not in fleet.instances],
        "hotspot": fleet.hotspot._asdict(),
        "admission": core.holding.explained(admission),
        "in_force": core.router.policy.name,
        "decisions": {name: _decision(decision) for name, decision in answers.items()},
    }


def _decision(decision: Decision) -> dict[str, Any]:
    return {
        "instance": decision.decode_on,
        "class": decision.request_class.value,
        "reason": decision.reason.value,
        "new_tokens": decision.new_tokens,
        "predicted_cached_tokens": decision.cached_tokens,
        "offload": {
            "prefill_instance": decision.prefill_on,
            "reason": decision.offload.reason.value,
            "inputs": plain(decision.offload.inputs),
        },
        "scores": plain([score._asdict() for score in decision.scores]),
        "decided_by": decision.policy,
        "failures": [
            {"part": failure.part.value, "name": failure.name, "error": failure.error} for failure in decision.failures
        ],
    }
