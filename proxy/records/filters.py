"""Filters of rows, on encoded lines: a line that cannot match is not decoded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

_encode = msgspec.json.Encoder().encode


class _Fields(msgspec.Struct):
    """The fields of a row that filters compare; plug-ins may have put any type there."""

    instance: Any = None
    request_class: Any = msgspec.field(default=None, name="class")
    outcome: Any = None
    session_id: Any = None
    tenant: Any = None
    request_id: Any = None
    policy: Any = None
    reason: Any = None
    arrived_unix_s: Any = None
    stages_ms: Any = None


_decode = msgspec.json.Decoder(_Fields).decode
EQUAL_FIELDS = ("instance", "class", "outcome", "session_id", "tenant", "request_id", "policy", "reason")
"""JSON names of the fields that a filter can compare with a text."""


class RowFilter:
    """Condition on rows.

    Args:
        equal: JSON name of a field (one of ``EQUAL_FIELDS``) -> its value as text.
        arrived_after_unix_s: rows of requests that arrived at this time or later; None: all.
        min_e2e_s: rows of requests that took at least this many seconds; None: all.
    """

    def __init__(
        self,
        equal: Mapping[str, str],
        arrived_after_unix_s: float | None = None,
        min_e2e_s: float | None = None,
    ) -> None:
        self._equal = tuple(("request_class" if name == "class" else name, value) for name, value in equal.items())
        self._needles = tuple(_encode(value)[1:-1] for value in equal.values())
        self._arrived_after_unix_s = arrived_after_unix_s
        self._min_e2e_s = min_e2e_s
        self.empty = not self._equal and arrived_after_unix_s is None and min_e2e_s is None
        """True if every row matches."""

    def could_match(self, line: bytes) -> bool:
        """False for a line that lacks a wanted text, and so need not be decoded."""
        return all(needle in line for needle in self._needles)

    def matches(self, line: bytes) -> bool:
        """True if an encoded row fulfils the condition."""
        if self.empty:
            return True
        if not self.could_match(line):
            return False
        fields = _decode(line)
        if any(str(getattr(fields, attribute)) != value for attribute, value in self._equal):
            return False
        if self._arrived_after_unix_s is not None and not _least(fields.arrived_unix_s, self._arrived_after_unix_s):
            return False
        if self._min_e2e_s is None:
            return True
        stages = fields.stages_ms
        return isinstance(stages, dict) and _least(stages.get("total"), self._min_e2e_s * 1e3)


def _least(value: object, bound: float) -> bool:
    return isinstance(value, int | float) and value >= bound
