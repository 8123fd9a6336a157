"""The parent's part of the shared state: passes messages on, keeps the latest, pins, changes and ended counters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import NamedTuple, TypeVar

from proxy.gather.families import MergedFamilies, decode_families, encode_families, merged
from proxy.settings.diff import replaced
from proxy.sharing.frames import Answered, Ask, ChangeRequest, Question, WorkerStanding
from proxy.sharing.wire import Message, Pin, SharedResponse
from proxy.workers.kept_changes import left_of

_Key = TypeVar("_Key")
_Kept = TypeVar("_Kept")

_PINS_PER_ANSWER = 2_000
_RESPONSES_PER_ANSWER = 200
_CHANGES = 1_000


class KeptState(NamedTuple):
    """Bounds of what is kept for workers that start later: entries, and seconds."""

    pins: int
    pin_ttl_s: float
    responses: int
    response_ttl_s: float


class Hub:
    """State between the workers of one parent. Owned by the supervisor; no I/O, times are monotonic seconds."""

    def __init__(self, kept: KeptState, roster: Callable[[], tuple[WorkerStanding, ...]]) -> None:
        self._kept = kept
        self._roster = roster
        self._full: dict[str, tuple[Message, float]] = {}
        self._pins: OrderedDict[bytes, tuple[Pin, float]] = OrderedDict()
        self._responses: OrderedDict[str, tuple[SharedResponse, float]] = OrderedDict()
        self._readings: dict[int, tuple[Iterator[Pin], Iterator[SharedResponse]]] = {}
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
        for response in message.responses:
            self._responses.setdefault(response.response_id, (response, now_s))
        kept = self._kept
        _shrink(self._pins, kept.pins, now_s - kept.pin_ttl_s)
        _shrink(self._responses, kept.responses, now_s - kept.response_ttl_s)

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
            pins, responses = list(self._pins.values()), list(self._responses.values())
            self._readings[worker] = (iter([pin for pin, _ in pins]), iter([each for each, _ in responses]))
            replicas = tuple((message, now_s - at_s) for message, at_s in self._full.values())
            return Answered(number, replicas=replicas)
        if asked.question is Question.PINS:
            return Answered(number, pins=tuple(islice(self._reading(worker)[0], _PINS_PER_ANSWER)))
        if asked.question is Question.RESPONSES:
            return Answered(number, responses=tuple(islice(self._reading(worker)[1], _RESPONSES_PER_ANSWER)))
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
        """Drop what the settings have replaced of the changes: a worker that starts reads the settings."""
        parts = replaced(keys)
        changes, self._changes = self._changes, {}
        for change in changes.values():
            left = left_of(change, parts)
            if left is not None:
                self.changed(left)

    def shown(self, worker: int, families: bytes) -> None:
        """Keep a worker's counters as last shown."""
        self._shown[worker] = families

    def _reading(self, worker: int) -> tuple[Iterator[Pin], Iterator[SharedResponse]]:
        return self._readings.get(worker, (iter(()), iter(())))


def _shrink(table: OrderedDict[_Key, tuple[_Kept, float]], capacity: int, since_s: float) -> None:
    """Drop the oldest entries above ``capacity``, and those from before ``since_s``."""
    while table and (len(table) > capacity or next(iter(table.values()))[1] < since_s):
        table.popitem(last=False)


def replica_name(worker: int) -> str:
    """Name of a worker as a replica of the state that workers share."""
    return f"worker-{worker}"
