"""Command ``explain`` against a running proxy, and against files."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
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
    old = {"request_id": "old", "arrived_unix_s": 1.0, "outcome": "ok", "session_id": "s\x1b[31m"}
    (tmp_path / "rows.jsonl.1").write_text(json.dumps(old) + "\n")
    new = {"request_id": "new", "arrived_unix_s": 2.0, "outcome": "shutdown", "error": "old"}
    path.write_text(json.dumps(new) + '\n{"request_id": "ol')
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


@pytest.mark.parametrize(
    "content",
    [
        b"# A page\nabout x\n",
        b"\x7fELF\x00\xff",
        b"[]\n",
        b'{"time": "2026-01-01T00:00:00.000+00:00", "request_id": "x", "status": 200, "outcome": "ok"}\n',
    ],
    ids=["a text", "a binary", "other JSON", "an access log"],
)
async def test_a_file_that_is_no_breakdown_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    shown = await call("explain", "x", "--file", path)
    assert (shown.exit_code, "is no breakdown: its first line is no row" in " ".join(shown.output.split())) == (2, True)
    assert "breakdown.jsonl_path" in shown.output


@pytest.mark.parametrize("content", [b"", b'{"row": 1, "proxy_st'], ids=["empty", "a row cut off"])
async def test_a_breakdown_without_a_whole_row_is_searched(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    shown = await call("explain", "x", "--file", path)
    assert (shown.exit_code, f"x: not in {path}" in shown.output) == (1, True)
