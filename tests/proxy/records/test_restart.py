"""Rows of a proxy process that was killed, in the next one."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.proxy.serve_process import serve_process, until
from tests.proxy.stub_engine import StubEngine

BODY = {"model": "stub", "prompt": list(range(40)), "max_tokens": 4}


@pytest.mark.fleet
async def test_rows_survive_a_killed_process_and_followers_continue_after_it(tmp_path: Path) -> None:
    engine = await StubEngine().start()
    path = tmp_path / "rows.jsonl"
    settings: dict[str, Any] = {
        "instances": [{"name": "inst-0", "url": engine.url}],
        "breakdown": {"jsonl_path": str(path)},
    }
    try:
        async with serve_process(tmp_path / "s.yaml", settings) as served:
            for number in range(3):
                headers = {"x-request-id": f"before-{number}"}
                answer = await served.client.post("/v1/completions", json=BODY, headers=headers)
                assert answer.status_code == 200

            async def written() -> bool:
                return path.read_bytes().count(b"\n") == 3

            await until(written)
            served.send(signal.SIGKILL)
            await served.ended()
        with path.open("ab") as file:
            file.write(b'{"row":4,"request_id":"to')
        async with serve_process(tmp_path / "s.yaml", settings) as served:
            await served.client.post("/v1/completions", json=BODY, headers={"x-request-id": "after"})
            answer = (await served.client.get("/breakdown", params={"after": 2})).json()
            assert [(row["row"], row["request_id"]) for row in answer["rows"]] == [(3, "before-2"), (4, "after")]
            old, new = (row["proxy_started_unix_s"] for row in answer["rows"])
            assert old < new == answer["proxy_started_unix_s"]
            assert (await served.client.get("/stats")).json()["requests"]["finished"] == 1
            served.send(signal.SIGTERM)
            assert await served.ended() == 0
        assert path.read_bytes().count(b"\n") == 4
    finally:
        await engine.stop()
