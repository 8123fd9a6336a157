"""``TenantShares`` and ``FairQueue``: shares in tokens, bounds on delay, priorities, and nothing left behind."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import combinations, count, islice

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from policies import fairness
from policies.fairness import LEAST_TOKENS, OVERTAKEN_S, QUANTUM_TOKENS, FairQueue, TenantShares
from policies.types import NO_TENANT, Tenant

Q = QUANTUM_TOKENS


class Waiting:
    """A waiting request; compared by identity."""

    def __init__(self, tenant: Tenant, tokens: int) -> None:
        self.tenant = tenant
        self.tokens = max(tokens, LEAST_TOKENS)


class Room:
    """A queue before a fleet with room for one request after another; every request ends at once unless ``keep``."""

    def __init__(self) -> None:
        self.shares = TenantShares()
        self.queue: FairQueue[Waiting] = FairQueue(self.shares)
        self.sent: list[Waiting] = []
        self.now_s = 0.0
        self._running: list[Waiting] = []

    def arrive(self, tenant: Tenant, tokens: int) -> Waiting:
        item = Waiting(tenant, tokens)
        self.queue.append(item, tenant, self.now_s)
        return item

    def send(self, stuck: frozenset[str] = frozenset(), *, keep: bool = False) -> Waiting | None:
        """Send the request whose turn it is, unless its tenant is stuck."""
        item = self.queue.next(self.now_s, lambda each: each.tenant.name in stuck)
        if item is None:
            return None
        self.start(item, waited=True, keep=keep)
        self.queue.remove(item)
        return item

    def start(self, item: Waiting, *, waited: bool, keep: bool) -> None:
        self.shares.sent(item.tenant, item.tokens, self.now_s, waited=waited)
        self.sent.append(item)
        if keep:
            self._running.append(item)
        else:
            self.shares.ended(item.tenant, item.tokens)

    def end_all(self) -> None:
        while self._running:
            item = self._running.pop()
            self.shares.ended(item.tenant, item.tokens)

    def names(self, number: int) -> list[str]:
        return [item.tenant.name for item in islice(iter(self.send, None), number) if item is not None]

    def is_empty(self) -> bool:
        shares = self.shares
        return not (len(self.queue) or shares.waiting or shares.in_flight_tokens or shares._accounts or shares._rounds)


def tokens_of(items: list[Waiting]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for item in items:
        sums[item.tenant.name] += item.tokens
    return sums


SIZES = st.one_of(st.integers(1, 3_000), st.integers(1, 40_000), st.integers(100_000, 500_000))
WEIGHTS = st.sampled_from([0.1, 0.5, 1.0, 1.0, 1.0, 2.0, 10.0])


@given(
    st.lists(st.tuples(WEIGHTS, st.lists(SIZES, min_size=1, max_size=60)), min_size=2, max_size=5),
    st.data(),
)
@hypothesis_settings(max_examples=60, deadline=None)
def test_tenants_that_wait_send_tokens_in_proportion_to_their_weights(
    loads: list[tuple[float, list[int]]], data: st.DataObject
) -> None:
    room = Room()
    tenants = [Tenant(f"t{number}", weight) for number, (weight, _) in enumerate(loads)]
    arrivals = [(tenant, tokens) for tenant, (_, sizes) in zip(tenants, loads, strict=True) for tokens in sizes]
    for tenant, tokens in data.draw(st.permutations(arrivals)):
        room.arrive(tenant, tokens)
    largest = {
        tenant.name: max(LEAST_TOKENS, *sizes) / tenant.weight
        for tenant, (_, sizes) in zip(tenants, loads, strict=True)
    }
    sums = dict.fromkeys(largest, 0.0)
    ranges: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    while (item := room.send()) is not None:
        sums[item.tenant.name] += item.tokens / item.tenant.weight
        waiting = room.shares.waiting
        for one, other in combinations(sums, 2):
            if one in waiting and other in waiting:
                low, high = ranges[one, other]
                difference = sums[one] - sums[other]
                ranges[one, other] = [min(low, difference), max(high, difference)]
    # The range over all moments is the largest difference of any interval.
    for (one, other), (low, high) in ranges.items():
        assert high - low <= 2 * Q + largest[one] + largest[other] + 1e-6
    assert len(room.sent) == len(arrivals)
    assert room.is_empty()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(0, 3), SIZES),
        st.tuples(st.just("arrive"), st.integers(0, 3), SIZES),
        st.tuples(st.just("send"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("send"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("direct"), st.integers(0, 3), SIZES),
        st.tuples(st.just("leave"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("end"), st.just(0), st.just(0)),
    ),
    max_size=120,
)


@given(st.lists(WEIGHTS, min_size=4, max_size=4), STEPS)
@hypothesis_settings(max_examples=60, deadline=None)
def test_no_tenant_waits_for_more_than_the_bound_and_none_has_more_than_a_quantum(
    weights: list[float], steps: list[tuple[str, int, int]]
) -> None:
    """For each waiting tenant: tokens of every other one since its last request, against the bound in the docstring."""
    room = Room()
    tenants = [Tenant(f"t{number}", weight) for number, weight in enumerate(weights)]
    of_name = {tenant.name: tenant for tenant in tenants}
    overdraft: dict[str, float] = {}
    since: dict[str, Counter[str]] = {}
    largest: Counter[str] = Counter()
    lines: dict[str, list[Waiting]] = defaultdict(list)

    def begin(name: str) -> None:
        overdraft[name] = max(0.0, -room.shares.deficits[name])
        since[name] = Counter()

    for what, number, tokens in steps:
        tenant = tenants[number]
        if what == "arrive":
            first = tenant.name not in room.shares.waiting
            lines[tenant.name].append(room.arrive(tenant, tokens))
            if first:
                begin(tenant.name)
        elif what == "direct":
            room.start(Waiting(tenant, tokens), waited=False, keep=True)
        elif what == "end":
            room.end_all()
        elif what == "leave" and lines[tenant.name]:
            room.queue.remove(lines[tenant.name].pop())
        elif what == "send" and (item := room.send(keep=bool(number))) is not None:
            name = item.tenant.name
            lines[name].remove(item)
            largest[name] = max(largest[name], item.tokens)
            for other in room.shares.waiting:
                since[other][name] += item.tokens
            if name in room.shares.waiting:
                begin(name)
        for name, deficit in room.shares.deficits.items():
            mine = of_name[name]
            assert deficit <= mine.weight * Q
            for other, sent in since[name].items():
                if other != name:
                    rival = of_name[other].weight
                    bound = rival * (overdraft[name] / mine.weight + 2 * Q) + largest[other]
                    assert sent <= bound + 1e-6, (name, other)
    while room.send() is not None:
        pass
    room.end_all()
    assert room.is_empty()


def test_500_long_prompts_delay_a_polite_tenant_by_one_of_them() -> None:
    hog, polite = Tenant("hog"), Tenant("polite")
    room = Room()
    for _ in range(500):
        room.arrive(hog, 100_000)
    assert room.names(8) == ["hog"] * 8
    for _ in range(100):
        room.arrive(polite, 2_000)
    # The hog has overdrawn, so the polite tenant is next, and stays so until it has sent as many tokens.
    order = room.names(95)
    assert order.count("hog") == 1
    assert order.index("hog") in range(46, 55)
    assert room.names(500).count("hog") == 491


def test_tokens_in_flight_count_when_a_line_forms() -> None:
    hog, polite = Tenant("hog"), Tenant("polite")
    room = Room()
    for _ in range(4):
        room.start(Waiting(hog, 50_000), waited=False, keep=True)
    for _ in range(40):
        room.arrive(hog, 10_000)
        room.arrive(polite, 10_000)
    order = room.names(40)
    assert order[:20] == ["polite"] * 20  # as many as the 200,000 tokens in flight
    assert order[20:].count("hog") in range(9, 12)


def test_a_tenant_brings_neither_credit_nor_overdraft_from_times_without_a_line() -> None:
    one, other = Tenant("one"), Tenant("other")
    room = Room()
    for _ in range(100):
        room.start(Waiting(one, 100_000), waited=False, keep=False)
    room.arrive(one, 1_000)
    room.arrive(other, 1_000)
    assert room.shares.deficits == {"one": Q, "other": Q}


def test_leaving_the_line_does_not_pay_off_an_overdraft_while_others_wait() -> None:
    one, other = Tenant("one"), Tenant("other")
    room = Room()
    room.arrive(one, 100_000)
    for _ in range(100):
        room.arrive(other, 4_096)
    assert room.names(1) == ["one"]
    assert "one" not in room.shares.waiting
    room.arrive(one, 1_000)
    assert room.shares.deficits["one"] == Q - 100_000
    order = room.names(60)
    assert order.index("one") in range(20, 30)  # 100,000 tokens of the other's


def test_a_tenant_whose_requests_do_not_fit_gets_one_quantum_afterwards() -> None:
    one, other = Tenant("one"), Tenant("other")
    room = Room()
    for _ in range(200):
        room.arrive(one, 1_024)
        room.arrive(other, 1_024)
    for _ in range(100):
        assert room.send(stuck=frozenset({"one"})) is not None
    assert room.shares.deficits["one"] <= Q
    order = room.names(100)
    assert order.count("one") - order.count("other") <= 2 * Q // 1_024


def test_weights_are_shares() -> None:
    room = Room()
    small, large = Tenant("small", 1.0), Tenant("large", 3.0)
    for _ in range(1_000):
        room.arrive(small, 1_000)
        room.arrive(large, 1_000)
    names = room.names(1_000)
    assert names.count("large") / names.count("small") == pytest.approx(3.0, rel=0.1)


def test_a_higher_priority_goes_first_and_a_lower_one_gets_a_turn_every_ten_seconds() -> None:
    room = Room()
    low, high = Tenant("low"), Tenant("high", priority=1)
    for _ in range(100):
        room.arrive(low, 1_000)
    for _ in range(200):
        room.arrive(high, 100_000)
    order = []
    for second in range(60):
        room.now_s = float(second)
        order += room.names(2)
    places = [place // 2 for place, name in enumerate(order) if name == "low"]
    assert places == [10, 20, 30, 40, 50]
    assert OVERTAKEN_S == 10.0


def test_equal_priorities_do_not_depend_on_time() -> None:
    orders = []
    for step_s in (0.0, 100.0):
        room = Room()
        for _ in range(50):
            room.arrive(Tenant("one", priority=3), 10_000)
            room.arrive(Tenant("other", priority=3), 500)
        order = []
        while (item := room.send()) is not None:
            order.append(item.tenant.name)
            room.now_s += step_s
        orders.append(order)
    assert orders[0] == orders[1]


def test_another_priority_from_a_reload_applies_to_the_next_request() -> None:
    room = Room()
    for _ in range(10):
        room.arrive(Tenant("one"), 50_000)
        room.arrive(Tenant("other"), 50_000)
    room.names(6)
    room.arrive(Tenant("other", priority=5), 1_000)
    assert room.names(8) == ["other"] * 8
    room.names(20)
    assert room.is_empty()


@given(st.lists(st.integers(1, 100_000), max_size=30))
def test_one_tenant_is_served_in_the_order_of_arrival(sizes: list[int]) -> None:
    room = Room()
    arrived = [room.arrive(NO_TENANT, tokens) for tokens in sizes]
    assert room.shares.interleaved(arrived, lambda each: each.tenant, lambda each: each.tokens, 0.0) == arrived
    while room.send() is not None:
        pass
    assert room.sent == arrived


@given(st.lists(st.tuples(st.integers(0, 2), SIZES), max_size=40))
@hypothesis_settings(deadline=None)
def test_the_interleaved_line_is_the_order_of_sending(arrivals: list[tuple[int, int]]) -> None:
    room = Room()
    tenants = [Tenant("a"), Tenant("b", 2.0), Tenant("c", priority=1)]
    arrived = [room.arrive(tenants[number], tokens) for number, tokens in arrivals]
    line = room.shares.interleaved(arrived, lambda each: each.tenant, lambda each: each.tokens, 0.0)
    while room.send() is not None:
        pass
    for name in "abc":
        assert [item for item in line if item.tenant.name == name] == [
            item for item in room.sent if item.tenant.name == name
        ]
    if line:
        assert line[0] is room.sent[0]


def test_the_last_request_of_the_tenant_with_most_of_a_full_queue_makes_place() -> None:
    room = Room()
    one, other, heavy = Tenant("one"), Tenant("other"), Tenant("heavy", 4.0)
    items = [room.arrive(one, 1_000) for _ in range(3)]
    assert room.queue.last_of_largest(other) is items[-1]
    assert room.queue.last_of_largest(one) is None
    room.arrive(other, 1_000)
    room.arrive(other, 1_000)
    assert room.queue.last_of_largest(other) is None  # it would have as many
    for _ in range(6):
        room.arrive(heavy, 1_000)
    assert room.queue.last_of_largest(heavy) is items[-1]
    assert FairQueue[Waiting](TenantShares()).last_of_largest(one) is None


def test_overdrafts_of_absent_tenants_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairness, "MAX_TENANTS", 50)
    room = Room()
    room.arrive(Tenant("always"), 500_000)
    room.arrive(Tenant("always"), 500_000)
    names = count()
    for _ in range(500):
        room.arrive(Tenant(f"t{next(names)}"), 100_000)
        assert room.send() is not None
        assert len(room.shares._accounts) <= 53
