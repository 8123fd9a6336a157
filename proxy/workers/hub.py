"""The parent's part of the shared state: passes messages on, keeps the latest, pins, changes and ended counters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from proxy.gather.families import MergedFamilies, decode_families, encode_families, merged
from proxy.sharing.frames import Answered, Ask, ChangeRequest, Question, Standing
from proxy.sharing.wire import Message, Pin

_PINS_PER_ANSWER = 2_000
_CHANGES = 1_000
_SECTIONS = {
    "/policy": ("policy", "offload"),
    "/admission": ("admission",),
    "/shadow": ("shadow",),
}
"""Path of a change -> sections of the settings that it replaces."""


class Hub:
    """State between the workers of one parent. Owned by the supervisor; no I/O, times are monotonic seconds."""

    def __init__(self, pin_capacity: int, pin_ttl_s: float, roster: Callable[[], tuple[Standing, ...]]) -> None:
        self._capacity = pin_capacity
        self._pin_ttl_s = pin_ttl_s
        self._roster = roster
        self._full: dict[str, tuple[Message, float]] = {}
        self._pins: OrderedDict[bytes, tuple[Pin, float]] = OrderedDict()
        self._readings: dict[int, Iterator[Pin]] = {}
        self._changes: dict[tuple[str, str, bytes], ChangeRequest] = {}
        self._shown: dict[int, bytes] = {}
        self._ended: MergedFamilies = {}

    def publish(self, message: Message, now_s: float) -> None:
        """Keep what later workers need of a message."""
        if message.gone:
            self._full.pop(message.replica, None)
        elif message.full:
            self._full[message.replica] = (message, now_s)
        for pin in message.pins:
            self._pins[pin.session] = (pin, now_s)
            self._pins.move_to_end(pin.session)
        while self._pins and (len(self._pins) > self._capacity or self._oldest_s() < now_s - self._pin_ttl_s):
            self._pins.popitem(last=False)

    def lost(self, worker: int) -> list[Message]:
        """The process of a worker has ended: its farewells, which it may not have sent, and its counters are kept."""
        self._readings.pop(worker, None)
        shown = self._shown.pop(worker, None)
        if shown is not None:
            self._ended = merged([list(self._ended.values()), decode_families(shown)])
        names = [name for name in self._full if name == replica_name(worker)]
        return [Message(name, self._full.pop(name)[0].run, gone=True) for name in names]

    def answer(self, worker: int, asked: Ask, now_s: float) -> Answered:
        """Answer a worker's question."""
        number = asked.number
        if asked.question is Question.REPLICAS:
            self._readings[worker] = iter([pin for pin, _ in self._pins.values()])
            replicas = tuple((message, now_s - at_s) for message, at_s in self._full.values())
            return Answered(number, replicas=replicas)
        if asked.question is Question.PINS:
            reading = self._readings.get(worker, iter(()))
            return Answered(number, pins=tuple(islice(reading, _PINS_PER_ANSWER)))
        if asked.question is Question.ROSTER:
            return Answered(number, roster=self._roster())
        if asked.question is Question.CHANGES:
            return Answered(number, changes=tuple(self._changes.values()))
        return Answered(number, roster=self._roster(), ended=encode_families(self._ended.values()))

    def changed(self, change: ChangeRequest) -> None:
        """Keep a change for workers that start later. One that repeats an earlier one takes its place at the end."""
        key = (change.method, change.target, change.body)
        self._changes.pop(key, None)
        self._changes[key] = change
        if len(self._changes) > _CHANGES:
            del self._changes[next(iter(self._changes))]

    def reloaded(self, keys: Iterable[str]) -> None:
        """Drop changes that the settings have replaced: a worker that starts reads the settings."""
        sections = {key.partition(".")[0] for key in keys}
        for key, change in tuple(self._changes.items()):
            if sections.intersection(_SECTIONS.get(change.target, ())):
                del self._changes[key]

    def shown(self, worker: int, families: bytes) -> None:
        """Keep a worker's counters as last shown."""
        self._shown[worker] = families

    def _oldest_s(self) -> float:
        return next(iter(self._pins.values()))[1]


def replica_name(worker: int) -> str:
    """Name of a worker as a replica of the state that workers share."""
    return f"worker-{worker}"
