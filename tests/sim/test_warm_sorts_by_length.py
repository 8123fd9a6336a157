"""With short KV, ``warm`` places prompts of similar length together (docs/decisions/0011), in simulation."""

from __future__ import annotations

import numpy as np

from policies.registry import make_routing
from replayer.replay.plan import PlanOptions
from replayer.traces.synth import SynthOptions, synthetic_trace
from sim.offline.simulate import SimOptions, simulate


def _gathering(policy: str, **parameters: float) -> float:
    """Correlation between a prompt's length and the length of the prompts in flight on the same instance."""
    trace = synthetic_trace(SynthOptions(requests=600, seed=3))
    options = SimOptions(instances=8, profile="h200", pool_tokens=250_000, plan=PlanOptions(time_scale=40.0))
    records = [each for each in simulate(trace, options, make_routing(policy, parameters)).run.records if each.ok]
    assert len(records) > 500
    sent = np.array([each.sent_s for each in records])
    ended = sent + np.array([each.e2e_s or 0.0 for each in records])
    length = np.log([float(each.prompt_tokens or 1) for each in records])
    _, where = np.unique([each.instance for each in records], return_inverse=True)
    own, beside = [], []
    for number in range(len(records)):
        there = (sent < sent[number]) & (ended > sent[number])
        here = there & (where == where[number])
        if here.sum() >= 2:
            own.append(length[number])
            beside.append(length[here].mean() - length[there].mean())
    assert len(own) > 100
    return float(np.corrcoef(own, beside)[0, 1])


def test_warm_but_not_linear_groups_prompts_of_similar_length() -> None:
    assert abs(_gathering("linear")) < 0.15
    assert _gathering("warm") > 0.25


def test_what_a_prefill_costs_the_others_makes_them_gather_more() -> None:
    assert _gathering("warm") > _gathering("warm", others_weight=0.0)
