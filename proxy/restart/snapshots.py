"""Writes the snapshot from time to time and at the end, and restores it at the start, for engines that still run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TypeVar

from policies.costs.learned import LearnedCosts
from policies.predict.prefix_tree import PrefixRun
from proxy.core import Core
from proxy.fleet.instances import Instance
from proxy.restart.snapshot_file import (
    EnginePart,
    Header,
    Learned,
    Pins,
    Runs,
    SnapshotContents,
    SnapshotError,
    framed,
    read_snapshot,
    write_snapshot,
)

log = logging.getLogger("warmroute.snapshot")

_Item = TypeVar("_Item")

_RUNS_PER_TURN = 20
_PINS_PER_TURN = 200
_DISK_S = 20.0
"""Bound on waiting for the disk at the start and at the end."""
_RESERVED_BYTES = 4096
"""For header and names, out of ``snapshot.max_bytes``."""


class Snapshots:
    """Snapshots of one core's shadow index, session table and learned times; does nothing without ``snapshot.path``.

    ``restore`` precedes the first request, ``open`` starts the task that writes, ``close`` writes the last one.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._settings = core.settings.snapshot
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def restore(self) -> None:
        """Restore what the file has of engines that run since before it was written. Never fails."""
        path = self._settings.path
        if path is None:
            return
        try:
            async with asyncio.timeout(_DISK_S):
                contents = await asyncio.to_thread(read_snapshot, path, self._settings.max_bytes)
            self._restore(contents)
        except FileNotFoundError:
            log.info("no snapshot at %s: the index starts empty", path)
        except TimeoutError:
            log.warning("the snapshot %s was not read within %g s: the index starts empty", path, _DISK_S)
        except (SnapshotError, OSError) as error:
            log.warning("the snapshot %s is ignored, the index starts empty: %s", path, error)

    def open(self) -> None:
        """Start writing every ``snapshot.interval_s``."""
        if self._settings.path is not None:
            self._task = asyncio.create_task(self._run(self._settings.path), name="snapshots")

    async def close(self) -> None:
        """Write the last snapshot."""
        if self._task is None:
            return
        self._stop.set()
        try:
            async with asyncio.timeout(_DISK_S):
                await self._task
        except TimeoutError:
            log.warning("the last snapshot was not written within %g s", _DISK_S)

    async def _run(self, path: Path) -> None:
        last = False
        while not last:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.interval_s):
                    await self._stop.wait()
            last = self._stop.is_set()
            try:
                size = await asyncio.to_thread(write_snapshot, path, await self._copied())
            except OSError as error:
                log.warning("no snapshot was written to %s: %s", path, error)
            else:
                log.debug("snapshot of %d bytes written to %s", size, path)

    # Writing

    async def _copied(self) -> list[bytes]:
        """Framed records of the current state, copied in slices between which other tasks run."""
        core, router = self._core, self._core.router
        text_block_bytes = core.settings.index.text_block_bytes
        header = Header(time.time(), router.seed, router.block_tokens, text_block_bytes)
        fleet = [(instance, part) for instance in core.instances if (part := _part(instance)) is not None]
        share = max(0, self._settings.max_bytes - _RESERVED_BYTES * (len(fleet) + 1)) // (len(fleet) + 1)
        # Before the blocks: a request may be routed meanwhile, and a session pinned without its blocks would be sent to
        # an engine that is expected to have nothing of it.
        pins = await _copied(map(Pins, _batches(self._pins(), _PINS_PER_TURN)), share)
        learned = Learned(LearnedCosts.of(router.state.costs), dict(router.text_ratios.learned))
        records = [framed(header), framed(learned)]
        for instance, part in fleet:
            if not core.instances.contains(instance):
                continue
            runs = router.state.index.runs(instance.name)
            copied = await _copied(map(Runs, _batches(runs, _RUNS_PER_TURN)), share)
            # The engine may have restarted since its pins were copied, or left the fleet.
            if (
                _part(instance) == part
                and core.instances.contains(instance)
                and router.block_tokens == header.block_tokens
            ):
                records += [framed(part), *copied]
        return records + pins

    def _pins(self) -> Iterator[tuple[bytes, str, float]]:
        for session, instance, idle_s in self._core.router.state.sessions.pins(time.monotonic()):
            yield session.encode("utf-8", "surrogatepass"), instance, idle_s

    # Restoring

    def _restore(self, contents: SnapshotContents) -> None:
        core, router, header = self._core, self._core.router, contents.header
        age_s = time.time() - header.written_unix_s
        most_s = self._settings.max_age_s
        if not -most_s <= age_s <= most_s:  # the age of a file from the future is not known
            raise SnapshotError(f"it is {age_s:.0f} s old, the bound is {most_s:g} (snapshot.max_age_s)")
        if header.text_block_bytes != core.settings.index.text_block_bytes:
            raise SnapshotError("it has text blocks of another size (index.text_block_bytes)")
        if header.block_tokens != router.block_tokens:
            raise SnapshotError(f"it has blocks of {header.block_tokens} tokens, the engines {router.block_tokens}")
        kept: list[tuple[str, list[PrefixRun]]] = []
        dropped: list[str] = []
        for part, runs in contents.engines:
            instance = core.instances.get(part.name)
            if instance is not None and _part(instance) == part:
                kept.append((part.name, runs))
            else:
                dropped.append(part.name)
        if kept:
            router.set_seed(header.seed)
        try:
            for name, runs in kept:
                router.state.index.restore(name, runs)
            sessions = self._restore_pins(contents, {name for name, _ in kept}, max(0.0, age_s))
            if kept:
                self._restore_learned(contents.learned)
        except ValueError as error:
            for name, _ in kept:
                router.state.index.clear_instance(name)
                router.state.sessions.remove_instance(name)
            raise SnapshotError(f"it is damaged: {error}") from error
        log.info(
            "snapshot restored, %.0f s old: %d blocks on %d instance(s), %d session(s); instances that restarted or "
            "cannot be verified: %s",
            age_s,
            sum(router.state.index.blocks(name) for name, _ in kept),
            len(kept),
            sessions,
            ", ".join(dropped) or "none",
        )

    def _restore_learned(self, learned: Learned) -> None:
        """Raises ValueError for values that are not usable."""
        router = self._core.router
        router.text_ratios.start(learned.text_ratios)
        if not learned.costs.give(router.state.costs):
            log.info("the snapshot's times correct other constants (setting hardware): they are learned again")

    def _restore_pins(self, contents: SnapshotContents, names: set[str], age_s: float) -> int:
        sessions, now_s = self._core.router.state.sessions, time.monotonic()
        for session, instance, idle_s in reversed(contents.pins):
            if instance in names:
                pinned_s = now_s - age_s - max(0.0, idle_s)
                sessions.pin(session.decode("utf-8", "surrogatepass"), instance, pinned_s)
        return len(sessions)


def _part(instance: Instance) -> EnginePart | None:
    """Identity of an instance's engine; None if it reports neither its start nor an id, so that it has none."""
    if instance.started_unix_s is None and instance.engine_id is None:
        return None
    return EnginePart(instance.name, instance.url, instance.started_unix_s, instance.engine_id)


def _batches(items: Iterator[_Item], size: int) -> Iterator[list[_Item]]:
    """Lists of ``size`` items; Python 3.11 has no ``itertools.batched``."""
    while batch := list(islice(items, size)):
        yield batch


async def _copied(records: Iterable[Runs | Pins], most_bytes: int) -> list[bytes]:
    """Frame records until they exceed ``most_bytes``; other tasks run after each."""
    copied: list[bytes] = []
    size = 0
    for record in records:
        encoded = framed(record)
        size += len(encoded)
        if size > most_bytes:
            break
        copied.append(encoded)
        await asyncio.sleep(0)
    return copied
