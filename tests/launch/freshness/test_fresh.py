"""The proof of freshness accepts new engines and names the reasons against used ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
import pytest

from launch.fleet.file import FleetFile
from launch.freshness.proof import FreshProof, StaleEngineError, prove_fresh
from launch.run.state import ProcessState
from launch.run.supervisor import Fleet

pytestmark = pytest.mark.usefixtures("leaves_nothing")
MakeFleet = Callable[..., FleetFile]


@pytest.mark.usefixtures("stubs")
async def test_new_engines_are_fresh_and_used_ones_are_not(small_fleet: MakeFleet, tmp_path: Path) -> None:
    since = time.time()
    path = tmp_path / "fresh.json"
    async with Fleet(small_fleet(), tmp_path, with_proxy=False) as fleet:
        processes = fleet.state.processes
        proof = await prove_fresh(processes, since_unix_s=since, path=path)
        assert proof.fresh
        assert len(proof.engine_ids) == 2
        assert msgspec.json.decode(path.read_bytes(), type=FreshProof) == proof

        with pytest.raises(StaleEngineError, match=r"inst-0: engine id .* was already present in the previous arm"):
            await prove_fresh(processes, since_unix_s=since, previous_engine_ids=proof.engine_ids)
        with pytest.raises(StaleEngineError, match=r"inst-1: started \d+\.\d s before the arm did"):
            await prove_fresh(processes, since_unix_s=time.time() + 60)

        async with httpx.AsyncClient() as client:
            await client.post(f"{processes[1].url}/v1/completions")
        with pytest.raises(StaleEngineError) as caught:
            await prove_fresh(processes, since_unix_s=since, path=path)
        assert "inst-1: vllm:prefix_cache_queries_total is 100, not 0" in str(caught.value)
        assert "inst-0" not in str(caught.value)
        kept = msgspec.json.decode(path.read_bytes(), type=FreshProof)
        assert not kept.fresh
        assert [bool(engine.problems) for engine in kept.engines] == [False, True]

        twins = [processes[0], msgspec.structs.replace(processes[0], name="twin")]
        with pytest.raises(StaleEngineError, match="twin: shares engine id"):
            await prove_fresh(twins, since_unix_s=since)


async def test_an_engine_that_does_not_answer_is_not_fresh(small_fleet: MakeFleet) -> None:
    url = small_fleet().url(0)
    silent = ProcessState(name="a", kind="sim", pid=1, created_unix_s=0, url=url, log="", bootstrap_url=url)
    with pytest.raises(StaleEngineError, match=r"a: /metrics cannot be read \(ConnectError.*; a: bootstrap /query"):
        await prove_fresh([silent], since_unix_s=0)
