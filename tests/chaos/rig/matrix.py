"""The failure matrix: faults of an engine, their moments, and the expected results. One cell per row, no logic.

``make reference`` writes it to docs/reference/failure-matrix.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tests.chaos.rig import faults
from tests.chaos.rig.engine import Fault
from tests.chaos.rig.faults import Moment, at, trickle


class Sees(StrEnum):
    """Result for the client."""

    ANSWER = "the whole answer"
    ERROR = "an error in OpenAI's shape"
    BROKEN = "the events so far, then an error event"
    AS_SENT = "the engine's answer, unchanged"


class Health(StrEnum):
    """Effect on the faulty instance's health."""

    NONE = "nothing"
    COUNTED = "one failure"
    COUNTED_BESIDE = "one failure; alone nothing"
    OUT = "out at once"


@dataclass(frozen=True)
class View:
    """End of one request: status and content for the client, outcome and failed attempts in the breakdown."""

    status: int
    sees: Sees
    outcome: str
    attempts: int = 0


@dataclass(frozen=True)
class Expected:
    """Expected results with the faulty engine alone, and with a good one that may be tried next."""

    alone: View
    beside: View
    health: Health


@dataclass(frozen=True)
class Cell:
    """A fault at a moment in one mode, and the expected results."""

    name: str
    fault: Fault | str
    """Answer to POSTs; or the name of a method of ``Unreachable``, which makes the engine unreachable."""
    stream: bool
    expected: Expected
    moment: Moment | None = None
    chat: bool = False

    @property
    def waits(self) -> bool:
        """True if one of the proxy's bounds ends it."""
        return self.name in {"hang", "connection not accepted", "headers without end, slowly"}

    @property
    def id(self) -> str:
        """Test id for pytest."""
        parts = [self.name, self.moment or "", "stream" if self.stream else "whole", "chat" if self.chat else ""]
        return "-".join(part.replace(" ", "_") for part in parts if part)


def _same(view: View, health: Health) -> Expected:
    return Expected(view, view, health)


_ANSWERED = View(200, Sees.ANSWER, "ok")
_ELSEWHERE = View(200, Sees.ANSWER, "ok", 1)
_FAILED = View(502, Sees.ERROR, "upstream_error", 1)
_TOO_LATE = View(504, Sees.ERROR, "upstream_timeout", 1)

SERVED = _same(_ANSWERED, Health.NONE)
RETRIED = Expected(_FAILED, _ELSEWHERE, Health.COUNTED)
COMPARED = Expected(_FAILED, _ELSEWHERE, Health.COUNTED_BESIDE)
LATE = Expected(_TOO_LATE, _ELSEWHERE, Health.COUNTED)
REFUSED = Expected(_FAILED, _ELSEWHERE, Health.OUT)
BROKEN = _same(View(200, Sees.BROKEN, "stream_broken", 1), Health.COUNTED)


def passed(status: int, outcome: str = "engine_refused") -> Expected:
    """The engine's own refusal reaches the client and is not counted as a failure."""
    return _same(View(status, Sees.AS_SENT, outcome), Health.NONE)


def _moments(name: str, act: faults.Act, **expected: Expected) -> list[Cell]:
    """One act at every moment; keys are ``MOMENT_stream`` and ``MOMENT_whole``."""
    return [
        Cell(name, at(Moment[key.rsplit("_", 1)[0]], act), key.endswith("_stream"), what, Moment[key.rsplit("_", 1)[0]])
        for key, what in expected.items()
    ]


def _both(name: str, fault: Fault | str, expected: Expected) -> list[Cell]:
    """The same cell in both modes."""
    return [Cell(name, fault, stream, expected) for stream in (True, False)]


# A stream whose [DONE] has passed is complete, regardless of its connection.
_BROKEN_OFF = {
    "BEFORE_HEADERS_stream": RETRIED,
    "BEFORE_HEADERS_whole": RETRIED,
    "BEFORE_FIRST_BYTE_stream": COMPARED,
    "BEFORE_FIRST_BYTE_whole": RETRIED,
    "MID_STREAM_stream": BROKEN,
    "MID_STREAM_whole": RETRIED,
    "AT_END_stream": SERVED,
    "AT_END_whole": RETRIED,
}
_SILENT = {key: LATE if what in (RETRIED, COMPARED) else what for key, what in _BROKEN_OFF.items()}
_BAD_CHUNK = {
    key: what for key, what in _BROKEN_OFF.items() if key in {"BEFORE_FIRST_BYTE_stream", "MID_STREAM_stream"}
}

CELLS: list[Cell] = [
    *_both("connection refused", "refuse", REFUSED),
    *_both("connection not accepted", "full_backlog", REFUSED),
    *_both("closed on accept", "close_on_accept", RETRIED),
    *_both("reset on accept", "reset_on_accept", RETRIED),
    *_moments("hang", faults.hang, **_SILENT),
    *_moments("close", faults.close, **_BROKEN_OFF),
    *_moments("reset", faults.rst, **_BROKEN_OFF),
    *_moments("garbage", faults.garbage, **_BROKEN_OFF),
    *_moments("restart", faults.restart, MID_STREAM_stream=BROKEN, MID_STREAM_whole=RETRIED),
    *_moments("chunk size over 64 bits", faults.huge_chunk_size, **_BAD_CHUNK),
    *_moments("chunk size negative", faults.negative_chunk_size, **_BAD_CHUNK),
    *_moments("chunk longer than its size", faults.unterminated_chunk, MID_STREAM_stream=BROKEN),
    *(
        Cell("a byte at a time", trickle(moment), stream, SERVED, moment)
        for moment in (Moment.BEFORE_HEADERS, Moment.BEFORE_FIRST_BYTE, Moment.MID_STREAM)
        for stream in (True, False)
    ),
    Cell("chunks end, without [DONE]", at(Moment.MID_STREAM, faults.ends), True, BROKEN, Moment.MID_STREAM),
    Cell("chunks end, without [DONE]", at(Moment.MID_STREAM, faults.ends), True, BROKEN, Moment.MID_STREAM, chat=True),
    Cell("HTTP/1.0, closed", faults.closed_early, True, BROKEN, Moment.MID_STREAM),
    Cell("half an event, reset", faults.half_an_event, True, BROKEN, Moment.MID_STREAM),
    Cell("last byte missing", faults.last_byte_missing, False, RETRIED, Moment.AT_END),
    Cell("last byte missing", faults.last_byte_missing, True, BROKEN, Moment.AT_END),
    Cell("Content-Length 10 too long", faults.wrong_length(10), False, RETRIED),
    Cell("Content-Length 10 too short", faults.wrong_length(-10), False, RETRIED),
    *_both("400", faults.answers("400 Bad Request"), passed(400)),
    *_both("401", faults.answers("401 Unauthorized"), passed(401)),
    *_both("404", faults.answers("404 Not Found"), passed(404)),
    *_both("429", faults.answers("429 Too Many Requests", "retry-after: 7"), passed(429)),
    *_both("500", faults.answers("500 Internal Server Error"), COMPARED),
    *_both("501", faults.answers("501 Not Implemented"), passed(501)),
    *_both("503", faults.answers("503 Service Unavailable"), RETRIED),
    *_both("503 with an HTML body", faults.answers("503 X", body=b"<html>\xff\x00</html>"), RETRIED),
    *_both("204", faults.bodiless("204 No Content"), passed(204, "ok")),
    *_both("304", faults.bodiless("304 Not Modified"), passed(304, "ok")),
    *_both("302", faults.answers("302 Found", "location: http://127.0.0.1:9/"), passed(302, "ok")),
    *_both("100 Continue first", faults.preceded_by("100 Continue"), SERVED),
    *_both("103 Early Hints first", faults.preceded_by("103 Early Hints", "link: </x>"), SERVED),
    *_both("101", faults.bodiless("101 Switching Protocols"), RETRIED),
    *_both("status line without a number", faults.with_head(lambda was: was.replace(b"200", b"abc", 1)), RETRIED),
    *_both("HTTP/1.0, delimited by close", faults.framed("close"), SERVED),
    *_both("framed by length", faults.framed("length"), SERVED),
    *_both("framed in chunks", faults.framed("chunked"), SERVED),
    *_both("Connection: close", faults.says_close, SERVED),
    *_both("headers twice", faults.also("content-type: text/plain", "date: x", "date: y"), SERVED),
    *_both("headers of 3 KB", faults.also("x-long: " + "a" * 3000), SERVED),
    *_both("header without a colon", faults.also("no colon here"), RETRIED),
    *_both("NUL in a header", faults.also("x-bad: a\0b"), RETRIED),
    Cell("two Content-Lengths that differ", faults.also("content-length: 5"), False, RETRIED),
    Cell("Content-Length beside Transfer-Encoding", faults.also("content-length: 5"), True, RETRIED),
    Cell("negative Content-Length", faults.with_head(lambda was: was.replace(b"gth: ", b"gth: -", 1)), False, RETRIED),
    *_both("headers without end", faults.endless_headers, RETRIED),
    *_both("headers without end, slowly", faults.drip_headers, LATE),
    Cell("a second answer nobody asked for", faults.two_answers, False, SERVED),
    Cell("a second answer nobody asked for", faults.two_answers, True, SERVED),
    Cell("close", at(Moment.BEFORE_HEADERS, faults.close), True, RETRIED, Moment.BEFORE_HEADERS, chat=True),
    Cell("close", at(Moment.MID_STREAM, faults.close), True, BROKEN, Moment.MID_STREAM, chat=True),
    Cell("close", at(Moment.MID_STREAM, faults.close), False, RETRIED, Moment.MID_STREAM, chat=True),
    Cell("hang", at(Moment.MID_STREAM, faults.hang), True, BROKEN, Moment.MID_STREAM, chat=True),
]
