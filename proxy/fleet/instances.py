"""Run-time state of each engine, and the rules for its health."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from policies.types import Role
from proxy.errors import AttemptFailedError
from proxy.fleet.breaker import Breaker, BreakerState
from proxy.fleet.models import ModelList, ServedModels
from proxy.fleet.reported import NOT_REPORTED, ReportedLoad
from proxy.settings import HealthSettings, InstanceSettings

log = logging.getLogger("warmroute.health")


class Source(StrEnum):
    """Origin of an instance."""

    FILE = "file"
    """The settings the proxy was started with or has reloaded."""
    API = "api"
    """``POST /instances``; it stays until it is removed, regardless of reloads."""
    DISCOVERY = "discovery"
    """The source of discovery, which removes it too."""


@dataclass(slots=True, eq=False)
class Instance:
    """One engine: settings, identity, health and load."""

    settings: InstanceSettings
    source: Source = Source.FILE
    draining: bool = False
    """Receives no new requests; running ones continue."""
    leaving: bool = False
    """It is being removed."""
    breaker: Breaker = field(init=False)
    """Circuit breaker over its requests; created when it is added to the fleet."""
    up: bool = False
    """Result of its probes."""
    healthy: bool = False
    """Probes and breaker permit sending requests, at least a few trial requests."""
    good_probes_in_a_row: int = 0
    bad_probes_in_a_row: int = 0
    last_error: str | None = None
    diagnosis: str | None = None
    """Cause and remedy of its last probe's failure; None after a good one. Without texts of answers to clients."""
    list_refused: str | None = None
    """Reason for which it does not list its models; None if it does, or has not been asked."""
    engine_id: str | None = None
    started_unix_s: float | None = None
    models: ModelList | None = None
    """Its models and adapters as it listed them last; None: it has never listed them, so it may serve any."""
    base_models: frozenset[str] = frozenset()
    """Its base models as it listed them last, also before a restart."""
    listed_s: float = float("-inf")
    """Time of ``models`` (monotonic)."""
    refreshed_s: float = float("-inf")
    """Time of the last reading of ``models`` outside of the probes (monotonic)."""
    block_tokens: int | None = None
    kv_capacity_tokens: int = 0
    reported: ReportedLoad = NOT_REPORTED
    restarts: int = 0
    looked_up_tokens: float | None = None
    """Prompt tokens that its engine has looked up in its cache, as reported last."""
    reported_ranks: int = 0
    """Data-parallel ranks that its engine reports metrics of; 0: not known."""
    recycle_wanted: str | None = None
    """Reason why the engine should be restarted; it receives no new requests for a limited time."""
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
    def rank(self) -> int | None:
        """Data-parallel rank within its engine; None: it is the whole engine."""
        return self.settings.data_parallel_rank

    @property
    def ranks_problem(self) -> str | None:
        """Difference between the data-parallel ranks that are configured and reported; None: none, or not known."""
        if self.reported_ranks in {0, self.settings.data_parallel_size}:
            return None
        configured = self.settings.data_parallel_size
        return f"data_parallel_size is {configured}, the engine has {self.reported_ranks} data-parallel rank(s)"

    @property
    def cards(self) -> tuple[dict[str, Any], ...]:
        """Cards of its models and adapters."""
        return () if self.models is None else self.models.cards

    @property
    def context_lengths(self) -> dict[str, int]:
        """Context length in tokens of each model that reports one."""
        return {} if self.models is None else self.models.lengths

    @property
    def failures_in_a_row(self) -> int:
        """Consecutive failed requests."""
        return self.breaker.failures_in_a_row


RECYCLE_PATIENCE_S = 60.0


def _resting(instance: Instance) -> bool:
    return time.monotonic() - instance.recycle_wanted_at_s < RECYCLE_PATIENCE_S


class Instances:
    """The fleet by name, with health from both probes and requests.

    ``unhealthy_after`` failed probes in a row, or one whose connection is refused, mark an instance as down, and
    ``healthy_after`` successful ones mark it as up. Request results go to the instance's breaker
    (`proxy.fleet.breaker`); an answer of 4xx is a success of the engine.
    """

    def __init__(self, settings: tuple[InstanceSettings, ...], health: HealthSettings) -> None:
        self._health = health
        self._by_name: dict[str, Instance] = {}
        self._served: ServedModels | None = None
        self.on_room: Callable[[], None] = _ignore_room
        """Called when an instance may accept requests that it could not accept before."""
        for each in settings:
            self.add(Instance(each))

    def __iter__(self) -> Iterator[Instance]:
        return iter(tuple(self._by_name.values()))  # a copy, since the fleet may change during the iteration

    def __len__(self) -> int:
        return len(self._by_name)

    def __getitem__(self, name: str) -> Instance:
        return self._by_name[name]

    def get(self, name: str) -> Instance | None:
        """The instance of that name, or None."""
        return self._by_name.get(name)

    def chosen(self, name: str) -> Instance:
        """The instance a request was routed to. Raises AttemptFailedError if it has just left the fleet."""
        instance = self._by_name.get(name)
        if instance is None:
            raise AttemptFailedError(name, "left the fleet before the request was sent", seen=False)
        return instance

    def ranks(self, instance: Instance) -> tuple[Instance, ...]:
        """All data-parallel ranks of an instance's engine, in order; itself alone if it is no rank.

        What concerns the process or its HTTP server concerns them all.
        """
        if instance.rank is None:
            return (instance,)
        found = [each for each in self._by_name.values() if each.url == instance.url and each.rank is not None]
        return tuple(sorted(found, key=lambda each: each.rank or 0)) or (instance,)

    def of_engine(self, name: str) -> tuple[Instance, ...]:
        """The instance of that name, or the ranks of the engine of that name; empty if there is neither."""
        instance = self._by_name.get(name)
        if instance is not None:
            return (instance,)
        return tuple(each for each in self._by_name.values() if each.settings.engine_name == name)

    def contains(self, instance: Instance) -> bool:
        """True if this very instance is in the fleet: neither removed, nor replaced by another of its name."""
        return self._by_name.get(instance.name) is instance

    def add(self, instance: Instance) -> None:
        """Add an instance, or replace the one of its name."""
        instance.breaker = Breaker(self._health)
        self._by_name[instance.name] = instance
        self._served = None

    def remove(self, name: str) -> None:
        """Remove an instance; unknown names are ignored."""
        self._by_name.pop(name, None)
        self._served = None

    def apply(self, health: HealthSettings) -> None:
        """Apply other health settings, to breakers as well."""
        self._health = health
        for instance in self:
            instance.breaker.apply(health)

    def set_draining(self, instance: Instance, draining: bool) -> None:
        """Start or stop draining an instance."""
        instance.draining = draining
        if instance.healthy and not draining:
            self.on_room()

    @property
    def served(self) -> ServedModels:
        """Models and adapters by instance."""
        if self._served is None:
            self._served = ServedModels({name: instance.models for name, instance in self._by_name.items()})
        return self._served

    def all_listed(self, within_s: float) -> bool:
        """True if every instance has listed its models within the last ``within_s`` seconds; False without any."""
        since_s = time.monotonic() - within_s
        return bool(self._by_name) and all(instance.listed_s >= since_s for instance in self._by_name.values())

    def listed(self, which: Instance | str, models: ModelList) -> None:
        """Record an engine's list of models."""
        instance = self._current(which)
        if instance is None:
            return
        before, instance.models, instance.listed_s = instance.models, models, time.monotonic()
        instance.base_models = models.base
        if before is None or before.offer != models.offer:
            self._served = None
            if instance.healthy:
                self.on_room()

    def lacks(self, which: Instance | str, model: str) -> None:
        """Record that an engine has answered that it does not serve a model. No effect if it lists no models."""
        instance = self._current(which)
        if instance is not None and instance.models is not None and model in instance.models.names:
            instance.models = instance.models.without(model)
            self._served = None

    def healthy(self, model: str | None = None, tokens: int = 0) -> set[str]:
        """Names of the instances that may be sent requests, for ``model`` if given, without draining ones.

        Those whose context is shorter than ``tokens`` are left out, unless no other one may answer.

        An instance that should be recycled gets no requests for ``RECYCLE_PATIENCE_S`` seconds; if it is not restarted
        by then, or if no other instance may decode, it continues to serve.
        """
        healthy = {name for name, instance in self._by_name.items() if instance.healthy and not instance.draining}
        if model is not None and (lacking := self.served.lacking(model, tokens)):
            long = healthy - lacking
            healthy = long if self._can_answer(long) or not tokens else healthy - self.served.lacking(model)
        recycled = {each.url for each in self._by_name.values() if each.recycle_wanted is not None and _resting(each)}
        if not recycled:
            return healthy
        resting = [name for name, each in self._by_name.items() if each.url in recycled]
        rested = healthy.difference(resting)
        return rested if self._can_answer(rested) else healthy

    def _can_answer(self, names: Set[str]) -> bool:
        return any(self._by_name[name].settings.role is not Role.KV_PRODUCER for name in names)

    def decoders(self) -> set[str]:
        """Names of the instances that may be sent requests to answer, whatever the model; to be recycled or not."""
        producer = Role.KV_PRODUCER
        return {
            name
            for name, instance in self._by_name.items()
            if instance.healthy and not instance.draining and instance.settings.role is not producer
        }

    def candidates(self, model: str | None = None, tokens: int = 0) -> set[str]:
        """The ``healthy`` instances that may be sent one more request now: an instance on trial accepts only a few."""
        healthy = self.healthy(model, tokens)
        most = self._health.trial_requests
        busy = [name for name, each in self._by_name.items() if each.breaker.trials >= most]
        return healthy.difference(busy) if busy else healthy

    def succeeded(self, which: Instance | str, sent_s: float | None = None, *, complete: bool = True) -> None:
        """Record the first byte of an answer, 4xx included, to a request sent at ``sent_s``.

        ``sent_s`` is monotonic; None: just now. Unless the answer is ``complete``, ``completed`` must follow.
        """
        instance = self._current(which)
        if instance is None:
            return
        now_s = time.monotonic()
        if instance.breaker.succeeded(now_s, now_s if sent_s is None else sent_s):
            log.info("%s passed its trial request and is up", instance.name)
            self._update(instance)
        if complete:
            instance.breaker.completed()

    def completed(self, which: Instance | str) -> None:
        """Record the end of an answer that had begun."""
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
        """Record a failed request of an instance, or of its name: no connection, 5xx, late, or a broken stream.

        Args:
            error: description of the failure.
            refused: the connection was refused, so there is no engine; counts for all ranks behind the URL.
            sent_s: when the request was sent (monotonic); None: just now.
            answered: its answer had begun and was reported to ``succeeded``.
        """
        if (instance := self._current(which)) is None:
            return
        now_s = time.monotonic()
        sent_s = now_s if sent_s is None else sent_s
        for each in self.ranks(instance) if refused else (instance,):
            each.last_error = error
            if each.breaker.failed(now_s, error, sent_s, refused=refused, answered=answered and each is instance):
                each.good_probes_in_a_row = 0
                self._update(each)

    def forgive(self, instance: Instance) -> None:
        """Take back a failure whose cause was the request (`Breaker.forgive`)."""
        if instance.breaker.forgive(time.monotonic()):
            self._update(instance)

    def request_restart(self, instance: Instance, reason: str) -> bool:
        """Mark an instance for a restart. False, and nothing is done, while any instance is marked.

        One at a time, so that a fault affecting all of them never empties the fleet.
        """
        if any(each.recycle_wanted is not None for each in self):
            return False
        instance.recycle_wanted, instance.recycle_wanted_at_s = reason, time.monotonic()
        return True

    def stopped(self, instance: Instance, why: str) -> None:
        """Record that an engine computes nothing although it answers: its breaker opens."""
        instance.last_error = why
        if instance.breaker.stop(time.monotonic(), why):
            self._update(instance)

    def probed(self, which: Instance | str) -> None:
        """Record a successful probe."""
        instance = self._current(which)
        if instance is None:
            return
        instance.diagnosis = None
        instance.bad_probes_in_a_row = 0
        instance.good_probes_in_a_row += 1
        if instance.good_probes_in_a_row >= self._health.healthy_after:
            instance.up = True
            instance.breaker.probed(time.monotonic())
        if instance.up and instance.breaker.state is BreakerState.CLOSED and not instance.failures_in_a_row:
            instance.last_error = None
        self._update(instance)

    def probe_failed(self, which: Instance | str, error: str, *, refused: bool = False) -> None:
        """Record a failed probe; ``refused``: the connection was refused."""
        instance = self._current(which)
        if instance is None:
            return
        instance.last_error, instance.diagnosis = error, error.removeprefix("probe: ")
        instance.good_probes_in_a_row = 0
        instance.bad_probes_in_a_row += 1
        if refused or instance.bad_probes_in_a_row >= self._health.unhealthy_after:
            instance.up, instance.reported = False, NOT_REPORTED
        self._update(instance)

    def restarted(self, which: Instance | str) -> None:
        """Record that the engine is a new process: its breaker is reset; it serves nothing until it lists models."""
        instance = self._current(which)
        if instance is None:
            return
        instance.breaker.restarted(time.monotonic())
        if instance.models is not None:
            instance.models, instance.listed_s = ModelList(), float("-inf")
            self._served = None

    def _update(self, instance: Instance) -> None:
        was_healthy, state = instance.healthy, instance.breaker.state
        instance.healthy = instance.up and state is not BreakerState.OPEN
        if was_healthy != instance.healthy:
            if instance.healthy:
                trial = instance.breaker.state is BreakerState.HALF_OPEN
                log.info("%s %s", instance.name, "answers its probes and is on trial" if trial else "is up")
            else:
                log.warning("%s is down: %s", instance.name, instance.breaker.why or instance.last_error)
        if instance.healthy:
            self.on_room()

    def _current(self, which: Instance | str) -> Instance | None:
        """The given instance unless it has left; a name refers to its current holder."""
        if isinstance(which, str):
            return self._by_name.get(which)
        return which if self.contains(which) else None


def _ignore_room() -> None:
    """Default of ``on_room``."""
