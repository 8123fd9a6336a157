"""`warmroute up --on ray` until it is ended: messages, and the exit status."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from launch.fleet.file import FleetFile
from launch.freshness.proof import FRESH_FILE, StaleEngineError
from launch.on_ray.fleet import RayFleet
from launch.run.messages import Messages
from launch.run.processes import StartError


async def hold(
    address: str | None,
    fleet: FleetFile,
    directory: Path,
    source: Path,
    with_proxy: bool,
    require_fresh: bool,
    hurry: asyncio.Event,
) -> int:
    """Run the fleet until it fails or this task is cancelled; the exit status.

    Args:
        address: of the Ray cluster; None: see `launch.on_ray.cluster`.
        fleet: the fleet to run.
        directory: run directory.
        source: the fleet's file.
        with_proxy: False starts the engines only.
        require_fresh: stop unless every engine proves fresh.
        hurry: once set, the stop does not wait for requests in progress.
    """
    messages = Messages()
    (directory / FRESH_FILE).unlink(missing_ok=True)
    runner = RayFleet(
        fleet, directory, source=source, address=address, with_proxy=with_proxy, notify=messages.notify, hurry=hurry
    )
    try:
        async with runner:
            if require_fresh:
                await runner.prove_fresh()
            for each in runner.placed.values():
                if each.report is not None:
                    where = f"{each.report.node_ip}, node {each.report.node_id[:8]}"
                    messages.show(f"{each.name}: {each.status} on {where}")
            if runner.state.proxy_url:
                messages.show(f"ready: {runner.state.proxy_url}/v1 (Ctrl-C stops everything)")
            reason = await runner.wait()
            sys.stderr.write(f"error: {reason}; stopping the fleet\n")
            return 1
    except (StartError, StaleEngineError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    finally:
        if runner.state.processes:
            messages.show(f"stopped; logs in {directory}")
