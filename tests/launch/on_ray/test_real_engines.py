"""Two real vLLM engines on the CPU, on two nodes of a real Ray cluster; needs ``make ray`` and ``make engines``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from launch.fleet.file import load_fleet
from launch.on_ray.fleet import RayFleet
from tests.integration.fleet import free_port, free_ports

pytest.importorskip("ray", reason="needs Ray: make test-ray")

ROOT = Path(__file__).parents[3]
ENGINES = Path(os.environ.get("WARMROUTE_ENGINES") or ROOT / ".venv-engines").absolute()

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not (ENGINES / "bin" / "python").exists(), reason="needs real engines: make engines"),
]

SAME = {"model": "tiny", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def two_nodes() -> Any:
    """A head without room and two nodes with room for one engine each."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, "node_ip_address": "127.0.0.2"}
    started = Cluster(initialize_head=True, head_node_args=head)
    try:
        for number in range(2):
            started.add_node(num_cpus=1, node_ip_address=f"127.0.0.{number + 3}")
        yield started
    finally:
        started.shutdown()


async def test_engines_on_two_nodes_answer_alike_and_hand_over_between_them(two_nodes: Any, tmp_path: Path) -> None:
    ports = [free_ports(2) for _ in range(5)]
    keys = ("base_port", "base_bootstrap_port", "base_events_port", "base_events_replay_port", "base_master_port")
    fleet = load_fleet(
        ROOT / "configs" / "fleets" / "vllm-cpu-4x.yaml",
        [
            "count=2",
            *(f"{key}={first}" for key, first in zip(keys, ports, strict=True)),
            f"vllm.python={ENGINES / 'bin' / 'python'}",
            f"model={ENGINES / 'tiny-model'}",
            f"proxy.port={free_port()}",
            "proxy.policy.name=round_robin",
            "proxy.classes={medium_tokens: 200, heavy_tokens: 500}",
            "proxy.offload={planner: threshold, params: {min_decode_requests: 0}, prefill_timeout_s: 30, "
            "first_token_timeout_s: 30}",
        ],
    )
    runner = RayFleet(fleet, tmp_path, source=Path("cpu.yaml"), address=two_nodes.address, notify=lambda _: None)
    async with (
        runner,
        httpx.AsyncClient(base_url=fleet.proxy_url(), timeout=120, trust_env=False) as client,
    ):
        proof = await runner.prove_fresh()
        assert [each.problems for each in proof.engines] == [[], []]
        reports = [each.report for each in runner.placed.values()]
        assert len({each.node_id for each in reports if each}) == 2
        assert {each.instance["url"].split("//")[1].split(":")[0] for each in reports if each} == {
            "127.0.0.3",
            "127.0.0.4",
        }

        async def say(prompt: list[int]) -> tuple[str, str]:
            answer = await client.post("/v1/completions", json={**SAME, "prompt": prompt})
            assert answer.status_code == 200, answer.text
            return answer.headers["x-warmroute-instance"], answer.json()["choices"][0]["text"]

        short = list(range(100, 180))
        answers = dict([await say(short) for _ in range(2)])
        assert set(answers) == {"inst-0", "inst-1"}
        assert len(set(answers.values())) == 1
        long = list(range(300, 1_200))
        _, first = await say(long)
        rows = (await client.get("/breakdown", params={"limit": 10})).json()["rows"]
        handed = [row for row in rows if row["offload_reason"] == "chosen"]
        assert len(handed) == 1, [(row["offload_reason"], row["attempts"]) for row in rows]
        assert handed[0]["prefill_instance"] != handed[0]["instance"]
        # The other engine had only the beginning of the hand-off: co-located on it the text is the same.
        port = fleet.url(int(handed[0]["prefill_instance"][-1])).rpartition(":")[2]
        url = next(each.instance["url"] for each in reports if each and each.instance["url"].endswith(port))
        alone = await client.post(f"{url}/v1/completions", json={**SAME, "prompt": long})
        assert alone.json()["choices"][0]["text"] == first
