"""SIGHUP to a proxy process."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.proxy.fleet_client import reloads
from tests.proxy.serve_process import serve_process, until, write_settings
from tests.proxy.stub_engine import StubEngine


async def test_sighup_reloads_a_process_and_bad_settings_do_not_end_it(tmp_path: Path) -> None:
    engine = await StubEngine().start()
    path = tmp_path / "proxy.yaml"
    settings = {"instances": [{"name": "e", "url": engine.url}], "policy": {"name": "round_robin"}}
    flags = ("--policy", "least_loaded")
    async with serve_process(path, settings, *flags, WARMROUTE_GRACE_S="4") as served:
        write_settings(path, {**settings, "classes": {"medium_tokens": 7}, "grace_s": 99, "index": {"block_tokens": 8}})
        served.send(signal.SIGHUP)
        await served.logged(r"classes.medium_tokens: 5000 -> 7 \(applied\)")
        await served.logged(r"index.block_tokens: 16 -> 8 \(needs a restart\)")
        assert not [
            line for line in served.lines if "grace_s" in line or "policy" in line
        ]  # environment and flags still win
        path.write_text("classes: {medium_tokens: -", encoding="utf-8")
        served.send(signal.SIGHUP)
        await served.logged("the settings were not reloaded, nothing was changed")
        policy = (await served.client.get("/policy")).json()
        assert policy["name"] == "least_loaded"

        async def both_counted() -> bool:
            return reloads((await served.client.get("/metrics")).text) == {
                "applied": 1.0,
                "unchanged": 0.0,
                "refused": 1.0,
            }

        await until(both_counted)
        served.send(signal.SIGTERM)
        assert await served.ended() == 0
    await engine.stop()


HANGS_UP = """
import os, signal, sys
import proxy.settings

read = proxy.settings.load_settings


def load_settings(path, **flags):
    settings = read(path, **flags)
    if os.path.exists("changed.yaml"):
        os.replace("changed.yaml", path)
        os.kill(os.getpid(), signal.SIGHUP)
    return settings


proxy.settings.load_settings = load_settings
import typer
from proxy.cli import serve

typer.run(serve)
"""
"""The proxy; its settings change, and SIGHUP comes, just after it has read them."""


@pytest.mark.parametrize(
    ("workers", "reloaded"),
    [(1, r"classes.medium_tokens: 5000 -> 7 \(applied\)"), (2, "the workers read their settings again")],
    ids=["one", "workers"],
)
async def test_sighup_during_the_start_reloads_once_the_proxy_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, reloaded: str
) -> None:
    """As `systemctl reload` sends it soon after a restart."""
    engine = await StubEngine().start()
    settings = {"instances": [{"name": "e", "url": engine.url}], "workers": workers}
    monkeypatch.chdir(tmp_path)
    write_settings(tmp_path / "changed.yaml", {**settings, "classes": {"medium_tokens": 7}})
    root = str(Path(__file__).parents[3])
    async with serve_process(tmp_path / "proxy.yaml", settings, program=("-c", HANGS_UP), PYTHONPATH=root) as served:
        await served.logged(reloaded)
        assert (await served.client.get("/health")).status_code == 200
        # And later ones.
        before = len(served.lines)
        served.send(signal.SIGHUP)
        again = "0 differing" if workers == 1 else "the workers read their settings again"
        await until(lambda: _any(again, served.lines[before:]))
        served.send(signal.SIGTERM)
        assert await served.ended() == 0
    await engine.stop()


async def _any(text: str, lines: list[str]) -> bool:
    return any(text in line for line in lines)
