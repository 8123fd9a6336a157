"""Reload of the settings while the proxy serves: read again, checked as a whole, compared, and applied.

Every component that holds settings has ``apply``; ``_apply`` calls each of them, and nothing else changes the
effective settings. All others read ``core.settings`` when needed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from prometheus_client import Counter

from proxy.core import Core
from proxy.fleet.instances import Instance, Source
from proxy.operations.fleet_changes import FleetChanges
from proxy.paths import OtherPaths
from proxy.settings import InstanceSettings, KeyLists, Settings, SettingsError
from proxy.settings.diff import Change, differences, effective_settings, instance_differences, key_differences, replaced

log = logging.getLogger("warmroute.reload")

_LISTED_KEYS = ("keys.client.", "keys.admin.")
"""Differences that are reported together with those of the keys' file."""


class Result(StrEnum):
    """Result of a reload."""

    APPLIED = "applied"
    UNCHANGED = "unchanged"
    REFUSED = "refused"
    """The new settings are invalid: nothing was changed."""


@dataclass(slots=True)
class ReloadReport:
    """Differences found by a reload, which were applied unless it was a dry run."""

    result: Result
    changes: list[Change] = field(default_factory=list)
    error: str | None = None
    dry_run: bool = False

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "result": self.result.value,
            "dry_run": self.dry_run,
            "changes": [change.as_dict() for change in self.changes],
            "needs_restart": [change.key for change in self.changes if not change.live],
            "error": self.error,
        }


class Reloader:
    """Reloads one core's settings, one reload at a time. Owns the reloads started by SIGHUP; ``close`` cancels them."""

    def __init__(self, core: Core, fleet: FleetChanges) -> None:
        self._core = core
        self._fleet = fleet
        self._lock = asyncio.Lock()
        self._begun: set[asyncio.Task[ReloadReport]] = set()
        self._counter = Counter(
            "warmroute_config_reloads",
            "Reloads of the settings, by result",
            ["result"],
            registry=core.metrics.registry,
        )
        for result in Result:
            self._counter.labels(result.value)
        self.load: Callable[[], Settings] | None = None
        """Reads the settings from their origin; raises SettingsError. None: they cannot be read again."""
        self.on_applied: Callable[[ReloadReport], None] = _ignore
        """Called after settings were applied."""

    def on_hangup(self, ended: Callable[[], None] | None = None) -> None:
        """Reload on SIGHUP; the result is logged, and ``ended`` is called at the end."""
        task = asyncio.create_task(self.reload(), name="reload")
        self._begun.add(task)
        task.add_done_callback(self._begun.discard)
        if ended is not None:
            task.add_done_callback(lambda _: ended())

    async def close(self) -> None:
        """Cancel reloads in progress."""
        for task in self._begun:
            task.cancel()
        await asyncio.gather(*self._begun, return_exceptions=True)

    async def reload(self, *, dry_run: bool = False) -> ReloadReport:
        """Read, check and compare the settings, and unless ``dry_run`` apply those that a running proxy can change.

        Does not raise for invalid settings: the report has the error, and nothing was changed.
        """
        async with self._lock:
            try:
                report = await self._reload(dry_run)
            except (SettingsError, ValueError) as error:
                log.error("the settings were not reloaded, nothing was changed: %s", error)
                report = ReloadReport(Result.REFUSED, error=str(error), dry_run=dry_run)
            if not dry_run:
                self._counter.labels(report.result.value).inc()
            return report

    async def _reload(self, dry_run: bool) -> ReloadReport:
        if self.load is None:
            raise SettingsError("this proxy was not started from settings that can be reloaded")
        core = self._core
        new = await asyncio.to_thread(self.load)
        keys = core.keys.read(new.keys)
        self._changes(new, keys)
        # Engines that answer now can receive requests as soon as they are in the fleet.
        known = {instance.url for instance in core.instances}
        unseen = [each for each in new.instances if each.url not in known]
        answers = await asyncio.gather(*(core.handoff.alive(Instance(each)) for each in unseen))
        well = {each.url for each, answer in zip(unseen, answers, strict=True) if answer}
        changes = self._changes(new, keys)  # the fleet may have changed meanwhile
        self._log_changes(changes, dry_run)
        if dry_run or not any(change.live for change in changes):
            if not dry_run:
                # The file of the certificate is not part of the settings.
                core.certificate.look()
            result = Result.APPLIED if any(change.live for change in changes) else Result.UNCHANGED
            return ReloadReport(result, changes, dry_run=dry_run)
        added = self._apply(effective_settings(core.settings, new), keys, changes, well)
        await asyncio.gather(*(self._fleet.probe(instance) for instance in added))
        report = ReloadReport(Result.APPLIED, changes)
        self.on_applied(report)
        return report

    def _changes(self, new: Settings, keys: KeyLists) -> list[Change]:
        """Differences from the effective settings. Raises SettingsError if instances of file and API conflict."""
        core = self._core
        wanted = {each.name: each for each in new.instances}
        for instance in core.instances:
            if instance.source is Source.FILE or instance.name in wanted or self._fleet.leaving(instance):
                continue
            same = [each.name for each in new.instances if each.url == instance.url]
            if same:
                how = "was added over HTTP" if instance.source is Source.API else "discovery has added"
                raise SettingsError(
                    f"instance {same[0]!r} has the URL of {instance.name!r}, which {how}: remove one of them"
                )
        running = {each.name: each.settings for each in core.instances if self._the_files(each, wanted)}
        adopted = [
            Change(f"instances.{name}.source", core.instances[name].source.value, Source.FILE.value)
            for name in running
            if core.instances[name].source is not Source.FILE
        ]
        of_settings = [each for each in differences(core.settings, new) if not each.key.startswith(_LISTED_KEYS)]
        of_keys = key_differences(core.keys.lists, keys)
        return of_settings + of_keys + instance_differences(running, wanted) + adopted

    def _the_files(self, instance: Instance, wanted: dict[str, InstanceSettings]) -> bool:
        """True if the file controls this instance of the fleet: it listed it before, or does now."""
        if self._fleet.leaving(instance):
            return False
        return instance.source is Source.FILE or instance.name in wanted

    def _apply(self, settings: Settings, keys: KeyLists, changes: list[Change], well: set[str]) -> list[Instance]:
        """Apply the settings in one synchronous step. Returns the engines that are new in the fleet."""
        core, offload, limits = self._core, settings.offload, settings.limits
        core.keys.apply(keys)
        core.certificate.look()
        core.settings = settings
        core.tenants.apply(settings.fairness)
        core.access.apply(settings)
        core.forwarding.apply(settings)
        core.router.apply(settings)
        self._switch(settings, changes)
        core.instances.apply(settings.health)
        core.admission.apply(limits)
        core.holding.apply(settings.admission)
        core.clients.apply(settings)
        core.cors.apply(settings.cors)
        core.other_paths = OtherPaths(settings.pass_through.paths)
        core.retries.apply(limits)
        core.leaks.apply(offload.leak_share)
        core.stalls.apply(settings.health.stalled_after_s)
        core.abandoned.apply(offload.abandoned_s)
        core.handoff.apply(offload)
        core.upstream.connect_timeout_s = settings.timeouts.connect_s
        core.control.timeout_s = settings.health.timeout_s
        core.session_sources.apply(settings.sessions)
        core.prefix_chains.set_capacity(settings.sessions.prefix_bound)
        core.normalizer.apply(settings.normalize)
        core.cache_killers.apply(settings.cache_killers)
        for name in ("", "uvicorn", "uvicorn.error"):
            logging.getLogger(name).setLevel(settings.log_level.upper())
        return self._change_fleet(settings, well)

    def _switch(self, settings: Settings, changes: list[Change]) -> None:
        """Switch policy, planner, admission and shadows if the file's have changed: else a switch over HTTP is kept."""
        parts = replaced(change.key for change in changes)
        policy, planner, admission = settings.policy, settings.offload, settings.admission
        self._core.router.switch(
            policy.name if parts.policy else None,
            policy.params if parts.policy else {},
            planner.planner if parts.planner else None,
            planner.params if parts.planner else {},
        )
        if parts.rule or parts.bound:
            self._core.holding.switch(
                admission.name if parts.rule else None,
                admission.params if parts.rule else {},
                admission.max_hold_s if parts.bound else None,
            )
        if parts.shadow:
            self._core.shadows.switch(settings.shadow)

    def _change_fleet(self, settings: Settings, well: set[str]) -> list[Instance]:
        """Make the fleet match the file: change or add its instances, and remove those it no longer lists."""
        core, fleet = self._core, self._fleet
        wanted = {each.name for each in settings.instances}
        added = []
        for each in settings.instances:
            known = core.instances.get(each.name)
            if known is None:
                instance = fleet.insert(each, Source.FILE)
            elif known.settings != each or fleet.leaving(known):
                instance = fleet.swap(known, each, settings.grace_s, Source.FILE)
            else:
                instance = known
                instance.source = Source.FILE
            if instance is not known:
                added.append(instance)
                if each.url in well:
                    fleet.mark_healthy(instance)
        for instance in core.instances:
            if instance.source is Source.FILE and instance.name not in wanted and not fleet.leaving(instance):
                fleet.depart(instance, settings.grace_s)
        return added

    def _log_changes(self, changes: list[Change], dry_run: bool) -> None:
        what = "a reload would find" if dry_run else "settings reloaded:"
        log.info("%s %d differing key(s)", what, len(changes))
        for change in changes:
            level = logging.INFO if change.live or dry_run else logging.WARNING
            log.log(level, "%s", change.would_be() if dry_run else change)


def _ignore(_: ReloadReport) -> None:
    """Default of ``on_applied``."""
