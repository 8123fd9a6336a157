"""Checks, their findings, and the registry of all checks, from which the table in docs/doctor.md is generated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import msgspec

from launch.doctor.facts import Facts


class Status(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    NOTE = "note"
    """For information; no action needed."""
    WARNING = "warning"
    """Works, but slower or riskier than necessary."""
    PROBLEM = "problem"
    """Fails or gives wrong figures."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One finding of a check."""

    check: str
    status: Status
    found: str
    fix: str = ""
    """Remedy; empty when none is needed."""


Result = tuple[Status, str, str]
"""Status, finding, fix."""


def ok(found: str) -> Result:
    """A result without problems."""
    return Status.OK, found, ""


def note(found: str, fix: str = "") -> Result:
    """A result for information."""
    return Status.NOTE, found, fix


def warning(found: str, fix: str) -> Result:
    """A result that is risky or slow."""
    return Status.WARNING, found, fix


def problem(found: str, fix: str) -> Result:
    """A result that will fail."""
    return Status.PROBLEM, found, fix


@dataclass(frozen=True, slots=True)
class Check:
    """One check of a machine; pure: facts in, results out."""

    name: str
    looks_at: str
    why: str
    worst: Status
    """The worst status it can return."""
    judge: Callable[[Facts], Iterable[Result]]

    def findings(self, facts: Facts) -> Iterator[Finding]:
        """The check's results, each with the check's name."""
        for status, found, fix in self.judge(facts):
            yield Finding(check=self.name, status=status, found=found, fix=fix)


CHECKS: list[Check] = []
"""In display order; `launch.doctor.checks` fills it."""


def check(
    name: str, *, looks_at: str, why: str, worst: Literal["note", "warning", "problem"]
) -> Callable[[Callable[[Facts], Iterable[Result]]], Callable[[Facts], Iterable[Result]]]:
    """Register a check; the texts become its row in docs/reference/doctor.md."""

    def register(judge: Callable[[Facts], Iterable[Result]]) -> Callable[[Facts], Iterable[Result]]:
        CHECKS.append(Check(name, looks_at, why, Status(worst), judge))
        return judge

    return register


def examine(facts: Facts, checks: Sequence[Check] | None = None) -> list[Finding]:
    """Findings of all checks."""
    return [finding for one in (checks if checks is not None else CHECKS) for finding in one.findings(facts)]


def gibibytes(size_bytes: float) -> str:
    """A size in GiB for display."""
    return f"{size_bytes / 2**30:.1f} GiB"
