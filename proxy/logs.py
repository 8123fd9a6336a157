"""Log output: text or one JSON object per line, with request ids and without secrets."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections import Counter
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal, TextIO

import msgspec

from proxy.clip import clip

request_id: ContextVar[str | None] = ContextVar("warmroute_request_id", default=None)
"""Id of the request that the current task serves, added to its log lines."""

_MESSAGE_CHARS = 4_000
"""Longest message or field of a log line."""
_TRACEBACK_CHARS = 32_000
_HIDDEN = "[hidden]"
_SECRETS = (
    # An Authorization header or a bearer token, in any quoting.
    (re.compile(r"(?i)\b(bearer|basic)(\s+|%20)[^\s'\",;\\)\]}]+"), rf"\1 {_HIDDEN}"),
    # "api_key": "...", api-key=..., x-api-key: ..., engine_key='...', password=...
    (
        re.compile(
            r"(?i)\b((?:x[-_])?(?:api|engine|admin|secret|access)[-_]?(?:key|token)|password|passwd|secret)"
            r"([\"']?\s*[:=]\s*[\"']?)(?!bearer\b)[^\s'\",;&)\]}]{8,}"
        ),
        rf"\1\2{_HIDDEN}",
    ),
    # Keys with a known prefix: ours, OpenAI's, Hugging Face's.
    (re.compile(r"\b(?:wr-|sk-|hf_)[A-Za-z0-9_-]{16,}"), _HIDDEN),
    # user:password@host
    (re.compile(r"://[^/\s:@]+:[^/\s@]+@"), f"://{_HIDDEN}@"),
)
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "color_message", "taskName"}
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(0x20), 0x7F, 0x85, 0x2028, 0x2029)}
_CONTROL |= {ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t"}


def redact(text: str) -> str:
    """Replace everything that looks like a key, token or password, and escape unencodable characters."""
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text.encode("utf-8", "backslashreplace").decode()  # a lone surrogate cannot be written


def _utc(unix_s: float) -> str:
    """Time in ISO 8601 with its offset, as in the access log: logs of several hosts are read side by side."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")


class _Formatter(logging.Formatter):
    worker: int | None = None
    """Number of this process among several workers, which its lines have."""

    def message_of(self, record: logging.LogRecord) -> str:
        """The message on one line, so that client data cannot forge log lines."""
        return clip(redact(record.getMessage()), _MESSAGE_CHARS).translate(_CONTROL)

    def traceback_of(self, record: logging.LogRecord) -> str | None:
        """Traceback and stack of a record, or None."""
        parts = []
        if record.exc_info and record.exc_info[0] is not None:
            parts.append(self.formatException(record.exc_info))
        elif record.exc_text:
            parts.append(record.exc_text)
        if record.stack_info:
            parts.append(self.formatStack(record.stack_info))
        return clip(redact("\n".join(parts)), _TRACEBACK_CHARS) if parts else None


class TextFormatter(_Formatter):
    """``time level logger message [request id]``, with the time as in JSON, followed by a traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        name = record.name if self.worker is None else f"{record.name} worker {self.worker}:"
        line = f"{_utc(record.created)} {record.levelname} {name} {self.message_of(record)}"
        serving = request_id.get()
        if serving is not None and serving not in line:
            line += f" [{serving}]"
        trouble = self.traceback_of(record)
        return line if trouble is None else f"{line}\n{trouble}"


class JsonFormatter(_Formatter):
    """One JSON object per line.

    Fields: ``time`` (UTC, ISO 8601), ``level``, ``logger``, ``message``, the record's extra fields, ``request_id``
    while a request is served, and ``exception``.
    """

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self.message_of(record),
        }
        if self.worker is not None:
            entry["worker"] = self.worker
        serving = request_id.get()
        if serving is not None:
            entry["request_id"] = serving
        for name, value in record.__dict__.items():
            if name not in _STANDARD and not name.startswith("_"):
                plain = value is None or isinstance(value, bool | int | float)
                entry[name] = value if plain else clip(redact(str(value)), _MESSAGE_CHARS)
        trouble = self.traceback_of(record)
        if trouble is not None:
            entry["exception"] = trouble
        return msgspec.json.encode(entry).decode()


class LimitedLog:
    """Warnings about others' behaviour, at most one per interval, so that a flood leaves a trace but fills no disk.

    Args:
        logger: where the warnings are written.
        interval_s: seconds between two of them.
    """

    def __init__(self, logger: logging.Logger, interval_s: float = 1.0) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._logged_s = float("-inf")
        self._left_out: Counter[str] = Counter()

    def warning(self, kind: str, message: str, *args: object) -> None:
        """Log a warning, with the number of those left out before it, or count it as left out.

        Args:
            kind: of a closed set, by which those left out are counted.
            message: with placeholders for ``args``.
        """
        now_s = time.monotonic()
        if now_s - self._logged_s < self._interval_s:
            self._left_out[kind] += 1
            self._logger.debug(message, *args)
            return
        self._logged_s = now_s
        self._logger.warning(message + "%s", *args, self._take_left_out())

    def flush(self) -> None:
        """Report the warnings left out, if the interval since the last one is over."""
        if self._left_out and time.monotonic() - self._logged_s >= self._interval_s:
            self._logged_s = time.monotonic()
            self._logger.warning("warnings left out%s", self._take_left_out())

    def _take_left_out(self) -> str:
        counts = ", ".join(f"{count} x {kind}" for kind, count in sorted(self._left_out.items()))
        self._left_out.clear()
        return f" (not logged since the last one: {counts})" if counts else ""


def configure(
    level: str, log_format: Literal["text", "json"], stream: TextIO | None = None, worker: int | None = None
) -> None:
    """Configure logging of the whole process, replacing earlier handlers.

    Args:
        level: debug, info, warning or error.
        log_format: text, or json for one object per line.
        stream: output stream; default standard error.
        worker: number of this process among several workers; None: it is the only one.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    formatter = JsonFormatter() if log_format == "json" else TextFormatter()
    formatter.worker = worker
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # These log every probe, or every byte on the wire.
    for name in ("httpx", "httpcore", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)
