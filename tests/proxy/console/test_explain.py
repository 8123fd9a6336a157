"""Command ``explain`` against a running proxy, and against files."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from tests.proxy.conftest import StartProxy
from warmroute import build

BODY = {"model": "stub", "prompt": list(range(40)), "max_tokens": 4}


async def call(*args: object) -> Any:
    """Result of the command, in a thread: the proxy runs in this one."""
    runner = CliRunner(env={"COLUMNS": "140", "NO_COLOR": "1"})
    return await asyncio.to_thread(runner.invoke, build(), [*map(str, args)])


async def test_a_request_is_explained_in_words_or_as_json(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(2)
    for _ in range(2):
        await proxy.client.post("/v1/completions", json=BODY, headers={"x-request-id": "mine"})
    shown = await call("explain", "mine", "--url", proxy.url)
    assert shown.exit_code == 0, shown.output
    assert "It was answered. Status 200." in shown.output
    assert "candidates, lowest score first" in shown.output
    assert "inst-0" in shown.output
    assert "(chosen)" in shown.output
    assert "2 requests have this id" in shown.output
    raw = await call("explain", "mine", "--url", proxy.url, "--json")
    assert json.loads(raw.stdout) == (await proxy.rows(request_id="mine"))[-1]


async def test_an_unknown_request_is_answered_with_the_remedy(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    shown = await call("explain", "nobody", "--url", proxy.url)
    assert shown.exit_code == 1
    assert "error: nobody: no such row." in shown.output
    assert "--file PATH" in shown.output


async def test_a_proxy_that_does_not_answer_or_wants_a_key(start_proxy: StartProxy) -> None:
    shown = await call("explain", "x", "--url", "http://127.0.0.1:9")
    assert shown.exit_code == 2
    assert "no answer from http://127.0.0.1:9" in shown.output
    assert "is the proxy running?" in shown.output
    key = "wr-" + "k" * 40
    import hashlib

    admin = [{"name": "ops", "sha256": hashlib.sha256(key.encode()).hexdigest()}]
    proxy = await start_proxy(1, keys={"admin": admin})
    refused = await call("explain", "x", "--url", proxy.url)
    assert refused.exit_code == 2
    assert "WARMROUTE_ADMIN_KEY" in refused.output
    assert "no such row" in (await call("explain", "x", "--url", proxy.url, "--key", key)).output


async def test_files_are_searched_without_a_proxy_and_control_characters_not_printed(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    old = {"request_id": "old", "outcome": "ok", "session_id": "s\x1b[31m"}
    (tmp_path / "rows.jsonl.1").write_text(json.dumps(old) + "\n")
    path.write_text(json.dumps({"request_id": "new", "outcome": "shutdown", "error": "old"}) + '\n{"request_id": "ol')
    shown = await call("explain", "old", "--file", path)
    assert shown.exit_code == 0, shown.output
    assert "It was answered." in shown.output
    assert "Session s?[31m." in shown.output
    assert "The proxy shut down before it ended." in (await call("explain", "new", "--file", path)).output
    missing = await call("explain", "none", "--file", path)
    assert (missing.exit_code, "rows.jsonl.1" in missing.output) == (1, True)
    assert (await call("explain", "none", "--file", tmp_path / "no.jsonl")).exit_code == 2
    path.rename(tmp_path / "rows.worker-1.jsonl")
    (tmp_path / "rows.worker-0.jsonl").touch()
    (tmp_path / "rows.worker-x.jsonl").write_text("not rows")
    of_workers = await call("explain", "old", "--file", tmp_path / "rows.jsonl")
    assert (of_workers.exit_code, of_workers.output) == (shown.exit_code, shown.output)
