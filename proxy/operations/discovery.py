"""Keeps the fleet at the set of instances that a source of discovery wants."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress

from proxy.core import Core
from proxy.discovery.source import DiscoveryError, InstanceSource, Wanted, next_pause
from proxy.discovery.sources import source_of
from proxy.discovery.status import Reading
from proxy.fleet.instances import Instance, Source
from proxy.operations.fleet_changes import FleetChanges
from proxy.settings import TakenAddresses

log = logging.getLogger("warmroute.discovery")

_FIRST_PAUSE_S = 0.5


class Discovery:
    """Applies the sets of one source, while ``running``; the owner of its task and of the probes of new instances.

    Instances of the settings file and of ``POST /instances`` are never changed: where the source wants one of their
    names or URLs, that entry is left out and reported. A source that fails, or has nothing, leaves the fleet as it is.
    The last set is applied again every ``discovery.interval_s``, so an instance removed over HTTP returns.

    Raises:
        SettingsError: the source cannot be used on this machine.
    """

    def __init__(self, core: Core, fleet: FleetChanges) -> None:
        self._core = core
        self._fleet = fleet
        self._source: InstanceSource | None = source_of(core.settings.discovery)
        self._wanted = Wanted()
        self._first = asyncio.Event()
        self._probes: asyncio.TaskGroup | None = None
        if self._source is not None:
            core.discovery.origin = self._source.origin

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Follow the source in the background; entered once the first set is applied, or after ``start_s``."""
        if self._source is None:
            yield
            return
        task = asyncio.create_task(self._run(self._source), name="discovery")
        try:
            start_s = self._core.settings.discovery.start_s
            try:
                async with asyncio.timeout(start_s):
                    await self._first.wait()
            except TimeoutError:
                log.warning("%s had no result within %g s: serving without it", self._source.origin, start_s)
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _run(self, source: InstanceSource) -> None:
        async with asyncio.TaskGroup() as self._probes:
            self._probes.create_task(self._keep(), name="discovery repeat")
            pause_s, longest_s = 0.0, self._core.settings.discovery.backoff_max_s
            now_s = asyncio.get_running_loop().time
            while True:
                began_s, had_set = now_s(), False
                try:
                    async with aclosing(source.sets()) as sets:
                        async for wanted in sets:
                            had_set = True
                            self._take(wanted)
                except DiscoveryError as error:
                    self._failed(str(error))
                except Exception as error:
                    # A fault in a source must not end discovery, nor the proxy.
                    log.exception("%s: unexpected error", source.origin)
                    self._failed(f"{type(error).__name__}: {error}")
                # One set and then a failure is none the better for the set: a watch may be refused where a list is not.
                steady = had_set and now_s() - began_s > pause_s
                pause_s = next_pause(pause_s, _FIRST_PAUSE_S, longest_s, steady=steady)
                # Proxies that lost the same server at the same time return at different times.
                await asyncio.sleep(pause_s * random.uniform(0.75, 1.25))

    async def _keep(self) -> None:
        """Apply the last set again from time to time."""
        while True:
            await asyncio.sleep(self._core.settings.discovery.interval_s)
            try:
                self._apply()
            except Exception as error:
                log.exception("the last set could not be applied again")
                self._failed(f"{type(error).__name__}: {error}")

    def _take(self, wanted: Wanted) -> None:
        """Apply a set that the source has just yielded."""
        status = self._core.discovery
        if status.failures_in_a_row:
            log.info("%s answers again", status.origin)
        if not wanted.instances and not self._core.settings.discovery.accept_empty:
            if status.last is not Reading.EMPTY:
                log.warning("%s has no instance: the last %d are kept", status.origin, len(self._wanted.instances))
            # The reasons are those of this reading: it may be empty because every entry was left out.
            self._wanted = self._wanted._replace(problems=wanted.problems)
            status.read(Reading.EMPTY)
            self._apply()
        else:
            self._wanted = wanted
            status.read(Reading.APPLIED if self._apply() else Reading.UNCHANGED)
        self._first.set()

    def _failed(self, error: str) -> None:
        status = self._core.discovery
        if status.last_error != error:
            log.warning("%s: %s; the last %d instances are kept", status.origin, error, len(self._wanted.instances))
        status.failed(error)

    def _apply(self) -> bool:
        """Make the fleet match the last set, in one synchronous step. Returns true if it was changed."""
        core, fleet = self._core, self._fleet
        if core.ends_s is not None:  # nothing new is accepted
            return False
        grace_s = core.settings.discovery.grace_s or core.settings.grace_s
        names = {each.name for each in self._wanted.instances}
        changed, problems = False, list(self._wanted.problems)
        for instance in core.instances:
            if instance.source is Source.DISCOVERY and instance.name not in names and not fleet.leaving(instance):
                fleet.depart(instance, grace_s)
                changed = True
        others = TakenAddresses(each.settings for each in core.instances if each.source is not Source.DISCOVERY)
        for wanted in self._wanted.instances:
            known, found = core.instances.get(wanted.name), others.holder(wanted)
            if found is not None:
                holder = core.instances[found[1].name]
                if not fleet.leaving(holder):
                    problems.append(f"{wanted.name} ({wanted.url}): {holder.name} ({holder.url}) has its name or URL")
            elif known is None:
                self._probe(fleet.insert(wanted, Source.DISCOVERY))
                changed = True
            elif known.settings != wanted or fleet.leaving(known):
                self._probe(fleet.swap(known, wanted, grace_s, Source.DISCOVERY))
                changed = True
        self._report(problems)
        core.discovery.instances = len(self._wanted.instances)
        return changed

    def _probe(self, instance: Instance) -> None:
        assert self._probes is not None
        self._probes.create_task(self._fleet.probe(instance), name=f"discovery probe {instance.name}")

    def _report(self, problems: list[str]) -> None:
        status = self._core.discovery
        for problem in problems:
            if problem not in status.problems:
                log.warning("%s: not in the fleet: %s", status.origin, problem)
        status.problems = tuple(problems)
