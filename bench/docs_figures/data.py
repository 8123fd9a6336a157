"""The numbers behind the figures: one routing decision, the time of prefills, one simulated fleet with full pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from policies.admission.base import AdmissionRule
from policies.admission.never_hold import NeverHold
from policies.admission.working_set import WorkingSet
from policies.classes import ClassThresholds
from policies.costs.formulas import PrefillModel
from policies.decide import decide
from policies.offload.never import Never
from policies.registry import make_routing
from policies.routing.base import RoutingPolicy
from policies.routing.warm import Warm
from policies.snapshot import FleetSnapshot
from policies.types import Decision, InstanceView, RequestView
from replayer.records.runs import RequestRecord
from replayer.traces.synth import SynthOptions, synthetic_trace
from sim.offline.simulate import SimOptions, simulate

PROMPT_TOKENS = 64_000
POOL_TOKENS = 600_000
EXAMPLE = (
    InstanceView(
        "inst-0",
        cached_tokens=60_000,
        requests=3,
        prefilling=1,
        pending_prefill_tokens=9_000,
        decoding_tokens=140_000,
        recent_tokens=15_000,
        sessions=6,
        kv_capacity_tokens=POOL_TOKENS,
    ),
    InstanceView(
        "inst-1",
        cached_tokens=32_000,
        requests=1,
        decoding_tokens=50_000,
        recent_tokens=4_000,
        sessions=4,
        kv_capacity_tokens=POOL_TOKENS,
    ),
    InstanceView("inst-2", cached_tokens=8_000, kv_capacity_tokens=POOL_TOKENS),
    InstanceView(
        "inst-3",
        cached_tokens=60_000,
        requests=5,
        prefilling=2,
        pending_prefill_tokens=36_000,
        decoding_tokens=190_000,
        recent_tokens=40_000,
        sessions=9,
        kv_capacity_tokens=POOL_TOKENS,
        kv_used_tokens=490_000,
    ),
)
"""Four instances as one request of 64,000 tokens sees them."""
PARTS = ("queue_s", "crowd_s", "room_s", "own_s", "others_s")
"""Terms of the score of `warm`, seconds."""
COMPARED = (
    *("warm", "linear", "lmetric", "session_sticky", "least_loaded", "round_robin"),
    *("vllm_cache_aware", "sglang_cache_aware", "dynamo_cost"),
)
"""Policies whose choice in the example the page lists."""

FLEET = SimOptions(instances=2, profile="h20", pool_tokens=400_000)
TRACE = SynthOptions(requests=240, seed=7, rate_per_s=2.0)
EVERY_S = 5.0
"""Interval of the points of the simulated figure."""


class SimulatedLoad(NamedTuple):
    """One simulated run under an admission rule."""

    rule: str
    at_s: list[float]
    context_tokens: list[int]
    """Contexts of the requests at the engines, each session counted once."""
    held: list[int]
    """Requests held by the rule."""
    mean_e2e_s: float
    """From the time at which a turn was due."""
    hit_rate: float
    """Share of prompt tokens that came from the engines' caches."""


def example_request() -> RequestView:
    """A further turn of a session that runs on inst-0."""
    return RequestView("example", PROMPT_TOKENS, session_id="session-1", max_tokens=500)


def decision(policy: RoutingPolicy) -> Decision:
    """Decision of a policy in the example."""
    fleet = FleetSnapshot(EXAMPLE, sequence=1, pinned="inst-0")
    return decide(example_request(), fleet, policy, Never(), ClassThresholds())


def score_parts() -> dict[str, dict[str, float]]:
    """Instance -> the terms of its score under `warm`, seconds."""
    return {score.instance: {part: score.inputs[part] for part in PARTS} for score in decision(Warm()).scores}


def choices() -> list[tuple[str, str, str]]:
    """Policy, the instance it chooses in the example, and its reason."""
    made = [(name, decision(make_routing(name))) for name in COMPARED]
    return [(name, each.decode_on, each.reason.value) for name, each in made]


def prefill_times() -> list[tuple[int, float]]:
    """New tokens, and seconds of such a prefill by the constants that hold until a fleet has measured its own."""
    model = PrefillModel()
    return [(tokens, model.predict(tokens).seconds) for tokens in range(500, 40_001, 500)]


def loads() -> list[SimulatedLoad]:
    """The simulated fleet without holding, and with the default rule."""
    return [_load(NeverHold()), _load(WorkingSet())]


def _load(rule: AdmissionRule) -> SimulatedLoad:
    result = simulate(synthetic_trace(TRACE), FLEET, Warm(), admission=rule)
    records = result.run.records
    admitted_s = {each.request_id: each.scheduled_s + result.held_s.get(each.request_id, 0.0) for each in records}
    end_s = max(record.finished_s or 0.0 for record in records)
    at_s = [step * EVERY_S for step in range(int(end_s // EVERY_S) + 1)]
    e2e_s = [record.e2e_scheduled_s for record in records if record.e2e_scheduled_s is not None]
    prompt = sum(record.prompt_tokens or 0 for record in records)
    return SimulatedLoad(
        rule.name,
        at_s,
        [_context_tokens(records, admitted_s, now_s) for now_s in at_s],
        [sum(each.scheduled_s <= now_s < admitted_s[each.request_id] for each in records) for now_s in at_s],
        sum(e2e_s) / len(e2e_s),
        sum(record.cached_tokens or 0 for record in records) / prompt,
    )


def _context_tokens(records: Sequence[RequestRecord], admitted_s: Mapping[str, float], now_s: float) -> int:
    contexts: dict[str, int] = {}
    for record in records:
        if admitted_s[record.request_id] <= now_s < (record.finished_s or 0.0):
            contexts[record.session_id] = max(contexts.get(record.session_id, 0), record.input_length)
    return sum(contexts.values())
