"""Formatting of numbers in tables, and parsing of number lists in options."""

from __future__ import annotations

from bench.analysis.output import stop

GIB = 2**30


def count(value: float) -> str:
    """``30.5 G``, ``906 M``."""
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:,.0f}"


def giga(size_bytes: float) -> str:
    """Bytes in GiB, without the unit."""
    return f"{size_bytes / GIB:,.2f}"


def milliseconds(seconds: float) -> str:
    """``12.3 ms``, from a second on ``1.23 s``."""
    if abs(seconds) >= 1:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1000:.2f} ms" if abs(seconds) < 0.01 else f"{seconds * 1000:.1f} ms"


def integers(text: str, option: str, *, least: int) -> list[int]:
    """``1,8,64`` as numbers; ends the command if it is not such a list."""
    found = []
    for word in filter(None, (part.strip().replace("_", "") for part in text.split(","))):
        if not word.isascii() or not word.isdigit() or int(word) < least:
            stop(f"{option}: {word!r} is not a whole number from {least}")
        found.append(int(word))
    if not found:
        stop(f"{option}: give at least one number")
    return found
