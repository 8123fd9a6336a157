"""The dashboard's demonstration: a simulated fleet with endless traffic, until Ctrl-C."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from pathlib import Path
from urllib.parse import quote

import msgspec
from rich.console import Console
from rich.text import Text

from launch.demo.run import replay_options
from launch.demo.settings import DemoArmSettings, DemoSettings
from launch.fleet.file import FleetFile
from launch.run.supervisor import Fleet
from replayer.replay.replay import ReplayOptions, replay_trace
from replayer.traces.formats import bailian
from replayer.traces.loading import load
from replayer.traces.synth import SynthOptions, synthesise
from replayer.traces.trace import Trace

ENGINE_SPEED = 6.0
"""Engine seconds per wall second: slow enough to follow single requests."""
_STREAMS = 2
"""Traces replayed at once, so that the end of one is no pause."""
_REQUESTS = 150
"""Requests of one trace."""
_ARM = DemoArmSettings(policy="warm", planner="threshold")


async def run_live(settings: DemoSettings, run_dir: Path, base_port: int, console: Console) -> int:
    """Serve simulated engines and print the dashboard's address; returns 1 if the fleet ends by itself.

    Raises:
        StartError: the fleet did not start.
    """
    key = f"wr-{secrets.token_urlsafe(24)}"
    fleet = with_admin_key(settings, key).fleet_of(_ARM, base_port)
    console.print(f"starting {fleet.instances} simulated engines and the proxy …")
    async with Fleet(fleet, run_dir, source="demo") as running:
        address = f"{running.proxy_access.admin_url}/ui/#key={quote(key)}"
        console.print(Text(f"Dashboard: {address}"), soft_wrap=True)
        console.print("The part after # is the admin key of this run; the page removes it from the address.")
        console.print("Ctrl-C stops everything.")
        streams = [
            asyncio.create_task(_replay_forever(stream, settings, fleet, run_dir), name=f"traffic-{stream}")
            for stream in range(_STREAMS)
        ]
        ended = asyncio.create_task(running.wait(), name="fleet-wait")
        try:
            done, _ = await asyncio.wait([ended, *streams], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                console.print(Text(f"ended: {task.result()}"), style="red")
        finally:
            for task in (ended, *streams):
                task.cancel()
            await asyncio.gather(ended, *streams, return_exceptions=True)
    return 1


def with_admin_key(settings: DemoSettings, key: str) -> DemoSettings:
    """The settings with an admin key of the proxy, which draining needs."""
    proxy = dict(settings.fleet.get("proxy") or {})
    proxy["keys"] = {"admin": [{"name": "demo", "sha256": hashlib.sha256(key.encode()).hexdigest()}]}
    return settings.model_copy(update={"fleet": {**settings.fleet, "proxy": proxy}})


async def _replay_forever(stream: int, settings: DemoSettings, fleet: FleetFile, run_dir: Path) -> str:
    number = stream
    records, options = run_dir / f"traffic-{stream}.jsonl", replay_options(settings)
    while True:
        trace = await asyncio.to_thread(make_round, settings, number, run_dir / f"trace-{stream}.jsonl")
        records.unlink(missing_ok=True)  # those of the round before
        await replay_trace(trace, records, _of_round(options, fleet, number))
        number += _STREAMS


def _of_round(options: ReplayOptions, fleet: FleetFile, number: int) -> ReplayOptions:
    return msgspec.structs.replace(
        options, label=f"round-{number}", endpoint=fleet.proxy_url(), model=fleet.request_model, seed=number
    )


def make_round(settings: DemoSettings, number: int, path: Path) -> Trace:
    """Generate the trace of one round; no other round has its sessions."""
    chosen = settings.trace
    options = SynthOptions(
        requests=min(chosen.requests, _REQUESTS),
        seed=chosen.seed + number,
        rate_per_s=chosen.rate_per_s / _STREAMS,
        length_scale=chosen.length_scale,
        block_tokens=settings.fleet_of(_ARM).sim.block_size,
    )
    bailian.write(path, synthesise(options))
    trace = load(path)
    for request in trace.requests:
        request.session_id = f"round-{number}-{request.session_id}"
    return trace
