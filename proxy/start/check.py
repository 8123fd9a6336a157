"""``warmroute serve --check``: one probe of every engine, shown as a table."""

from __future__ import annotations

import asyncio
import os
from contextlib import aclosing
from typing import NamedTuple
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from policies.offload.never import Never
from proxy import logs
from proxy.core import Core
from proxy.discovery.source import DiscoveryError
from proxy.discovery.sources import source_of
from proxy.fleet.instances import Instance
from proxy.operations.health import HealthMonitor
from proxy.settings import LogSettings, Settings, TakenAddresses, roles_permit_hand_offs
from proxy.sharing.sharing import replicas_now
from proxy.sharing.store import StoreError
from proxy.start.environment import unknown_variables
from proxy.start.writable import check_writable

_EVENTS_S = 2.0
"""Bound on connecting to an engine's event socket, in seconds."""


class EngineCheck(NamedTuple):
    """Result of one engine's probe; texts are for people."""

    name: str
    url: str
    reachable: bool
    models: str
    block_tokens: str
    events: str
    remedies: tuple[str, ...]
    """Empty if the engine can be used as configured."""


def check_fleet(settings: Settings, console: Console | None = None) -> bool:
    """Probe every engine once and print a table; True if all can be used as configured.

    Raises:
        SettingsError: a file that the settings name cannot be used.
        TokenizerError: the tokenizer cannot be loaded.
    """
    logs.configure("error", settings.log_format)
    console = console or Console()
    check_writable(settings.logs.access, "logs.access")
    check_writable(settings.breakdown.jsonl_path, "breakdown.jsonl_path", makes_folders=True)
    settings, problems = asyncio.run(with_discovered(settings))
    found = asyncio.run(probed(settings))
    table = Table(title="Engines")
    for column in ("instance", "URL", "reachable", "models", "block size", "KV events"):
        table.add_column(column, overflow="fold")
    for row in found:
        table.add_row(row.name, row.url, "yes" if row.reachable else "no", row.models, row.block_tokens, row.events)
    console.print(table)
    for row in found:
        for remedy in row.remedies:
            console.print(f"{row.name}: {remedy}", markup=False, highlight=False, soft_wrap=True)
    for problem in problems:
        console.print(f"discovery: {problem}", markup=False, highlight=False, soft_wrap=True)
    for sentence in unknown_variables(os.environ, settings):
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)
    planner = settings.offload.planner
    if planner != Never.name and settings.instances and not roles_permit_hand_offs(settings.instances):
        remedy = "give the instances the role of their engines and a bootstrap_url"
        sentence = f"planner {planner} can offload nothing, as no instance's role permits a hand-off: {remedy}"
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)
    well = not problems and not any(row.remedies for row in found)
    console.print("every engine can be used" if well else "not every engine can be used", highlight=False)
    shares, sentence = asyncio.run(_shared_state(settings))
    if sentence:
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)
    return well and shares


async def _shared_state(settings: Settings) -> tuple[bool, str]:
    """True if the store of shared state can be used or none is configured, and a sentence about it."""
    if settings.sharing.url is None:
        return True, ""
    try:
        names = await replicas_now(settings)
    except StoreError as error:
        return False, f"the store of shared state cannot be used (sharing.url): {error}"
    return True, f"the store of shared state can be used; replicas that run now: {', '.join(names) or 'none'}"


async def with_discovered(settings: Settings) -> tuple[Settings, list[str]]:
    """The settings with the instances that discovery finds now, and the problems of finding them.

    Raises:
        SettingsError: the source cannot be used on this machine.
    """
    source = source_of(settings.discovery)
    if source is None:
        return settings, []
    try:
        async with asyncio.timeout(settings.discovery.start_s), aclosing(source.sets()) as sets:
            wanted = await anext(sets)
    except DiscoveryError as error:
        return settings, [f"{source.origin}: {error}"]
    except TimeoutError:
        return settings, [f"{source.origin}: no result within {settings.discovery.start_s:g} s (discovery.start_s)"]
    problems = list(wanted.problems)
    if not wanted.instances:
        problems.append(f"{source.origin} has no instance")
    taken = TakenAddresses(settings.instances)
    found = [each for each in wanted.instances if taken.holder(each) is None]
    return settings.model_copy(update={"instances": (*settings.instances, *found)}), problems


async def probed(settings: Settings) -> list[EngineCheck]:
    """Check of every engine, in the order of the settings. Opens no listener and writes no file."""
    silent = {"breakdown": settings.breakdown.model_copy(update={"jsonl_path": None}), "logs": LogSettings()}
    core = Core(settings.model_copy(update=silent))
    core.open()
    try:
        await HealthMonitor(core).probe_all()
        events = await asyncio.gather(*(_events(each) for each in core.instances))
        sizes = {each.block_tokens for each in core.instances if each.block_tokens is not None}
        return [_check(each, problem, sizes) for each, problem in zip(core.instances, events, strict=True)]
    finally:
        await core.close()


def _check(instance: Instance, events_problem: str | None, sizes: set[int]) -> EngineCheck:
    reachable = instance.good_probes_in_a_row > 0
    remedies = [each for each in (instance.diagnosis, instance.list_refused, events_problem) if each is not None]
    if not reachable and instance.diagnosis is None:
        remedies.append("the probe gave no result because this machine lacks CPU or sockets: run the check again")
    if reachable and instance.ranks_problem is not None:
        remedies.append(f"{instance.ranks_problem}: set data_parallel_size of the instance to that")
    if reachable and len(sizes) > 1:
        shown = ", ".join(map(str, sorted(sizes)))
        remedies.append(f"block sizes differ within the fleet ({shown}): start all engines with the same --block-size")
    names = "–" if instance.models is None else ", ".join(sorted(instance.models.names)) or "none"
    configured = instance.settings.events_url is not None
    events = "off" if not configured else "unreachable" if events_problem else "reachable"
    size = "–" if instance.block_tokens is None else str(instance.block_tokens)
    return EngineCheck(instance.name, instance.url, reachable, names, size, events, tuple(remedies))


async def _events(instance: Instance) -> str | None:
    """Connect to the sockets of an engine's KV events; returns the problem, or None."""
    for key, url in (
        ("events_url", instance.settings.events_url),
        ("events_replay_url", instance.settings.events_replay_url),
    ):
        if url is not None and not await _accepts(url):
            return (
                f"{key} {url} accepts no connection: start the engine with --kv-events-config that has this endpoint, "
                f"or remove {key}"
            )
    return None


async def _accepts(url: str) -> bool:
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(_EVENTS_S):
            if parts.scheme == "ipc":
                _, writer = await asyncio.open_unix_connection(url.removeprefix("ipc://"))
            else:
                _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
