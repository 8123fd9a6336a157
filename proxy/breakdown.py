"""One row per request: a ring in memory, and a JSONL file if asked for."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from policies.types import Decision, Prediction

log = logging.getLogger("warmroute.breakdown")

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode


class Outcome(StrEnum):
    """How a request ended."""

    OK = "ok"
    REJECTED = "rejected"
    """Refused by the proxy: bad input."""
    ENGINE_REFUSED = "engine_refused"
    """The engine answered 4xx; passed on as it came."""
    CLIENT_GONE = "client_gone"
    NO_INSTANCE = "no_instance"
    QUEUE_FULL = "queue_full"
    """All instances were at their limits, and as many waited as may."""
    QUEUE_TIMEOUT = "queue_timeout"
    """It waited for a place as long as it may."""
    UPSTREAM_ERROR = "upstream_error"
    UPSTREAM_TIMEOUT = "upstream_timeout"
    STREAM_BROKEN = "stream_broken"
    """The engine's stream broke after its first byte had gone to the client."""
    SHUTDOWN = "shutdown"
    """The proxy ended before the request did."""
    INTERNAL_ERROR = "internal_error"


@dataclass(slots=True, eq=False)
class Row:
    """One request, filled in as it goes."""

    request_id: str
    endpoint: str
    arrived_unix_s: float
    session_id: str | None = None
    stream: bool = False
    status: int = 0
    outcome: Outcome = Outcome.INTERNAL_ERROR
    planner: str = ""
    decision: Decision | None = None
    offload_reason: str | None = None
    prefill_instance: str | None = None
    prompt_tokens: int | None = None
    predicted_cached_tokens: int | None = None
    actual_cached_tokens: int | None = None
    completion_tokens: int | None = None
    events: int = 0
    attempts: list[dict[str, Any]] = field(default_factory=list)
    stages_ms: dict[str, float] = field(default_factory=dict)
    resumed: int = 0
    """Engines that took the stream up after another one had broken it off."""
    resume: str | None = None
    """What became of the resume of a stream that broke (`proxy.resume.plan.ResumeResult`); None: none was to be tried."""
    legs: dict[str, dict[str, float]] = field(default_factory=dict)
    """``prefill``, ``transfer`` or ``first_token`` -> what the cost models predicted, what it took."""
    error: str | None = None

    def note_leg(self, leg: str, predicted_s: float, actual_s: float) -> None:
        """Keep how well a leg's time was predicted."""
        self.legs[leg] = {"predicted_s": round(predicted_s, 4), "actual_s": round(actual_s, 4)}

    @property
    def prediction(self) -> Prediction | None:
        """What both indexes said of the instance that computed the prompt (P after a hand-off)."""
        if self.decision is None:
            return None
        return self.decision.prefill_prediction if self.prefill_instance else self.decision.decode_prediction

    def as_dict(self) -> dict[str, Any]:
        """Ready for msgspec to encode: enumerations as they are."""
        decision, prediction = self.decision, self.prediction
        return {
            "request_id": self.request_id,
            "session_id": self.session_id,
            "arrived_unix_s": self.arrived_unix_s,
            "endpoint": self.endpoint,
            "stream": self.stream,
            "status": self.status,
            "outcome": self.outcome,
            "error": self.error,
            "policy": decision.policy if decision else None,
            "planner": self.planner,
            "class": decision.request_class if decision else None,
            "instance": decision.decode_on if decision else None,
            "prefill_instance": self.prefill_instance,
            "reason": decision.reason if decision else None,
            "offload_reason": self.offload_reason,
            "prompt_tokens": self.prompt_tokens,
            "predicted_cached_tokens": self.predicted_cached_tokens,
            "actual_cached_tokens": self.actual_cached_tokens,
            "index_source": prediction.source if prediction else None,
            "predicted_by_shadow_tokens": prediction.shadow_tokens if prediction else None,
            "predicted_by_exact_tokens": prediction.exact_tokens if prediction else None,
            "completion_tokens": self.completion_tokens,
            "events": self.events,
            "scores": [
                {"instance": instance, "score": score, "inputs": inputs, "skipped": skipped, "cached_tokens": cached}
                for instance, score, inputs, skipped, cached in (decision.scores if decision else ())
            ],
            "offload_inputs": decision.offload.inputs if decision else {},
            "attempts": self.attempts,
            "resumed": self.resumed,
            "resume": self.resume,
            "legs": self.legs,
            "stages_ms": {name: round(value, 3) for name, value in self.stages_ms.items()},
        }


def _line(row: Row) -> bytes:
    """The row in JSON."""
    as_dict = row.as_dict()
    try:
        return _encode(as_dict)
    except (TypeError, UnicodeEncodeError):
        return _encode(_plain(as_dict))


def _plain(value: object) -> object:
    """What msgspec can encode: a policy of somebody else's, or the text of an error, may hold what it cannot."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return float(value)
    return value if value is None or isinstance(value, int) else str(value)


class Breakdown:
    """The last ``capacity`` rows, oldest first, and counts since the start.

    Rows are kept as the JSON lines they are written as: 2 KB each, instead of dozens of objects that every full garbage
    collection would walk.
    """

    def __init__(self, capacity: int, jsonl_path: Path | None = None) -> None:
        self._lines: deque[bytes] = deque(maxlen=capacity)
        self._file: BinaryIO | None = None
        if jsonl_path is not None:
            jsonl_path.parent.mkdir(parents=True, exist_ok=True)
            self._file = jsonl_path.open("ab")
        self.started = 0
        self.finished = 0
        self.outcomes: dict[str, int] = {}

    def open_row(self, row: Row) -> Row:
        """Count a request in."""
        self.started += 1
        return row

    def close_row(self, row: Row) -> None:
        """Keep a finished row; every opened row is closed once."""
        self.finished += 1
        self.outcomes[row.outcome.value] = self.outcomes.get(row.outcome.value, 0) + 1
        line = _line(row)
        self._lines.append(line)
        if self._file is not None:
            self._write(line)

    def select(self, limit: int, **equal: str) -> Iterator[dict[str, Any]]:
        """The newest ``limit`` rows, oldest first, whose fields equal ``equal`` (by name of the JSON field)."""
        # What a line does not even contain it cannot be equal to: few lines need decoding.
        needles = [_encode(value)[1:-1] for value in equal.values()]
        found: list[dict[str, Any]] = []
        for line in reversed(self._lines):
            if len(found) >= limit:
                break
            if not all(needle in line for needle in needles):
                continue
            row = _decode(line)
            if all(str(row.get(key)) == value for key, value in equal.items()):
                found.append(row)
        return iter(found[::-1])

    def flush(self) -> None:
        """Write buffered rows to the file."""
        self._write(b"")

    def close(self) -> None:
        """Flush and close the file."""
        self._write(b"")
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: bytes) -> None:
        """Append, or flush for an empty line. A full disk ends the file, not the request whose row it was."""
        if self._file is None:
            return
        try:
            if line:
                self._file.write(line)
                self._file.write(b"\n")
            else:
                self._file.flush()
        except OSError as error:
            log.error("the breakdown file is given up, rows stay in memory only: %s", error)
            # Closing would try to write what is buffered once more: let go of the descriptor alone.
            with suppress(OSError):
                self._file.raw.close()  # type: ignore[attr-defined]
            self._file = None
