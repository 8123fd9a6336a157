"""Metric names: one unit for each, in the name, and base units only."""

from __future__ import annotations

import re

from prometheus_client.parser import text_string_to_metric_families

from policies.predict.exact_index import ExactCounters
from proxy.events.stream import StreamCounters
from proxy.metrics.fleet.instances import EVENT_COUNTERS
from tests.proxy.conftest import StartProxy

FOLLOWED = [{"url": "http://127.0.0.1:9", "name": "followed", "events_url": "tcp://127.0.0.1:9"}]
GAUGES = {
    "warmroute_instance_requests",
    "warmroute_instance_pending_prefill_tokens",
    "warmroute_instance_decoding_tokens",
    "warmroute_instance_recent_tokens",
    "warmroute_instance_sessions",
    "warmroute_instance_index_blocks",
    "warmroute_instance_kv_usage_ratio",
}


async def test_every_metric_is_in_one_base_unit(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    await proxy.client.post("/v1/completions", json={"model": "stub", "prompt": list(range(1000)), "max_tokens": 4})
    families = {
        family.name: family for family in text_string_to_metric_families((await proxy.client.get("/metrics")).text)
    }
    assert all(name.startswith(("warmroute_", "gen_ai_server_", "process_")) for name in families)
    assert not [name for name in families if re.search(r"_(ms|us|milliseconds|minutes|[kKmMgG]i?b|percent)$", name)]
    # A label that chooses what is counted puts several units under one name.
    assert not [name for name, family in families.items() if any("what" in each.labels for each in family.samples)]
    assert families.keys() >= GAUGES
    deciding = {sample.name: sample.value for sample in families["warmroute_decide_seconds"].samples}
    assert deciding["warmroute_decide_seconds_count"] == 1.0
    assert 0 < deciding["warmroute_decide_seconds_sum"] < 1
    bounds = [float(each.labels["le"]) for each in families["warmroute_decide_seconds"].samples if "le" in each.labels]
    assert bounds[0] == 0.0001


async def test_kv_events_have_a_metric_for_each_figure(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1, instances=FOLLOWED)
    text = (await proxy.client.get("/metrics")).text
    assert 'warmroute_exact_index_trusted{instance="followed"} 0.0' in text
    assert 'warmroute_exact_index_blocks{instance="followed"} 0.0' in text
    figures = {*StreamCounters.__dataclass_fields__, *ExactCounters.__dataclass_fields__}
    assert set(EVENT_COUNTERS) == figures
    for name, _ in EVENT_COUNTERS.values():
        assert f'{name}_total{{instance="followed"}} 0.0' in text
