"""The doctor's findings as a table and as JSON, and the tables of ``docs/reference/doctor.md``."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from launch.doctor.findings import Check, Finding, Status
from launch.doctor.versions import TESTED
from warmroute_yaml import number_of_problems

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA = 2
_STYLES = {Status.OK: "green", Status.NOTE: "", Status.WARNING: "yellow", Status.PROBLEM: "bold red"}


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """JSON document of ``--json``."""

    schema: int = SCHEMA
    checked_unix_s: float
    machine: str
    problems: int
    warnings: int
    findings: list[Finding]


def make_report(findings: Sequence[Finding]) -> DoctorReport:
    """The findings with their count."""
    return DoctorReport(
        checked_unix_s=time.time(),
        machine=platform.node(),
        problems=count(findings, Status.PROBLEM),
        warnings=count(findings, Status.WARNING),
        findings=list(findings),
    )


def count(findings: Sequence[Finding], status: Status) -> int:
    """Number of findings with this status."""
    return sum(finding.status is status for finding in findings)


def summary(findings: Sequence[Finding]) -> str:
    """Closing sentence of the output."""
    problems, warnings = count(findings, Status.PROBLEM), count(findings, Status.WARNING)
    if not problems and not warnings:
        return "nothing to fix"
    return f"{number_of_problems(problems)}, {warnings} warning{'s' * (warnings != 1)}"


def findings_table(findings: Sequence[Finding]) -> Table:
    """The findings as a Rich table."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="warmroute doctor", title_justify="left")
    for column in ("status", "check", "found", "fix"):
        table.add_column(column, overflow="fold", no_wrap=column in {"status", "check"})
    for finding in findings:
        style = _STYLES[finding.status]
        shown = f"[{style}]{finding.status}[/]" if style else str(finding.status)
        table.add_row(shown, finding.check, escape(finding.found), escape(finding.fix))
    return table


def checks_markdown(checks: Sequence[Check]) -> str:
    """Markdown table of all checks."""
    rows = ["| check | looks at | why | worst |", "| --- | --- | --- | --- |"]
    rows += [f"| `{one.name}` | {one.looks_at} | {one.why} | {one.worst} |" for one in checks]
    return "\n".join(rows)


def versions_markdown() -> str:
    """Markdown table of the tested combinations of versions."""
    rows = ["| vLLM | torch | Mooncake | on | KV moved over | to know |", "| --- | --- | --- | --- | --- | --- |"]
    rows += [
        f"| {row.vllm_package} {row.vllm} | {row.torch} | {row.mooncake_package} {row.mooncake} | {row.hardware} | "
        f"{row.transports} | {'; '.join(row.remarks) or '–'} |"
        for row in TESTED
    ]
    return "\n".join(rows)


def reference(checks: Sequence[Check]) -> str:
    """Markdown page of all checks and tested versions; ``warmroute doctor --list`` prints it."""
    return f"{_CHECKS_INTRODUCTION}\n{checks_markdown(checks)}\n\n{_VERSIONS_INTRODUCTION}\n{versions_markdown()}\n"


_CHECKS_INTRODUCTION = """# Reference: checks of `warmroute doctor`

Generated from the code by `make reference`; `warmroute doctor --list` prints it. How to use the command:
[doctor](../doctor.md).

## Checks

`worst` is the worst status that a check can report.
"""
_VERSIONS_INTRODUCTION = """## Tested versions

These combinations were run end to end: KV handed from one engine to another. Any other combination is reported as
untested, which means nothing more than that.
"""
