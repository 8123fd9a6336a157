"""The room rule, and that those who go by it agree."""

from __future__ import annotations

import pytest

from policies.costs.book import Workload
from policies.costs.transfer_constants import KV_BYTES_PER_TOKEN
from policies.pool import POOL_SHARE, tokens_over
from policies.routing.warm import Warm
from policies.types import InstanceView
from tests.policies.builders import ask, fleet_of

VIEW = InstanceView("a", kv_capacity_tokens=100_000, kv_used_tokens=60_000, kv_promised_tokens=10_000)


def test_used_promised_and_prompt_count_against_the_share() -> None:
    assert tokens_over(VIEW, 20_000) == 0
    assert tokens_over(VIEW, 20_001) == 1
    assert tokens_over(VIEW, 19_000) == -1_000
    assert tokens_over(VIEW, 20_000, share=0.5) == 40_000


def test_a_pool_of_unknown_size_has_room() -> None:
    assert tokens_over(VIEW._replace(kv_capacity_tokens=0), 10**9) == 0


@pytest.mark.parametrize(("prompt", "room"), [(20_000, True), (20_001, False)])
def test_what_warm_charges_for_is_what_the_cost_book_does_not_learn_from(prompt: int, room: bool) -> None:
    request = ask(prompt)
    workload = Workload.of(request, VIEW, None, 0, KV_BYTES_PER_TOKEN)
    assert workload.decode.room is room
    charged_s = Warm().choose(request, fleet_of(VIEW)).scores[0].inputs["room_s"]
    assert (charged_s == 0) is room
    assert Warm().pool_share == POOL_SHARE
