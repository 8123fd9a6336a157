"""Data-parallel ranks in the settings, in the table of instances, and in an engine's metrics."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from proxy.access.forwarding import Forwarding
from proxy.access.keys import Keys
from proxy.discovery.source import distinct
from proxy.fleet.breaker import BreakerState
from proxy.fleet.instances import Instance, Instances
from proxy.handoff.connectors import engine_ids_of
from proxy.meters.reading import MetricsReading
from proxy.settings import HealthSettings, InstanceSettings, SettingsError, distinct_ranks, load_settings

URL = "http://10.0.0.1:8000"


def ranks(**settings: Any) -> tuple[InstanceSettings, ...]:
    return InstanceSettings(**{"url": URL, "name": "a", "data_parallel_size": 2, **settings}).ranks()


def table(*settings: InstanceSettings) -> Instances:
    return Instances(settings, HealthSettings(healthy_after=1, unhealthy_after=2))


def test_an_engine_becomes_one_instance_for_each_rank() -> None:
    settings = load_settings(
        None,
        instances=[
            {
                "url": URL,
                "data_parallel_size": 3,
                "events_url": "tcp://10.0.0.1:5557",
                "events_replay_url": "tcp://10.0.0.1:5657",
            },
            {"url": "http://10.0.0.2:8000"},
        ],
    )
    assert [each.name for each in settings.instances] == [
        *(f"10.0.0.1:8000/{rank}" for rank in range(3)),
        "10.0.0.2:8000",
    ]
    assert [each.data_parallel_rank for each in settings.instances] == [0, 1, 2, None]
    assert [each.events_url for each in settings.instances[:3]] == [
        f"tcp://10.0.0.1:{5557 + rank}" for rank in range(3)
    ]
    assert settings.instances[2].events_replay_url == "tcp://10.0.0.1:5659"
    assert {each.engine_name for each in settings.instances} == {"10.0.0.1:8000", "10.0.0.2:8000"}
    again = load_settings(None, instances=[each.model_dump() for each in settings.instances])
    assert again.instances == settings.instances


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data_parallel_rank": 2}, "none of the ranks"),
        ({"data_parallel_size": 1, "data_parallel_rank": 0}, "give both"),
        ({"events_url": "tcp://10.0.0.1:65535"}, "leaves room"),
        ({"events_url": "ipc:///tmp/events"}, "tcp endpoint of rank 0"),
        ({"events_url": "tcp://10.0.0.1:5557", "events_replay_url": "tcp://10.0.0.1:5558"}, "overlap"),
    ],
)
def test_what_ranks_cannot_have(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ranks(**settings)


def test_one_rank_alone_keeps_its_own_ports() -> None:
    (only,) = ranks(data_parallel_rank=1, events_url="tcp://10.0.0.1:7000")
    assert (only.name, only.engine_name, only.events_url) == ("a/1", "a", "tcp://10.0.0.1:7000")


@pytest.mark.parametrize(
    "other",
    [
        {"url": URL, "name": "b"},
        {"url": URL, "name": "b", "data_parallel_size": 2, "data_parallel_rank": 1},
        {"url": "http://10.0.0.2:8000", "name": "a"},
        {"url": "http://10.0.0.2:8000", "name": "a/1"},
        {"url": "http://10.0.0.2:8000", "name": "a", "data_parallel_size": 4, "data_parallel_rank": 3},
    ],
)
def test_no_other_instance_has_the_name_or_url_of_an_engine_with_ranks(other: dict[str, Any]) -> None:
    both = (*ranks(), InstanceSettings(**other))
    for instances in (both, both[::-1]):
        with pytest.raises(ValueError, match="share the same"):
            distinct_ranks(instances)
        with pytest.raises(SettingsError, match="share the same"):
            load_settings(None, instances=[each.model_dump() for each in instances])
    wanted = distinct([InstanceSettings(url=URL, name="a", data_parallel_size=2), InstanceSettings(**other)], [])
    assert [each.name for each in wanted.instances] == ["a/0", "a/1"]
    assert len(wanted.problems) == 1


def test_the_rank_is_sent_whatever_the_client_sends() -> None:
    settings = load_settings(None, instances=[{"url": URL, "data_parallel_size": 2}, "http://10.0.0.2:8000"])
    forwarding = Forwarding(settings, Keys(settings.keys))
    client = {b"x-data-parallel-rank": b"0", b"x-session-id": b"s"}
    sent = [forwarding.headers(client, each) for each in settings.instances]
    assert [each["x-data-parallel-rank"] for each in sent] == ["0", "1", "0"]
    assert [forwarding.headers({}, each).get("x-data-parallel-rank") for each in settings.instances] == ["0", "1", None]


def test_a_refused_connection_counts_for_all_ranks_and_another_failure_for_one() -> None:
    instances = table(*ranks(), InstanceSettings(url="http://10.0.0.2:8000", name="b"))
    for each in instances:
        instances.probed(each)
    for _ in range(2):
        instances.failed("a/0", "answered 500")
    assert instances.healthy() == {"a/1", "b"}
    instances.failed("a/1", "refused", refused=True)
    assert instances.healthy() == {"b"}
    instances.probe_failed("a/0", "down")
    assert [each.name for each in instances.ranks(instances["a/1"])] == ["a/0", "a/1"]
    assert instances.ranks(instances["b"]) == (instances["b"],)


def test_refused_on_one_rank_opens_the_breakers_of_all() -> None:
    instances = table(*ranks())
    for each in instances:
        instances.probed(each)
    instances.failed("a/0", "refused", refused=True)
    assert [each.breaker.state for each in instances] == [BreakerState.OPEN, BreakerState.OPEN]


def test_an_engine_to_be_recycled_for_one_rank_gets_no_requests_on_any() -> None:
    instances = table(*ranks(), InstanceSettings(url="http://10.0.0.2:8000", name="b"))
    for each in instances:
        instances.probed(each)
    instances["a/1"].recycle_wanted = "it leaks"
    instances["a/1"].recycle_wanted_at_s = float("inf")
    assert instances.healthy() == {"b"}


def test_a_name_means_an_instance_or_an_engine() -> None:
    instances = table(*ranks(), InstanceSettings(url="http://10.0.0.2:8000", name="b"))
    assert [each.name for each in instances.of_engine("a")] == ["a/0", "a/1"]
    assert [each.name for each in instances.of_engine("a/1")] == ["a/1"]
    assert [each.name for each in instances.of_engine("b")] == ["b"]
    assert instances.of_engine("c") == ()


def reported(engines: int) -> str:
    """Metrics as vLLM 0.18.1 writes them for data-parallel ranks."""
    lines = ["# TYPE vllm:num_requests_running gauge", "process_start_time_seconds 1.5e9"]
    for rank in range(engines):
        label = f'engine="{rank}",model_name="m"'
        lines += [
            f"vllm:num_requests_running{{{label}}} {rank + 1}",
            f"vllm:num_requests_waiting{{{label}}} {rank}",
            f"vllm:kv_cache_usage_perc{{{label}}} 0.{rank}",
            f"vllm:prefix_cache_queries_total{{{label}}} {100 * (rank + 1)}",
            f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{200 * engines}",enable_prefix_caching="True",'
            f'engine="{rank}"}} 1',
        ]
    return "\n".join(lines)


def test_metrics_are_read_by_rank() -> None:
    reading = MetricsReading(reported(2))
    one = reading.figures(1)
    assert (one.running, one.waiting, one.kv_usage, one.started_unix_s) == (2, 1, 0.1, 1.5e9)
    assert (one.block_tokens, one.blocks, one.caching, dict(one.counters)) == (
        16,
        200,
        "True",
        {"prefix_query_tokens": 200},
    )
    whole = reading.figures()
    assert (whole.running, whole.waiting, whole.kv_usage, whole.blocks) == (3, 1, 0.05, 400)
    assert reading.ranks == 2
    assert reading.figures(2) == (1.5e9, None, None, None, None, None, None, {}, None)


def test_a_server_for_some_ranks_of_a_deployment_counts_its_own() -> None:
    text = reported(4).replace('engine="0"', 'engine="10"').replace('engine="1"', 'engine="9"')
    reading = MetricsReading(text)
    assert [reading.figures(rank).running for rank in range(4)] == [3, 4, 2, 1]


def test_metrics_without_ranks_are_those_of_the_engine() -> None:
    reading = MetricsReading("vllm:num_requests_running 4\n")
    assert (reading.ranks, reading.figures().running, reading.figures(0).running) == (0, 4, None)


def test_engine_ids_are_read_by_rank() -> None:
    answer = b'{"0":{"engine_id":"e_dp0","worker_addr":{}},"1":{"engine_id":"e_dp1","worker_addr":{}}}'
    assert engine_ids_of(answer) == {0: "e_dp0", 1: "e_dp1"}
    for wrong in (b"[]", b'{"0":{}}', b'{"0":{"engine_id":1}}', b'{"x":{"engine_id":"e"}}', b"\xff"):
        with pytest.raises(ValueError, match=r"."):
            engine_ids_of(wrong)


def test_a_difference_of_ranks_is_known_once_the_engine_reports_them() -> None:
    instance = Instance(ranks()[0])
    for reported_ranks, problem in ((0, None), (2, None), (4, "the engine has 4 data-parallel rank(s)")):
        instance.reported_ranks = reported_ranks
        found = instance.ranks_problem
        assert found is None if problem is None else problem in (found or "")
