"""Log output: text or one JSON object per line, with request ids and without secrets."""

from __future__ import annotations

import logging
import re
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal, TextIO

import msgspec

request_id: ContextVar[str | None] = ContextVar("warmroute_request_id", default=None)
"""Id of the request that the current task serves, added to its log lines."""

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


class _Formatter(logging.Formatter):
    def message_of(self, record: logging.LogRecord) -> str:
        """The message on one line, so that client data cannot forge log lines."""
        return redact(record.getMessage()).translate(_CONTROL)

    def traceback_of(self, record: logging.LogRecord) -> str | None:
        """Traceback and stack of a record, or None."""
        parts = []
        if record.exc_info and record.exc_info[0] is not None:
            parts.append(self.formatException(record.exc_info))
        elif record.exc_text:
            parts.append(record.exc_text)
        if record.stack_info:
            parts.append(self.formatStack(record.stack_info))
        return redact("\n".join(parts)) if parts else None


class TextFormatter(_Formatter):
    """``time level logger message [request id]``, followed by a traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{self.formatTime(record)} {record.levelname} {record.name} {self.message_of(record)}"
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
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self.message_of(record),
        }
        serving = request_id.get()
        if serving is not None:
            entry["request_id"] = serving
        for name, value in record.__dict__.items():
            if name not in _STANDARD and not name.startswith("_"):
                plain = value is None or isinstance(value, bool | int | float)
                entry[name] = value if plain else redact(str(value))
        trouble = self.traceback_of(record)
        if trouble is not None:
            entry["exception"] = trouble
        return msgspec.json.encode(entry).decode()


def configure(level: str, log_format: Literal["text", "json"], stream: TextIO | None = None) -> None:
    """Configure logging of the whole process, replacing earlier handlers.

    Args:
        level: debug, info, warning or error.
        log_format: text, or json for one object per line.
        stream: output stream; default standard error.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # These log every probe, or every byte on the wire.
    for name in ("httpx", "httpcore", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)
