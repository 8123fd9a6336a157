"""Parts of the fleet: which replica places new work where."""

from __future__ import annotations

from policies.admission.base import NO_INSTANCES
from policies.classes import ClassThresholds
from policies.offload.never import Never
from policies.replicas.parts import LEAST_INSTANCES, part_of
from policies.routing.joint import Joint
from policies.routing.warm import Warm
from policies.session import RoutingSession, with_part, with_room
from policies.snapshot import FleetSnapshot
from policies.state import FleetState
from policies.types import InstanceView, Role, Transport
from tests.policies.builders import ask_new

INSTANCES = frozenset(f"inst-{number}" for number in range(100))
REPLICAS = ("a", "b", "c", "d")


def parts(replicas: tuple[str, ...]) -> dict[str, frozenset[str]]:
    return {each: part_of(each, set(replicas) - {each}, INSTANCES) for each in replicas}


def test_every_instance_belongs_to_one_replica() -> None:
    made = parts(REPLICAS)
    assert sum(len(part) for part in made.values()) == 100
    assert frozenset().union(*made.values()) == INSTANCES
    assert {len(part) for part in made.values()} == {25}


def test_parts_differ_by_one_instance_at_most_and_depend_on_the_names_alone() -> None:
    assert {len(part) for part in parts(REPLICAS[:3]).values()} == {33, 34}
    assert part_of("b", ["c", "a", "b"], sorted(INSTANCES)) == parts(REPLICAS[:3])["b"]


def test_one_replica_and_small_fleets_are_not_divided() -> None:
    assert part_of("a", [], INSTANCES) == frozenset()
    assert part_of("a", ["b"], sorted(INSTANCES)[: 2 * LEAST_INSTANCES - 1]) == frozenset()
    assert part_of("a", ["b"], sorted(INSTANCES)[: 2 * LEAST_INSTANCES]) != frozenset()


def fleet_of(cached: dict[str, int]) -> FleetSnapshot:
    return FleetSnapshot(tuple(InstanceView(f"inst-{n}", cached.get(f"inst-{n}", 0)) for n in range(20)))


PART = frozenset(f"inst-{number}" for number in range(10))


def test_outside_the_part_only_a_longer_prefix_counts() -> None:
    left = with_part(fleet_of({"inst-3": 500, "inst-12": 500, "inst-15": 900}), PART)
    assert {view.instance for view in left.instances} == PART | {"inst-15"}


def test_a_beginning_that_many_outside_hold_counts_on_the_session_s_own_instance_only() -> None:
    fleet = fleet_of({"inst-3": 500, **{f"inst-{number}": 900 for number in range(11, 18)}})
    assert {view.instance for view in with_part(fleet, PART).instances} == PART
    left = with_part(fleet._replace(pinned="inst-12"), PART)
    assert {view.instance for view in left.instances} == PART | {"inst-12"}


def test_the_whole_fleet_remains_where_too_few_of_the_part_can_be_chosen() -> None:
    fleet = fleet_of({})
    assert with_part(fleet, frozenset(list(PART)[: LEAST_INSTANCES - 1])) == fleet


def test_routing_places_new_work_on_the_part_and_turns_where_their_prefix_is() -> None:
    state = FleetState()
    for number in range(20):
        state.add_instance(f"inst-{number}")
    routing = RoutingSession(state, Warm(), Never(), ClassThresholds())
    first = routing.route(ask_new(1, 32_000), state.instances, (), 0.0)
    first.commitment.release()
    routing.part = frozenset(state.instances) - {first.decision.decode_on}
    assert routing.route(ask_new(1, 32_000), state.instances, (), 1.0).decision.decode_on == first.decision.decode_on
    routing.part = PART
    placed = {routing.route(ask_new(n, 32_000), state.instances, (), 1.0).decision.decode_on for n in range(2, 30)}
    assert placed == PART


def test_an_instance_that_is_left_out_does_not_prefill_for_another_either() -> None:
    names = [f"inst-{number}" for number in range(20)]
    producer = InstanceView("only-prefills", role=Role.KV_PRODUCER)
    views = fleet_of({}).instances
    fleet = FleetSnapshot(views, prefill_instances=(*views, producer))
    for left in (with_part(fleet, PART), with_room(ask_new(1), fleet, PART)):
        assert [view.instance for view in left.instances] == names[:10]
        assert [view.instance for view in left.senders] == [*names[:10], "only-prefills"]


def test_a_long_prompt_is_not_prefilled_outside_the_part() -> None:
    state = FleetState()
    for number in range(20):
        state.add_instance(f"inst-{number}", Role.KV_BOTH, "host", Transport.NVLINK)
    state.add_instance("only-prefills", Role.KV_PRODUCER, "host", Transport.NVLINK)
    for name in state.instances:
        state.set_capacity(name, 2_000_000, 16.0)
    routing = RoutingSession(state, Joint(), Never(), ClassThresholds())
    for name in PART:  # each hand-off pays: streams decode on all of the part, and the producer has a queue
        for _ in range(12):
            state.ledger.acquire(name, 0, 20_000, 0.0).first_token()
    state.ledger.acquire("only-prefills", 240_000, 240_000, 0.0)
    decoders = set(state.instances) - state.producers
    prefilled_on: list[str] = []
    for part, room in ((NO_INSTANCES, NO_INSTANCES), (PART, NO_INSTANCES), (NO_INSTANCES, PART)):
        routing.part = part
        routed = routing.route(ask_new(len(prefilled_on), 60_000), decoders, state.producers, 0.0, room)
        prefilled_on.append(routed.decision.prefill_on or routed.decision.decode_on)
    assert prefilled_on[0] not in PART
    assert PART.issuperset(prefilled_on[1:])


def test_room_counts_before_the_part() -> None:
    state = FleetState()
    for number in range(20):
        state.add_instance(f"inst-{number}")
    routing = RoutingSession(state, Warm(), Never(), ClassThresholds())
    routing.part = PART
    routed = routing.route(ask_new(1, 32_000), state.instances, (), 0.0, frozenset({"inst-15"}))
    assert routed.decision.decode_on == "inst-15"
