"""SIGHUP to a proxy process."""

from __future__ import annotations

import signal
from pathlib import Path

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
