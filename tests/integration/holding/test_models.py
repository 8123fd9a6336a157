"""Two models behind one proxy: overload of one holds no request for the other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from replayer.records.runs import read_run
from tests.integration.conftest import Cluster, StartCluster
from tests.integration.fleet import ROOT, free_ports

pytestmark = pytest.mark.fleet

POOL_TOKENS = 4_096
RULE = {"name": "working_set", "params": {"keep_s": 0.0, "least_prefilling": 0.0}}


async def hold_pool(cluster: Cluster, session: str, model: str, first: int, begun: asyncio.Event) -> None:
    """Stream an answer that takes most of one engine's pool and does not end by itself."""
    body = completion(model, first) | {"max_tokens": 1_000, "ignore_eos": True, "stream": True}
    headers = {"x-session-id": session}
    async with cluster.client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for _ in answer.aiter_lines():
            begun.set()


def completion(model: str, first: int) -> dict[str, Any]:
    return {"model": model, "prompt": list(range(first, first + 2_400)), "max_tokens": 4}


async def test_overload_of_one_model_holds_no_session_of_another(start_cluster: StartCluster) -> None:
    cluster = await start_cluster(
        2,
        *("--kv-capacity-tokens", str(POOL_TOKENS), "--max-model-len", str(POOL_TOKENS), "--engine-speed", "0.2"),
        models=("small", "large"),
        every={"role": "none", "bootstrap_url": None},
        admission=RULE,
    )

    async def held() -> list[str]:
        stats = (await cluster.client.get("/stats")).json()
        return [each["session_id"] for each in stats["holding"]["line"]]

    async def answered(session: str, model: str, first: int) -> None:
        headers = {"x-session-id": session}
        answer = await cluster.client.post("/v1/completions", json=completion(model, first), headers=headers)
        assert answer.status_code == 200, answer.text

    begun = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        busy = tasks.create_task(hold_pool(cluster, "busy", "small", 1, begun))
        await begun.wait()
        waiting = [tasks.create_task(answered(f"w{number}", "small", 10_000 * number)) for number in (1, 2, 3, 4)]
        for _ in range(2_400):
            if len(await held()) == 4:
                break
            await asyncio.sleep(0.025)
        line = await held()
        assert set(line) == {"w1", "w2", "w3", "w4"}
        small, large = (await cluster.client.get("/stats")).json()["holding"]["parts"]
        assert [(part["instances"], part["held"]) for part in (small, large)] == [
            (["inst-0"], len(line)),
            (["inst-1"], 0),
        ]
        assert [part["pool_tokens"] for part in (small, large)] == [POOL_TOKENS, POOL_TOKENS]
        assert POOL_TOKENS > small["active_tokens"] >= 2_400
        assert large["active_tokens"] == 0
        await answered("other", "large", 50_000)
        rows = (await cluster.client.get("/breakdown", params={"session_id": "other"})).json()["rows"]
        assert [(row["instance"], row["admission"], row["held_s"]) for row in rows] == [("inst-1", "room", 0.0)]
        assert await held() == line
        for task in (busy, *waiting):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(busy, *waiting)


async def test_a_session_has_a_context_of_its_own_with_each_model(start_cluster: StartCluster) -> None:
    """As Claude Code's, which sends short requests of a session to a small model between those to a large one."""
    cluster = await start_cluster(
        2,
        *("--kv-capacity-tokens", str(POOL_TOKENS), "--max-model-len", str(POOL_TOKENS), "--engine-speed", "50"),
        models=("small", "large"),
        every={"role": "none", "bootstrap_url": None},
    )

    async def kept() -> dict[str, int]:
        parts = (await cluster.client.get("/stats")).json()["holding"]["parts"]
        return {part["instances"][0]: part["kept_tokens"] for part in parts}

    headers = {"x-session-id": "s"}
    for model, tokens in (("large", 2_400), ("small", 100), ("large", 2_500), ("small", 110)):
        body = {"model": model, "prompt": list(range(tokens)), "max_tokens": 4}
        answer = await cluster.client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
    assert await kept() == {"inst-0": 110, "inst-1": 2_500}


def test_the_comparison_of_rules_with_two_models(tmp_path: Path) -> None:
    """The script of docs/admission.md, with traces of a few requests."""
    for name, sessions in (("first", 3), ("second", 2)):
        rows = [
            {
                "timestamp": 100 * turn,
                "input_length": 1_024,
                "output_length": 4,
                "hash_ids": [10 * session, 10 * session + 1],
            }
            for turn in range(2)
            for session in range(1, sessions + 1)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "REPEATS": "1",
        "ENGINE_SPEED": "20",
        "FIRST_PORT": str(free_ports(17)),
    }
    command = [
        "bench/gpu/two_models.sh",
        str(tmp_path / "out"),
        *(str(tmp_path / f"{name}.jsonl") for name in ("first", "second")),
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for arm in ("never_hold-0", "working_set-0"):
        assert f"{arm.replace('-', ', repeat ')}: done" in done.stdout
        for name, requests in (("first", 6), ("second", 4)):
            records = read_run(tmp_path / "out" / arm / f"{name}.jsonl").records
            assert len(records) == requests
            assert all(record.ok for record in records)
