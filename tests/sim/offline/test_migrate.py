"""``migrate`` in virtual time: sessions whose home alone stays busy."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from policies.registry import make_routing
from policies.types import Role
from replayer.records.runs import RequestRecord
from replayer.traces.trace import Trace
from sim.offline.simulate import OfflineRun, SimOptions
from tests.sim.offline.offline_runs import ROOMY_TOKENS, conversation, trace_of

BLOCKS = 900
TURNS = 6


def one_busy_home(sessions: int = 48) -> Trace:
    """Sessions of 58k tokens, placed in turns on two instances; every second one continues, all on one of them."""
    made = []
    for number in range(sessions):
        turns = [(4.0 * number, BLOCKS, 20)]
        if number % 2 == 0:
            turns += [(200.0 + 30.0 * turn + 0.5 * number, BLOCKS + 6 * (turn + 1), 600) for turn in range(TURNS)]
        made.append(conversation(*turns, session=f"session-{number}", first_id=1_000 * number))
    return trace_of(*made)


class Played(NamedTuple):
    tpot_s: float
    e2e_s: float
    rows: list[dict[str, Any]]

    @property
    def moved(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["prefill_instance"]]


def play(policy: str, transport: str, **params: Any) -> Played:
    """Means over the turns after the first."""
    options = SimOptions(instances=2, role=Role.KV_BOTH, transport=transport, pool_tokens=ROOMY_TOKENS, decisions=True)
    run = OfflineRun.of_trace(one_busy_home(), options, make_routing(policy, params))
    records: list[RequestRecord] = []
    rows: list[dict[str, Any]] = []
    run.run(records.append, rows.append)
    assert all(record.ok for record in records)
    assert not any(run.in_flight().values())
    later = [record for record in records if record.turn > 1]
    tpot_s = float(np.mean([each.tpot_s for each in later if each.tpot_s is not None]))
    e2e_s = float(np.mean([each.e2e_scheduled_s for each in later if each.e2e_scheduled_s is not None]))
    return Played(tpot_s, e2e_s, rows)


def test_over_nvlink_a_few_sessions_move_once_and_the_streams_are_faster() -> None:
    stay, move = play("warm", "nvlink"), play("migrate", "nvlink")
    assert not stay.moved
    assert 1 <= len(move.moved) <= 10
    assert max(Counter(row["session_id"] for row in move.moved).values()) == 1
    assert {(row["reason"], row["planner"], row["offload_reason"]) for row in move.moved} == {
        ("session_migrated", "migrate", "chosen")
    }
    # Home computed the new tokens alone: the rest was read from its cache.
    assert all(row["actual_cached_tokens"] >= 0.9 * row["prompt_tokens"] for row in move.moved)
    assert move.tpot_s < 0.97 * stay.tpot_s
    assert move.e2e_s < 0.97 * stay.e2e_s


def test_over_tcp_the_price_keeps_them_and_moving_anyway_loses() -> None:
    stay, move, always = play("warm", "tcp"), play("migrate", "tcp"), play("migrate", "tcp", priced=False)
    assert (move.moved, move.e2e_s) == ([], stay.e2e_s)
    assert always.moved
    assert always.e2e_s > 1.1 * stay.e2e_s
