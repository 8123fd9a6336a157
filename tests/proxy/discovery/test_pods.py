"""Instances from pods, as a pure function of what the API says."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from policies.types import Role
from proxy.discovery.pods import Pod, wanted_of
from proxy.discovery.source import Wanted
from proxy.settings import EngineTemplate
from tests.proxy.discovery.cluster import pod_of


def wanted(*pods: dict[str, Any], **template: Any) -> Wanted:
    decoded = [msgspec.json.decode(msgspec.json.encode(pod), type=Pod) for pod in pods]
    return wanted_of(decoded, EngineTemplate(**template))


def test_a_running_pod_is_an_instance_with_its_name_and_node() -> None:
    (found,) = wanted(pod_of("engine-0", "127.0.0.2")).instances
    assert (found.name, found.url, found.host, found.role) == (
        "engine-0",
        "http://127.0.0.2:8000",
        "node-1",
        Role.NONE,
    )


def test_annotations_give_role_and_ports() -> None:
    notes = {
        "warmroute.io/role": "kv_both",
        "warmroute.io/port": "9000",
        "warmroute.io/bootstrap-port": "8998",
        "warmroute.io/events-port": "5557",
        "warmroute.io/events-replay-port": "5558",
    }
    (found,) = wanted(pod_of("engine-0", "fd00::2", annotations=notes)).instances
    assert (found.role, found.url, found.bootstrap_url) == (
        Role.KV_BOTH,
        "http://[fd00::2]:9000",
        "http://[fd00::2]:8998",
    )
    assert (found.events_url, found.events_replay_url) == ("tcp://[fd00::2]:5557", "tcp://[fd00::2]:5558")


def test_the_template_applies_where_a_pod_says_nothing() -> None:
    (found,) = wanted(pod_of("engine-0", "127.0.0.2"), port=7000, events_port=5557).instances
    assert (found.url, found.events_url) == ("http://127.0.0.2:7000", "tcp://127.0.0.2:5557")


def test_a_pod_with_ranks_is_an_instance_for_each() -> None:
    notes = {"warmroute.io/data-parallel-size": "2"}
    pods = (pod_of("engine-0", "127.0.0.2", annotations=notes), pod_of("engine-1", "127.0.0.3"))
    found = wanted(*pods, port=7000, events_port=5557, data_parallel_size=3).instances
    assert [each.name for each in found] == [*(f"engine-0/{n}" for n in range(2)), *(f"engine-1/{n}" for n in range(3))]
    assert [each.events_url for each in found[:2]] == ["tcp://127.0.0.2:5557", "tcp://127.0.0.2:5558"]


def test_a_pod_may_say_that_its_engine_orders_prompts() -> None:
    pods = [
        pod_of("engine-0", "127.0.0.2", annotations={"warmroute.io/priority-scheduling": "true"}),
        pod_of("engine-1", "127.0.0.3", annotations={"warmroute.io/priority-scheduling": "false"}),
        pod_of("engine-2", "127.0.0.4"),
    ]
    assert [each.priority_scheduling for each in wanted(*pods).instances] == [True, False, False]
    assert [each.priority_scheduling for each in wanted(*pods, priority_scheduling=True).instances] == [
        True,
        False,
        True,
    ]
    (problem,) = wanted(pod_of("a", "127.0.0.2", annotations={"warmroute.io/priority-scheduling": "yes"})).problems
    assert "'yes' is neither true nor false" in problem


def test_pods_without_an_address_in_deletion_or_ended_are_no_instances() -> None:
    leaving = pod_of("c", "127.0.0.4")
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    pods = (
        pod_of("a", ""),
        pod_of("b", "127.0.0.3", phase="Failed"),
        leaving,
        pod_of("d", "127.0.0.5", phase="Succeeded"),
    )
    assert wanted(*pods) == Wanted()


def test_a_pod_that_is_not_ready_is_an_instance() -> None:
    pod = pod_of("a", "127.0.0.2", phase="Pending")
    pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    assert len(wanted(pod).instances) == 1


@pytest.mark.parametrize(
    ("annotations", "port", "says"),
    [
        ({"warmroute.io/role": "both"}, 8000, "'both' is none of"),
        ({"warmroute.io/port": "http"}, 8000, "'http' is no port"),
        ({"warmroute.io/events-port": "70000"}, 8000, "no port"),
        ({}, None, "its port is not known"),
        ({"warmroute.io/data-parallel-size": "two"}, 8000, "no number of ranks"),
        ({"warmroute.io/data-parallel-size": "0"}, 8000, "data_parallel_size"),
        ({"warmroute.io/role": "kv_both"}, 8000, "bootstrap_url"),
    ],
)
def test_a_pod_that_is_no_engine_is_left_out_with_the_reason(
    annotations: dict[str, str], port: int | None, says: str
) -> None:
    found = wanted(pod_of("bad", "127.0.0.2", annotations=annotations, port=port), pod_of("good", "127.0.0.3"))
    assert [each.name for each in found.instances] == ["good"]
    assert len(found.problems) == 1
    assert found.problems[0].startswith("pod bad: ")
    assert says in found.problems[0]


def test_two_pods_of_one_address_are_one_instance_and_a_problem() -> None:
    """As pods on the host's network: their ports must differ."""
    found = wanted(pod_of("a", "127.0.0.2"), pod_of("b", "127.0.0.2"))
    assert ([each.name for each in found.instances], len(found.problems)) == (["a"], 1)
