"""A check, what it finds, and the list of all checks, from which the document's table is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import msgspec

from launch.doctor.facts import Facts


class Status(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; nothing to do."""
    WARNING = "warning"
    """Works, but slower or riskier than it needs to."""
    PROBLEM = "problem"
    """Will fail or give wrong figures."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing found."""

    check: str
    status: Status
    found: str
    mend: str = ""
    """What to do; empty when there is nothing to do."""


Result = tuple[Status, str, str]
"""Status, what was found, mend."""


def ok(found: str) -> Result:
    """All well."""
    return Status.OK, found, ""


def note(found: str, mend: str = "") -> Result:
    """Worth knowing."""
    return Status.NOTE, found, mend


def warning(found: str, mend: str) -> Result:
    """Risky or slow."""
    return Status.WARNING, found, mend


def problem(found: str, mend: str) -> Result:
    """Will fail."""
    return Status.PROBLEM, found, mend


@dataclass(frozen=True, slots=True)
class Check:
    """One question about a machine; pure: facts in, results out."""

    name: str
    looks_at: str
    why: str
    worst: Status
    """The worst it can find."""
    judge: Callable[[Facts], Iterable[Result]]

    def findings(self, facts: Facts) -> Iterator[Finding]:
        """What it finds, with its name on it."""
        for status, found, mend in self.judge(facts):
            yield Finding(check=self.name, status=status, found=found, mend=mend)


CHECKS: list[Check] = []
"""In the order they are shown; `launch.doctor.checks` fills it."""


def check(
    name: str, *, looks_at: str, why: str, worst: Literal["note", "warning", "problem"]
) -> Callable[[Callable[[Facts], Iterable[Result]]], Callable[[Facts], Iterable[Result]]]:
    """Register a check; the texts become its row in docs/reference/doctor.md."""

    def register(judge: Callable[[Facts], Iterable[Result]]) -> Callable[[Facts], Iterable[Result]]:
        CHECKS.append(Check(name, looks_at, why, Status(worst), judge))
        return judge

    return register


def examine(facts: Facts, checks: Sequence[Check] | None = None) -> list[Finding]:
    """Everything all checks find."""
    return [finding for one in (checks if checks is not None else CHECKS) for finding in one.findings(facts)]


def gibibytes(size_bytes: float) -> str:
    """A size for people."""
    return f"{size_bytes / 2**30:.1f} GiB"
