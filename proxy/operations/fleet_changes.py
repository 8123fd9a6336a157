"""Changes of the fleet while the proxy serves: adding, removing, replacing and draining instances.

Every change is one synchronous step: between two turns of the event loop the table of instances, the router's state,
the event subscriptions and the leak watch agree on the fleet's members. Slow work comes before (a first probe of a new
engine) or after (draining the requests of a leaving one).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from proxy.core import Core
from proxy.fleet.instances import Instance, Source
from proxy.operations.health import HealthMonitor
from proxy.settings import InstanceSettings, TakenAddresses

log = logging.getLogger("warmroute.fleet")

_LOOK_S = 0.05
"""Polling interval for the remaining work of a leaving instance."""
_UNWIND_S = 5.0
"""Bound on how long cancelled requests take to end."""


class FleetChangeError(Exception):
    """A rejected change; nothing was changed."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class NoSuchInstanceError(FleetChangeError):
    """No instance has that name."""


@dataclass(slots=True, eq=False)
class Departure:
    """An engine that is being removed."""

    instance: Instance
    deadline_s: float
    """Time at which its remaining requests are cut, on the event loop's clock."""
    legs: Callable[[], int]
    """Returns the number of its unfinished legs."""
    held: Callable[[], int]
    """Returns the tokens of KV still to be pulled from it."""
    replaced: bool
    """Another engine has taken its name: it is no longer in the table of instances."""
    cut_legs: int = 0
    """Number of legs that were cut at the deadline."""
    task: asyncio.Task[None] | None = None


class FleetChanges:
    """Adds, removes, replaces and drains instances. Owns the departures; ``close`` ends them."""

    def __init__(self, core: Core, monitor: HealthMonitor) -> None:
        self._core = core
        self._monitor = monitor
        self._departures: dict[Instance, Departure] = {}

    @property
    def departures(self) -> tuple[Departure, ...]:
        """Engines that are being removed, oldest first."""
        return tuple(self._departures.values())

    def leaving(self, instance: Instance) -> bool:
        """True if the instance is being removed."""
        return instance in self._departures

    # Slow operations

    async def add(self, settings: InstanceSettings, source: Source = Source.API) -> tuple[Instance, ...]:
        """Add an instance, or all ranks of one, and probe it; it receives requests after its first successful probe.

        Raises:
            FleetChangeError: name or URL are in use.
        """
        ranks = settings.ranks()
        for each in ranks:
            self.check_free(each)
        added = tuple(self.insert(each, source) for each in ranks)
        await self.probe(added[0])
        return added

    async def replace(self, name: str, settings: InstanceSettings, grace_s: float, *, force: bool = False) -> Instance:
        """Change an instance's settings. With another URL, a new engine takes over its name and the old one drains.

        Args:
            name: of a known instance, and of ``settings``; the ranks of an engine are not replaced.
            settings: complete settings, not only the changed ones.
            grace_s: seconds the requests of a replaced engine have to finish.
            force: replace even if the new engine does not answer.

        Raises:
            FleetChangeError: no such instance, it is leaving, it is a rank and the settings are not, the URL is in use,
                or the new engine does not answer.
        """
        old = self._staying(name)
        if len(settings.ranks()) > 1:
            raise _has_ranks(name)
        if old.rank not in {None, settings.data_parallel_rank}:
            raise FleetChangeError("instance_has_ranks", f"{name} is a data-parallel rank: give data_parallel_rank too")
        self.check_free(settings, but=name)
        another = settings.url != old.url
        answers = another and await self._core.handoff.alive(Instance(settings))
        if another and not answers and not force:
            raise FleetChangeError(
                "instance_unhealthy",
                f"{settings.url}/health does not answer 200, so {name} was not changed: check it, or set force=true",
            )
        if self._staying(name) is not old:
            raise FleetChangeError("instance_changed", f"{name} was changed by another call meanwhile: try again")
        self.check_free(settings, but=name)
        new = self.swap(old, settings, grace_s, old.source)
        if answers:
            self.mark_healthy(new)
        await self.probe(new)
        return new

    async def remove(self, name: str, grace_s: float) -> tuple[Departure, ...]:
        """Drain an instance, or all ranks of an engine, and remove it.

        It is removed once it is idle or after ``grace_s`` seconds, when its remaining requests are cut. The removal
        continues if the caller is cancelled. Removing it again while it drains waits for the same end, with the earlier
        deadline.

        Raises:
            NoSuchInstanceError: no instance has that name.
        """
        departures = tuple(self.depart(each, grace_s) for each in self.of_engine(name))
        await asyncio.shield(asyncio.gather(*(each.task for each in departures if each.task is not None)))
        return departures

    async def probe(self, instance: Instance) -> None:
        """Probe an instance now instead of in the next round."""
        await self._monitor.probe(instance)

    # Synchronous operations

    def of_engine(self, name: str) -> tuple[Instance, ...]:
        """The instance of that name, or the ranks of that engine. Raises NoSuchInstanceError if there is neither."""
        found = self._core.instances.of_engine(name)
        if not found:
            raise NoSuchInstanceError("no_such_instance", f"there is no instance {name!r}; see GET /instances")
        return found

    def drain(self, name: str) -> tuple[Instance, ...]:
        """Stop sending new requests to an instance, or to all ranks of an engine. Idempotent.

        Raises:
            NoSuchInstanceError: neither has that name.
        """
        ranks = self.of_engine(name)
        for instance in ranks:
            if not instance.draining:
                instance.draining = True
                log.info("%s is draining", instance.name)
            self._share_mark(instance.name, draining=True)
        return ranks

    def undrain(self, name: str) -> tuple[Instance, ...]:
        """Resume sending requests to an instance, or to all ranks of an engine. Idempotent.

        Raises:
            FleetChangeError: neither has that name, or it is leaving.
        """
        ranks = tuple(self._staying(each.name) for each in self.of_engine(name))
        for instance in ranks:
            if instance.draining:
                self._core.instances.set_draining(instance, False)
                log.info("%s is no longer draining", instance.name)
            self._share_mark(instance.name, draining=False)
        return ranks

    def drain_elsewhere(self, name: str, draining: bool) -> None:
        """An operator drains an instance on another replica, or no longer: do the same. Unknown names are ignored."""
        instance = self._core.instances.get(name)
        if instance is None or self.leaving(instance) or instance.draining is draining:
            return
        self._core.instances.set_draining(instance, draining)
        log.info("%s is %s, as on another replica", name, "draining" if draining else "no longer draining")

    def check_free(self, settings: InstanceSettings, but: str | None = None) -> None:
        """Raise FleetChangeError if an instance other than ``but`` has the name or the URL."""
        found = TakenAddresses(each.settings for each in self._core.instances if each.name != but).holder(settings)
        if found is None:
            return
        key, other = found
        holder = self._core.instances.get(other.name)
        leaving = ", which is being removed" if holder is not None and self.leaving(holder) else ""
        if key == "name":
            raise FleetChangeError("instance_exists", f"instance {other.name!r} already exists{leaving}")
        raise FleetChangeError("url_in_use", f"{settings.url} is the URL of instance {other.name!r}{leaving}")

    def insert(self, settings: InstanceSettings, source: Source) -> Instance:
        """Register an instance under a free name. It receives no requests before a successful probe."""
        core = self._core
        instance = Instance(settings, source)
        instance.draining = self._drained(settings.name)
        core.router.register(settings)
        core.instances.add(instance)
        core.events.add(settings)
        log.info("%s (%s) was added", settings.name, settings.url)
        return instance

    def swap(self, old: Instance, settings: InstanceSettings, grace_s: float, source: Source) -> Instance:
        """Change an instance's settings in place, or replace the engine if the URL differs. Drained, it stays so."""
        core, name = self._core, old.name
        self._stay(old)
        if settings.url == old.url:
            self._alter(old, settings)
            old.source = source
            return old
        core.events.remove(name)
        held = core.router.state.holds.held_tokens_reader(name)
        legs = core.router.state.remove_instance(name)
        core.leaks.forget(name)
        core.stalls.restarted(name)
        core.meters.forget(name)
        new = self.insert(settings, source)
        new.draining = old.draining  # the mark is that of the name
        if new.draining:
            log.info("%s stays drained with its new engine, until it is undrained", name)
        old.draining = True
        self._start_departure(Departure(old, self._now_s() + grace_s, legs, held, replaced=True))
        return new

    def depart(self, instance: Instance, grace_s: float) -> Departure:
        """Start removing an instance; the departure's task ends with the removal."""
        known = self._departures.get(instance)
        if known is not None:
            known.deadline_s = min(known.deadline_s, self._now_s() + grace_s)
            return known
        state, name = self._core.router.state, instance.name
        instance.draining = True
        log.info("%s is being removed: its requests have %g s to finish", name, grace_s)
        departure = Departure(
            instance,
            self._now_s() + grace_s,
            lambda: state.ledger.requests(name),
            lambda: state.holds.held_tokens(name),
            replaced=False,
        )
        self._start_departure(departure)
        return departure

    def mark_healthy(self, instance: Instance) -> None:
        """Mark an engine whose ``/health`` has just answered as healthy, without further probes."""
        for _ in range(self._core.settings.health.healthy_after):
            self._core.instances.probed(instance)

    async def close(self) -> None:
        """Cancel removals in progress; the engines continue their work."""
        tasks = [departure.task for departure in self._departures.values() if departure.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Internals

    def _share_mark(self, name: str, *, draining: bool) -> None:
        if self._core.sharing is not None:
            self._core.sharing.mark(name, draining=draining)

    def _drained(self, name: str) -> bool:
        """True if a new instance of this name is to drain. The mark of a removed one ends on all replicas."""
        sharing = self._core.sharing
        if sharing is None:
            return False
        if sharing.drains.ended(name):
            sharing.mark(name, draining=False)
        return sharing.drains.draining(name)

    def _staying(self, name: str) -> Instance:
        instance = self.of_engine(name)[0]
        if instance.name != name:
            raise _has_ranks(name)
        if self.leaving(instance):
            raise FleetChangeError("instance_leaving", f"{name} is being removed: add it again afterwards")
        return instance

    def _stay(self, instance: Instance) -> None:
        """Cancel a removal. Like one that is complete, it has ended the drain mark, on all replicas."""
        departure = self._departures.pop(instance, None)
        if departure is not None and departure.task is not None:
            departure.task.cancel()
            instance.leaving = False
            self._core.instances.set_draining(instance, False)
            if self._core.sharing is not None and self._core.sharing.drains.draining(instance.name):
                self._share_mark(instance.name, draining=False)

    def _alter(self, instance: Instance, settings: InstanceSettings) -> None:
        """Apply other settings to the same engine; its cache and running requests are unaffected."""
        core, before = self._core, instance.settings
        if (before.events_url, before.events_replay_url) != (settings.events_url, settings.events_replay_url):
            core.events.remove(before.name)
            core.router.state.predictor.remove_instance(before.name)
            core.router.state.predictor.add_instance(before.name)
            core.events.add(settings)
        if before.bootstrap_url != settings.bootstrap_url:
            instance.engine_id = None
        core.router.register(settings)
        instance.settings = settings
        log.info("settings of %s changed", settings.name)

    def _start_departure(self, departure: Departure) -> None:
        departure.task = asyncio.create_task(self._run(departure), name=f"departure {departure.instance.name}")
        departure.instance.leaving = True
        self._departures[departure.instance] = departure

    async def _run(self, departure: Departure) -> None:
        instance, upstream = departure.instance, self._core.upstream
        try:
            await self._idle(departure)
            if not departure.replaced:
                departure.legs = self._forget(instance)
            departure.cut_legs = departure.legs()
            await self._cut(departure)
            if not self._shared(instance):
                upstream.forget(instance.url)
            if self._core.instances.get(instance.name) is None:
                self._core.metrics.forget(instance.name)
            log.info("%s (%s) was removed, %d request(s) were cut", instance.name, instance.url, departure.cut_legs)
        finally:
            self._departures.pop(instance, None)

    async def _idle(self, departure: Departure) -> None:
        """Wait until a departure has no work left or its deadline has passed, which may be moved closer meanwhile."""
        while self._busy(departure) or departure.held():
            left_s = departure.deadline_s - self._now_s()
            if left_s <= 0:
                return
            await asyncio.sleep(min(left_s, _LOOK_S))

    async def _cut(self, departure: Departure) -> None:
        """Cut the remaining legs; a leg without a connection is cut as soon as it has one."""
        instance, ends_s = departure.instance, self._now_s() + _UNWIND_S
        while self._busy(departure) and not self._shared(instance) and self._now_s() < ends_s:
            self._core.upstream.cut(instance.url, f"{instance.name} was removed from the fleet")
            await asyncio.sleep(_LOOK_S)

    def _busy(self, departure: Departure) -> bool:
        """True while it has unfinished legs, or abandoned pulls, which must not be cut early."""
        url = departure.instance.url
        return departure.legs() > 0 or (not self._shared(departure.instance) and self._core.upstream.in_use(url) > 0)

    def _shared(self, instance: Instance) -> bool:
        """True if the same engine is in the fleet under another name."""
        return any(other is not instance and other.url == instance.url for other in self._core.instances)

    def _forget(self, instance: Instance) -> Callable[[], int]:
        """Remove the instance from all tables; returns a function that counts its unfinished legs."""
        core, name = self._core, instance.name
        core.events.remove(name)
        legs = core.router.state.remove_instance(name)
        core.instances.remove(name)
        if core.sharing is not None:
            core.sharing.removed(name)
        core.leaks.forget(name)
        core.stalls.restarted(name)
        core.meters.forget(name)
        return legs

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


def _has_ranks(name: str) -> FleetChangeError:
    text = f"{name} has data-parallel ranks: change them in the settings file, or remove it and add it again"
    return FleetChangeError("instance_has_ranks", text)
