"""What the proxy knows of each engine at run time, and when it counts as healthy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from policies.types import Role
from proxy.settings import HealthSettings, InstanceSettings


@dataclass(slots=True, eq=False)
class Instance:
    """One engine: where it is, who it is, how it is."""

    settings: InstanceSettings
    healthy: bool = False
    failures_in_a_row: int = 0
    successes_in_a_row: int = 0
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


RECYCLE_PATIENCE_S = 60.0


def _resting(instance: Instance) -> bool:
    waited_s = time.monotonic() - instance.recycle_wanted_at_s
    return instance.recycle_wanted is not None and waited_s < RECYCLE_PATIENCE_S


class Instances:
    """The fleet by name, with one rule for health.

    Both probes and requests report here. ``unhealthy_after`` failures in a row, or one refused connection, take an
    instance out; ``healthy_after`` good probes in a row take it back. An answer of 4xx is a success of the engine.
    """

    def __init__(self, settings: tuple[InstanceSettings, ...], health: HealthSettings) -> None:
        self._health = health
        self._by_name = {each.name: Instance(each) for each in settings}

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._by_name.values())

    def __getitem__(self, name: str) -> Instance:
        return self._by_name[name]

    def healthy(self) -> set[str]:
        """Names of the instances that may be sent requests.

        One that should be recycled rests for ``RECYCLE_PATIENCE_S``; if nobody restarts it, it serves on as it is.
        Where nothing else is left that may decode, it serves all the same.
        """
        healthy = {name for name, instance in self._by_name.items() if instance.healthy}
        rested = {name for name in healthy if not _resting(self._by_name[name])}
        can_answer = any(self._by_name[name].settings.role is not Role.KV_PRODUCER for name in rested)
        return rested if can_answer else healthy

    def succeeded(self, name: str) -> None:
        """A request was answered: the failures so far were not in a row."""
        self._by_name[name].failures_in_a_row = 0

    def failed(self, name: str, error: str, *, refused: bool = False) -> None:
        """A request or a probe failed."""
        instance = self._by_name[name]
        instance.last_error = error
        instance.successes_in_a_row = 0
        instance.failures_in_a_row += 1
        if refused or instance.failures_in_a_row >= self._health.unhealthy_after:
            instance.healthy = False

    def probed(self, name: str) -> None:
        """A probe found the instance well."""
        instance = self._by_name[name]
        instance.successes_in_a_row += 1
        if instance.healthy or instance.successes_in_a_row >= self._health.healthy_after:
            instance.failures_in_a_row = 0
            instance.healthy = True
            instance.last_error = None
