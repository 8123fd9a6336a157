"""Counts of all replicas agree once each has sent a full message, whatever was lost before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.ledger import Lease
from tests.proxy.sharing.side import UNIX_S, Side

REPLICAS = 3
STEP = st.tuples(
    st.integers(0, REPLICAS - 1),
    st.sampled_from(["a", "b"]),
    st.sampled_from(["send", "first token", "end", "restart", "report"]),
    st.sets(st.integers(0, REPLICAS - 1)),
)


@given(st.lists(STEP, max_size=60))
def test_counts_agree_after_any_loss(steps: list[tuple[int, str, str, set[int]]]) -> None:
    sides = [Side(f"replica-{number}") for number in range(REPLICAS)]
    leases: list[list[Lease]] = [[] for _ in sides]
    now_s = 0.0
    for number, name, what, lost in steps:
        now_s += 0.1
        side, mine = sides[number], leases[number]
        if what == "send":
            mine.append(side.state.ledger.acquire(name, 10, 100, now_s))
        elif what == "restart":
            side.state.restarted(name)
        elif what == "report":
            report(sides, number, now_s, full=False, lost=lost)
        elif mine:
            mine[0].first_token() if what == "first token" else mine.pop(0).release()
    for number in range(REPLICAS):
        report(sides, number, now_s, full=True, lost=set())
    for number, side in enumerate(sides):
        for name in ("a", "b"):
            others = [each.state.ledger.account(name) for each in sides if each is not side]
            account = side.state.ledger.remote.get(name, side.state.ledger.unused)
            assert account.requests == sum(other.requests for other in others), number
            assert account.prefilling == sum(other.prefilling for other in others)
            assert account.pending_prefill_tokens == sum(other.pending_prefill_tokens for other in others)
            assert account.decoding_tokens == sum(other.decoding_tokens for other in others)
            assert account.promised_tokens == sum(other.promised_tokens for other in others)


def report(sides: list[Side], number: int, now_s: float, *, full: bool, lost: set[int]) -> None:
    """Carry a replica's message to the others, except those for which it is lost."""
    message = sides[number].own.message(now_s, UNIX_S + now_s, full=full)
    for other, side in enumerate(sides):
        if message is not None and other != number and other not in lost:
            side.hears(message, now_s)
