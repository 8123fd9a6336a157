"""What the proxy knows of each engine at run time, and when it counts as healthy."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from policies.types import Role
from proxy.errors import AttemptFailedError
from proxy.fleet.breaker import Breaker, BreakerState
from proxy.settings import HealthSettings, InstanceSettings

log = logging.getLogger("warmroute.health")


class Source(StrEnum):
    """Who put an instance into the fleet."""

    FILE = "file"
    """The settings the proxy was started with or has reloaded."""
    API = "api"
    """``POST /instances``; it stays until it is removed, whatever is reloaded."""


@dataclass(slots=True, eq=False)
class Instance:
    """One engine: where it is, who it is, how it is."""

    settings: InstanceSettings
    source: Source = Source.FILE
    draining: bool = False
    """It gets no new requests; those it has go on."""
    breaker: Breaker = field(init=False)
    """What its requests say of it; made when it is taken into the fleet."""
    up: bool = False
    """What its probes say of it."""
    healthy: bool = False
    """Both agree that it may be sent requests, if only a few for trial."""
    good_probes_in_a_row: int = 0
    bad_probes_in_a_row: int = 0
    last_error: str | None = None
    engine_id: str | None = None
    started_unix_s: float | None = None
    models: list[dict[str, object]] = field(default_factory=list)
    block_tokens: int | None = None
    kv_capacity_tokens: int = 0
    kv_usage: float = 0.0
    running: int = 0
    waiting: int = 0
    restarts: int = 0
    recycle_wanted: str | None = None
    """Why the engine should be restarted; until then it gets no new requests, for a while at least."""
    recycle_wanted_at_s: float = 0.0

    @property
    def name(self) -> str:
        """Name in headers, metrics and records."""
        return self.settings.name

    @property
    def url(self) -> str:
        """Base URL."""
        return self.settings.url

    @property
    def failures_in_a_row(self) -> int:
        """Requests that failed since the last that did not."""
        return self.breaker.failures_in_a_row


RECYCLE_PATIENCE_S = 60.0


def _resting(instance: Instance) -> bool:
    if instance.recycle_wanted is None:
        return False
    return time.monotonic() - instance.recycle_wanted_at_s < RECYCLE_PATIENCE_S


class Instances:
    """The fleet by name, with one rule for health: probes and requests each have their say.

    ``unhealthy_after`` failed probes in a row, or one whose connection is refused, take an instance out, and
    ``healthy_after`` good ones take it back. What requests meet goes to the instance's breaker (`proxy.fleet.breaker`); an
    answer of 4xx is a success of the engine.
    """

    def __init__(self, settings: tuple[InstanceSettings, ...], health: HealthSettings) -> None:
        self._health = health
        self._by_name: dict[str, Instance] = {}
        self.on_room: Callable[[], None] = _nobody_waits
        """Called whenever an instance may take requests that it could not take before."""
        for each in settings:
            self.add(Instance(each))

    def __iter__(self) -> Iterator[Instance]:
        return iter(tuple(self._by_name.values()))  # the fleet may change while somebody goes through it

    def __len__(self) -> int:
        return len(self._by_name)

    def __getitem__(self, name: str) -> Instance:
        return self._by_name[name]

    def get(self, name: str) -> Instance | None:
        """The instance of that name, if there is one."""
        return self._by_name.get(name)

    def chosen(self, name: str) -> Instance:
        """The instance a request was routed to. Raises AttemptFailedError if it has left in this very moment."""
        instance = self._by_name.get(name)
        if instance is None:
            raise AttemptFailedError(name, "left the fleet before it was asked", seen=False)
        return instance

    def knows(self, instance: Instance) -> bool:
        """Whether this very instance is in the fleet: neither removed, nor replaced by another of its name."""
        return self._by_name.get(instance.name) is instance

    def add(self, instance: Instance) -> None:
        """Take an instance in, or another one in place of the one that had its name."""
        instance.breaker = Breaker(self._health)
        self._by_name[instance.name] = instance

    def remove(self, name: str) -> None:
        """Forget an instance; unknown names are ignored."""
        self._by_name.pop(name, None)

    def apply(self, health: HealthSettings) -> None:
        """Take over other settings of health, breakers included."""
        self._health = health
        for instance in self:
            instance.breaker.apply(health)

    def set_draining(self, instance: Instance, draining: bool) -> None:
        """Give an instance no new requests, or give it some again."""
        instance.draining = draining
        if instance.healthy and not draining:
            self.on_room()

    def healthy(self) -> set[str]:
        """Names of the instances that may be sent requests; none that is draining.

        One that should be recycled rests for ``RECYCLE_PATIENCE_S``; if nobody restarts it, it serves on as it is.
        Where nothing else is left that may decode, it serves all the same.
        """
        healthy = {name for name, instance in self._by_name.items() if instance.healthy and not instance.draining}
        resting = [name for name in healthy if _resting(self._by_name[name])]
        if not resting:
            return healthy
        rested = healthy.difference(resting)
        can_answer = any(self._by_name[name].settings.role is not Role.KV_PRODUCER for name in rested)
        return rested if can_answer else healthy

    def candidates(self) -> set[str]:
        """Of ``healthy``, those that may be sent one more request now: an instance on trial takes only a few."""
        healthy = self.healthy()
        most = self._health.trial_requests
        busy = [name for name in healthy if self._by_name[name].breaker.trials >= most]
        return healthy.difference(busy) if busy else healthy

    def succeeded(self, which: Instance | str, sent_s: float | None = None, *, complete: bool = True) -> None:
        """A request sent at ``sent_s`` (monotonic; None: just now) is being answered, be it with 4xx.

        Where the answer is not ``complete`` yet, ``completed`` is to follow.
        """
        instance = self._current(which)
        if instance is None:
            return
        now_s = time.monotonic()
        if instance.breaker.succeeded(now_s, now_s if sent_s is None else sent_s):
            log.info("%s has passed its trial", instance.name)
            self._update(instance)
        if complete:
            instance.breaker.completed()

    def completed(self, which: Instance | str) -> None:
        """An answer that had begun has come to its end."""
        instance = self._current(which)
        if instance is not None:
            instance.breaker.completed()

    def failed(
        self,
        which: Instance | str,
        error: str,
        *,
        refused: bool = False,
        sent_s: float | None = None,
        answered: bool = False,
    ) -> None:
        """A request failed: no connection (``refused``), 5xx, no first byte in time, or its answer broke off.

        Args:
            which: the instance, or its name.
            error: what happened.
            refused: the connection was refused: there is no engine.
            sent_s: when the request was sent (monotonic); None: just now.
            answered: its answer had begun and was reported to ``succeeded``.
        """
        instance = self._current(which)
        if instance is None:
            return
        instance.last_error = error
        now_s = time.monotonic()
        sent_s = now_s if sent_s is None else sent_s
        if instance.breaker.failed(now_s, error, sent_s, refused=refused, answered=answered):
            instance.good_probes_in_a_row = 0
            self._update(instance)

    def probed(self, which: Instance | str) -> None:
        """A probe found the instance well."""
        instance = self._current(which)
        if instance is None:
            return
        instance.bad_probes_in_a_row = 0
        instance.good_probes_in_a_row += 1
        if instance.good_probes_in_a_row >= self._health.healthy_after:
            instance.up = True
            if instance.breaker.probed(time.monotonic()):
                log.info("%s is on trial", instance.name)
        if instance.up and instance.breaker.state is BreakerState.CLOSED and not instance.failures_in_a_row:
            instance.last_error = None
        self._update(instance)

    def probe_failed(self, which: Instance | str, error: str, *, refused: bool = False) -> None:
        """A probe found the instance unwell, or (``refused``) not there."""
        instance = self._current(which)
        if instance is None:
            return
        instance.last_error = error
        instance.good_probes_in_a_row = 0
        instance.bad_probes_in_a_row += 1
        if refused or instance.bad_probes_in_a_row >= self._health.unhealthy_after:
            instance.up = False
        self._update(instance)

    def restarted(self, which: Instance | str) -> None:
        """The engine is a new process: what the old one did is forgotten."""
        instance = self._current(which)
        if instance is not None:
            instance.breaker.restarted(time.monotonic())

    def _update(self, instance: Instance) -> None:
        was_healthy, state = instance.healthy, instance.breaker.state
        instance.healthy = instance.up and state is not BreakerState.OPEN
        if was_healthy != instance.healthy:
            if instance.healthy:
                log.info("%s is up", instance.name)
            else:
                log.warning("%s is down: %s", instance.name, instance.breaker.why or instance.last_error)
        if instance.healthy:
            self.on_room()

    def _current(self, which: Instance | str) -> Instance | None:
        """The instance that is meant, unless it has left; a name means whoever has it now."""
        if isinstance(which, str):
            return self._by_name.get(which)
        return which if self.knows(which) else None


def _nobody_waits() -> None:
    """Stands in until there is a queue."""
