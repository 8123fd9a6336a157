"""The link between this replica and the others: one task that reports, listens, and reconnects."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

from policies.replicas.parts import part_of
from policies.replicas.shared_sessions import SharedSessions
from policies.session import RoutingSession
from proxy.access.keys import Keys
from proxy.fleet.instances import Instances
from proxy.settings import Settings, SettingsError, SharingSettings
from proxy.sharing.drains import DrainMarks
from proxy.sharing.others import Others, load_row
from proxy.sharing.own import OwnState
from proxy.sharing.store import ResponseTable, SharedStore, StoreError

log = logging.getLogger("warmroute.sharing")

_HEARTBEATS = 5
"""Full messages per ``ttl_s``: several may be lost before the replica is forgotten."""
_LEAST_BACKOFF_S = 0.1
_MOST_BACKOFF_S = 2.0


class Sharing:
    """Shares the state of one replica while ``run`` runs. Requests read local memory only; nothing here fails them."""

    def __init__(
        self,
        settings: Settings,
        routing: RoutingSession,
        instances: Instances,
        keys: Keys,
        responses: ResponseTable,
        make_store: Callable[[], SharedStore] | None = None,
    ) -> None:
        """Connect nothing yet.

        Args:
            settings: those of the proxy.
            routing: has the fleet's state and the held requests, and is given this replica's part of the fleet.
            instances: the fleet.
            keys: clients' keys and their limits.
            responses: engines of stored responses.
            make_store: makes a store for each connection; None: the one of the settings.

        Raises:
            SettingsError: the store's client is not installed.
        """
        self._settings: SharingSettings = settings.sharing
        self.replica = self._settings.replica or f"{socket.gethostname()}-{os.getpid()}"
        self.run_number = secrets.randbits(63)
        self._make_store = make_store or _store_maker(settings)
        shared = SharedSessions(settings.sessions.capacity)
        state, gate = routing.state, routing.gate
        state.share(shared, self.run_number)
        self._routing, self._state, self._instances = routing, state, instances
        self._divided: tuple[frozenset[str], frozenset[str]] | None = None
        """Replicas and instances that the fleet was last divided by."""
        self.drains = DrainMarks(self.replica)
        responses.share()
        identity = (self.replica, self.run_number)
        self._own = OwnState(*identity, state, shared, instances, keys, self.drains, gate, responses)
        self.others = Others(state, instances, keys, self.drains, responses, self.run_number, gate.elsewhere)
        self._caught_up = asyncio.Event()
        self._stirred = asyncio.Event()
        """Something may have changed that others are to know."""
        state.ledger.on_acquire = self._stirred.set
        self._full_due_s = 0.0
        self._sent_s: float | None = None
        self._twin_s = float("-inf")
        self._warned = False
        """The state that nothing is shared has been logged."""
        self._began_s = time.monotonic()
        self._ending = False
        """``run`` has been cancelled."""
        self.linked = False
        """True while state is exchanged."""
        self.since_unix_s = time.time()
        """Time since which ``linked`` has its value."""
        self.links = 0
        """Connections so far."""
        self.sent = 0
        self.received = 0
        self.delay_s = 0.0
        """Time that this replica's last heard message took through the store."""

    @property
    def starting(self) -> bool:
        """True while the first connection is still within ``sharing.start_s``."""
        return not self.links and time.monotonic() < self._began_s + self._settings.start_s

    @property
    def twin(self) -> bool:
        """True if another process has used this replica's name lately."""
        return time.monotonic() - self._twin_s < 10 * self._settings.ttl_s

    async def run(self) -> None:
        """Share until cancelled; then say farewell."""
        self._ending = False
        async with asyncio.TaskGroup() as group:
            group.create_task(self._expire(), name="sharing-expiry")
            group.create_task(self._link(), name="sharing-link")
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self._ending = True

    async def caught_up(self) -> None:
        """Wait until the shared state has been read once, at most ``sharing.start_s``; ``run`` runs."""
        try:
            async with asyncio.timeout(self._settings.start_s):
                await self._caught_up.wait()
        except TimeoutError:
            log.warning(
                "the shared state was not read within %g s (sharing.start_s): requests are served from what this "
                "replica knows",
                self._settings.start_s,
            )
        else:
            log.info("shared state read: replica %s, %d other(s)", self.replica, len(self.others))

    def mark(self, instance: str, *, draining: bool) -> None:
        """An operator drains an instance, or no longer: all replicas are to do the same."""
        self.drains.mark(instance, draining=draining, unix_s=time.time())
        self._stirred.set()

    def removed(self, instance: str) -> None:
        """Record that an instance has been removed here (`DrainMarks.removed`)."""
        self.drains.removed(instance, time.time())

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready: this replica, the others, and the link."""
        now_s = time.monotonic()
        accounts = self._state.ledger.accounts
        return {
            "replica": self.replica,
            "linked": self.linked,
            "since_unix_s": round(self.since_unix_s, 3),
            "links": self.links,
            "delay_ms": round(self.delay_s * 1e3, 2),
            "ttl_s": self._settings.ttl_s,
            "name_used_twice": self.twin,
            "part": len(self._routing.part) or None,
            "load": {name: load_row(account) for name, account in sorted(accounts.items())},
            "others": [other.as_dict(now_s) for other in self.others],
        }

    async def _expire(self) -> None:
        ttl_s = self._settings.ttl_s
        look_s = ttl_s / 10
        while True:
            await asyncio.sleep(look_s)
            self.others.expire(time.monotonic(), ttl_s - look_s)  # so that none is counted for longer than the TTL
            self._divide()

    def _divide(self) -> None:
        """Take this replica's part of the fleet, if replicas or instances have changed."""
        if not self._settings.parts:
            return
        divided = frozenset(each.replica for each in self.others), frozenset(self._instances.decoders())
        if divided != self._divided:
            self._divided = divided
            self._routing.part = part_of(self.replica, *divided)

    async def _link(self) -> None:
        """Connect, share until something fails, wait, and again."""
        backoff_s = _LEAST_BACKOFF_S
        while True:
            began_s = time.monotonic()
            try:
                await self._share()
            except* StoreError as errors:
                self._unlinked(str(errors.exceptions[0]))
            except* Exception as errors:
                log.exception("sharing failed", exc_info=errors)
                self._unlinked(repr(errors.exceptions[0]))
            if self._ending:  # a store that fails while this task is cancelled hides the cancellation
                return
            if time.monotonic() - began_s > self._settings.ttl_s:
                backoff_s = _LEAST_BACKOFF_S
            # Replicas that lost the store together must not all return at the same moment.
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(_MOST_BACKOFF_S, 2 * backoff_s)

    async def _share(self) -> None:
        store = self._make_store()
        try:
            await store.open()
            await self._read(store)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._report(store), name="sharing-report")
                group.create_task(self._listen(store), name="sharing-listen")
        except asyncio.CancelledError:
            if self.linked:
                with contextlib.suppress(StoreError):
                    await store.publish(self._own.farewell())
            raise
        finally:
            await store.close()

    async def _read(self, store: SharedStore) -> None:
        """Read what the others have left in the store."""
        for message, age_s in await store.replicas():
            if message.replica != self.replica:
                self.others.find(message, age_s, time.monotonic(), time.time())
        async for pins in store.pins():
            self.others.take_pins(pins, time.monotonic(), time.time())
            await asyncio.sleep(0)
        async for responses in store.responses():
            self.others.take_responses(responses, time.monotonic())
            await asyncio.sleep(0)
        self._caught_up.set()

    async def _report(self, store: SharedStore) -> None:
        settings, heartbeat_s = self._settings, self._settings.ttl_s / _HEARTBEATS
        self._own.begin()
        self._full_due_s, self._sent_s = float("-inf"), None
        while True:
            now_s = time.monotonic()
            # A replica that joins must find the marks, so they are kept in the store at once.
            full = now_s >= self._full_due_s or self.drains.changed
            message = self._own.message(now_s, time.time(), full=full)
            if message is not None:
                if full:
                    self._full_due_s = now_s + heartbeat_s
                    self._check_echo(now_s)
                await store.publish(message)
                self.sent += 1
                if not self.linked:  # not before: a store that is full is read, but takes nothing
                    self._linked()
            elif not full and not any(account.requests for account in self._state.ledger.accounts.values()):
                await self._stir(self._full_due_s - now_s)
            await asyncio.sleep(settings.publish_interval_s)

    async def _stir(self, within_s: float) -> None:
        """Wait, without load, until a request comes: a replica that looked all the time would cost CPU for nothing."""
        self._stirred.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._stirred.wait()

    async def _listen(self, store: SharedStore) -> None:
        while True:
            message = await store.received(self._settings.timeout_s)
            if message is None:
                continue
            self.received += 1
            if message.replica != self.replica:
                self.others.take(message, time.monotonic(), time.time())
            elif message.run == self.run_number:
                self._heard_itself(full=message.full)
            else:
                self._heard_twin()
            await asyncio.sleep(0)  # other tasks run between the messages of a burst

    def _check_echo(self, now_s: float) -> None:
        """Raise StoreError if the last full message has not come back for a TTL: the store takes, but does not pass."""
        if self._sent_s is not None and now_s - self._sent_s > self._settings.ttl_s:
            raise StoreError(f"messages have not come back for {self._settings.ttl_s:g} s")
        if self._sent_s is None:
            self._sent_s = now_s

    def _heard_itself(self, *, full: bool) -> None:
        if full and self._sent_s is not None:
            self.delay_s, self._sent_s = time.monotonic() - self._sent_s, None

    def _heard_twin(self) -> None:
        if not self.twin:
            log.error("another process shares state as replica %s: give each its own sharing.replica", self.replica)
        self._twin_s = time.monotonic()

    def _linked(self) -> None:
        self.linked, self.since_unix_s = True, time.time()
        self.links += 1
        log.info("state is shared as replica %s", self.replica)

    def _unlinked(self, why: str) -> None:
        if self.linked or not self._warned:
            log.warning("state is not shared, each replica routes from what it knows; connecting again: %s", why)
            self._warned = True
        else:
            log.debug("state is not shared: %s", why)
        if self.linked:
            self.linked, self.since_unix_s = False, time.time()


async def replicas_now(settings: Settings) -> list[str]:
    """Names of the replicas that share state now. Raises StoreError if the store cannot be used, SettingsError."""
    store = _store_maker(settings)()
    try:
        await store.open()
        return [message.replica for message, _ in await store.replicas()]
    finally:
        await store.close()


def _store_maker(settings: Settings) -> Callable[[], SharedStore]:
    try:
        from proxy.sharing.redis_store import RedisStore
    except ImportError as error:
        raise SettingsError(
            "sharing.url needs the Redis client, which is not installed: pip install 'warmroute[redis]'"
        ) from error
    return lambda: RedisStore(settings.sharing, settings.sessions.ttl_s)
