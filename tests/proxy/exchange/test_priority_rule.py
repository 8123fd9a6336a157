"""The priority of a leg: the rule, and the field at the end of a body that is not decoded."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from policies.costs.formulas import PrefillModel
from policies.costs.order import PrefillOrder
from proxy.exchange.priority import MOST_TIERS, TIER, leg_priority, priority_of
from proxy.request.bodies import decode_leg, extended, prefill_leg
from proxy.request.parse import Endpoint, ParseRules, parse_steps, request_view
from proxy.request.steps import at_once
from proxy.request.token_chunks import TokenChunks

OFFSET_S = 1_800_000_000.0
DUE_MS = 1_800_000_012_346
BODIES: dict[Endpoint, dict[str, Any]] = {
    Endpoint.COMPLETIONS: {"prompt": [1, 2, 3]},
    Endpoint.CHAT: {"messages": [{"role": "user", "content": 'a } and a "priority": 7'}]},
    Endpoint.RESPONSES: {"input": "hello"},
    Endpoint.MESSAGES: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
}


def priority(endpoint: Endpoint = Endpoint.COMPLETIONS, due_s: float | None = 12.3456, **fields: Any) -> int | None:
    """The priority of a leg of a request that may have one of its own."""
    body = json.dumps({"model": "m", **BODIES[endpoint], **fields}).encode()
    rules = ParseRules(16, 64, allowed_fields={"priority"})
    parsed = at_once(parse_steps(endpoint, body, rules, lambda _: False, TokenChunks(1)))
    return leg_priority(parsed, due_s, OFFSET_S)


def test_the_priority_is_the_due_time_in_unix_milliseconds() -> None:
    assert priority_of(12.3456, OFFSET_S) == DUE_MS
    assert priority_of(12.3456, OFFSET_S) < priority_of(12.3476, OFFSET_S)


def test_a_tier_goes_before_all_due_times_of_a_higher_one() -> None:
    far_s = 1e15
    assert priority_of(far_s, OFFSET_S, -1) < priority_of(0, OFFSET_S, 0)
    assert priority_of(far_s, OFFSET_S, 3) < priority_of(0, OFFSET_S, 4)
    assert priority_of(0, OFFSET_S, 3) < priority_of(1, OFFSET_S, 3)


@pytest.mark.parametrize("due_s", [-1e30, 0.0, 12.3456, 1e30, math.inf])
@pytest.mark.parametrize("tier", [-(10**30), -(2**63), 0, 2**63, 10**30])
def test_every_priority_fits_into_64_bits(due_s: float, tier: int) -> None:
    found = priority_of(due_s, OFFSET_S, tier)
    assert -(2**63) <= found < 2**63
    assert found // TIER == min(max(tier, -MOST_TIERS), MOST_TIERS)


@pytest.mark.parametrize("endpoint", [Endpoint.COMPLETIONS, Endpoint.CHAT, Endpoint.RESPONSES])
def test_requests_of_openais_apis_have_one(endpoint: Endpoint) -> None:
    assert priority(endpoint) == DUE_MS
    assert priority(endpoint, due_s=None) is None


@pytest.mark.parametrize("endpoint", Endpoint)
def test_messages_have_none(endpoint: Endpoint) -> None:
    body = json.dumps({"model": "m", **BODIES[endpoint]}).encode()
    parsed = at_once(parse_steps(endpoint, body, ParseRules(16, 64), lambda _: False, TokenChunks(1)))
    request = request_view(parsed, "r", None, 16, 64, 4.0)
    assert request.has_priority is (endpoint is not Endpoint.MESSAGES)
    queued = PrefillOrder(PrefillModel(), 5.0, 10.0, request.has_priority).queued(1_000, 0, ordered=True)
    assert queued is not None
    assert (leg_priority(parsed, queued.due_s, OFFSET_S) is None) is (endpoint is Endpoint.MESSAGES)


@pytest.mark.parametrize(("own", "tier"), [(0, 0), (-2, -2), (5, 5), (5.0, 5), ("5", 5), (10**30, MOST_TIERS)])
def test_a_clients_own_priority_is_a_tier(own: object, tier: int) -> None:
    assert priority(priority=own) == tier * TIER + DUE_MS


@pytest.mark.parametrize("own", ["null", "{}", "[]"])
def test_a_value_that_engines_refuse_is_left_to_them(own: str) -> None:
    assert priority(priority=json.loads(own)) is None


def test_the_field_of_a_large_body_is_read_too() -> None:
    assert priority(prompt=[7] * 300_000, priority=2) == 2 * TIER + DUE_MS
    assert priority(prompt=[7] * 1_500_000, priority=2) == 2 * TIER + DUE_MS


@pytest.mark.parametrize("end", ["", "\n", " \r\n\t"])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("endpoint", Endpoint)
def test_fields_are_added_at_the_end_and_nothing_else_changes(endpoint: Endpoint, indent: int | None, end: str) -> None:
    body = {"model": "m", **BODIES[endpoint]}
    raw = (json.dumps(body, indent=indent) + end).encode()
    assert extended(raw) is raw
    usage = {"stream_options": {"include_usage": True}}
    assert json.loads(extended(raw, usage=True)) == body | usage
    assert json.loads(extended(raw, priority=-5)) == body | {"priority": -5}
    assert json.loads(extended(raw, usage=True, priority=DUE_MS)) == body | usage | {"priority": DUE_MS}
    assert extended(raw, priority=1).startswith(raw.rstrip()[:-1])


def test_the_last_of_two_priorities_counts() -> None:
    assert json.loads(extended(b'{"priority": 3, "model": "m"}', priority=4))["priority"] == 4


def test_each_leg_of_a_hand_off_has_its_own() -> None:
    raw = b'{"model":"m","prompt":[1,2],"priority":3}'
    params = {"transfer_id": "x"}
    assert json.loads(prefill_leg(raw, params, 7))["priority"] == 7
    assert json.loads(decode_leg(raw, params, 8))["priority"] == 8
    assert json.loads(prefill_leg(raw, params))["priority"] == 3
    assert json.loads(decode_leg(raw, params))["priority"] == 3
