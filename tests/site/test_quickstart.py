"""The commands of the quick start work, in their order, and print what the page shows."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.fleet import free_port

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"(<!-- not run: [^>]+ -->\n)?```console\n(.*?)```", re.DOTALL)


def blocks() -> list[str]:
    """Blocks of commands that can run on any machine."""
    found = BLOCK.findall(PAGE)
    assert len(found) == PAGE.count("```console")
    return [text for skipped, text in found if not skipped]


def commands() -> list[str]:
    return [line[2:] for text in blocks() for line in text.splitlines() if line.startswith("$ ")]


def shown() -> list[str]:
    """Output that the page shows."""
    return [line for text in blocks() for line in text.splitlines() if not line.startswith("$ ")]


def two_ports() -> int:
    """First of two free ports in a row."""
    while True:
        first = free_port()
        try:
            with socket.create_server(("127.0.0.1", first)), socket.create_server(("127.0.0.1", first + 1)):
                pass
        except OSError:
            continue
        return first


@pytest.mark.fleet
@pytest.mark.timeout(240)
def test_the_commands_work_and_print_what_the_page_shows(tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed on this machine")
    lines, output = commands(), shown()
    assert lines[0] == "warmroute up sim-4x --detach"
    assert lines[-1] == "warmroute down"
    assert len(lines) > 12
    assert len(output) > 2
    port = free_port()
    # Two engines do for the test, and start faster.
    lines[0] += f" --set proxy.port={port} --set count=2 --set base_port={two_ports()}"
    program = tmp_path / "bin" / "warmroute"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m warmroute "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    stop = "trap 'test $? = 0 || warmroute down > /dev/null 2>&1' EXIT"
    script = "\n".join(["set -e", stop, *(line.replace("127.0.0.1:9090", f"127.0.0.1:{port}") for line in lines)])
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    printed = [line.strip() for line in done.stdout.splitlines()]
    assert [line for line in output if line not in printed] == [], done.stdout
    for name in ("why.json", "row.json", "run.jsonl", "report.html"):
        assert (tmp_path / name).stat().st_size > 500, name
