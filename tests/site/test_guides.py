"""The guides name metrics and settings that exist, and their commands for draining an engine work."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.proxy.conftest import StartProxy
from tests.proxy.fleet_client import KEY, admins
from tests.site.test_migrate import settings_keys, unknown

DOCS = Path(__file__).parents[2] / "docs"
GUIDES = ("index.md", "quickstart.md", "how-routing-decides.md", "operating.md", "deploy.md", "install.md")
METRICS = (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", GUIDES)
def test_metrics_and_settings_that_a_guide_names_exist(name: str) -> None:
    page = (DOCS / name).read_text(encoding="utf-8")
    assert [metric for metric in re.findall(r"`(warmroute_\w+)", page) if f"| `{metric}` |" not in METRICS] == []
    sections = {key.partition(".")[0] for key in settings_keys() if "." in key}
    spans = re.findall(r"`([a-z_]+(?:\[\])?\.[a-z_.\[\]]+)(?:: [^`]+)?`", page)
    ours = [
        span for span in spans if span.partition(".")[0] in sections and not span.endswith((".md", ".py", ".jsonl"))
    ]
    assert [span for span in ours if unknown(span)] == []


def test_the_operating_guide_names_metrics_and_settings() -> None:
    page = (DOCS / "operating.md").read_text(encoding="utf-8")
    assert len(set(re.findall(r"`(warmroute_\w+)", page))) > 5
    assert "`limits.buffered_bytes`" in page


async def test_the_commands_for_draining_an_engine_work(start_proxy: StartProxy) -> None:
    if shutil.which("curl") is None or shutil.which("jq") is None:
        pytest.skip("curl or jq is not installed on this machine")
    page = (DOCS / "operating.md").read_text(encoding="utf-8")
    function = re.search(r"^\$ (admin\(\) .*)$", page, re.MULTILINE)
    block = re.search(r"^## Draining an engine\n\n```console\n(.*?)```", page, re.MULTILINE | re.DOTALL)
    assert function is not None
    assert block is not None
    lines = [line.removeprefix("$ ") for line in block[1].splitlines()]
    assert len(lines) == 3
    running = await admins(start_proxy)(2)
    there = running.client.base_url.netloc.decode()
    script = "\n".join(["set -e", function[1], *lines]).replace("localhost:9090", there).replace("/e1", "/inst-1")
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", script),
        env=os.environ | {"KEY": KEY},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(60):
            output = (await process.communicate())[0].decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, output
    assert '"draining":true' in output
    row = (await running.client.get("/instances/inst-1")).json()
    assert row["draining"] is False
