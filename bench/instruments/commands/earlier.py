"""Earlier records of several instruments as the record of one calibration (``warmroute calibrate --record``)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from bench.analysis.output import stop

if TYPE_CHECKING:
    from bench.instruments.record import InstrumentRecord

_COUNT = re.compile(r"^\s*\d+\s*[x×]\s*", re.IGNORECASE)
_WITH_TRANSPORT = re.compile(r"([a-z]+)=(.+)")


class GivenRecord(NamedTuple):
    """One ``--record``."""

    path: Path
    transport: str | None
    """That its transfers went by; None: the calibration's."""


def source_of(text: str) -> GivenRecord:
    """The value of ``--record``: a path, perhaps with ``TRANSPORT=`` before it."""
    found = _WITH_TRANSPORT.fullmatch(text)
    return GivenRecord(Path(found[2]), found[1]) if found else GivenRecord(Path(text), None)


def earlier_record(sources: list[GivenRecord], name: str) -> InstrumentRecord:
    """Earlier records as one of a profile called ``name``; ends the command if they are none."""
    record, *others = (_read(each.path) for each in sources)
    first = sources[0]
    if record.instrument != "calibrate" or not isinstance(record.facts, dict) or first.transport is not None:
        stop(f"--record {first.path}: a record of {record.instrument}; give one that `warmroute calibrate` wrote first")
    record.facts["name"] = name
    moved: dict[str, list[Any]] = {}
    replaced: list[Any] = []
    for source, other in zip(sources[1:], others, strict=True):
        _refuse_others(first.path, record, source.path, other)
        if other.instrument == "transfer":
            moved.setdefault(_transport_of(source, record.facts.get("transport")), []).extend(other.rows)
        elif other.instrument == "interference" and source.transport is None:
            replaced += other.rows
        else:
            stop(
                f"--record {source.path}: a record of {other.instrument}; further records are those of "
                "`measure interference` and `measure transfer`; only the latter take a TRANSPORT="
            )
    if replaced:
        record.rows["interference"] = replaced
    own = moved.pop(record.facts.get("transport") or "", None)
    if own is not None:
        record.rows["transfers"] = own
    if moved:
        record.rows["further_transfers"] = record.rows.get("further_transfers", {}) | moved
    if others:
        record.warnings = [line for other in others for line in other.warnings]
    return record


def _refuse_others(first: Path, record: InstrumentRecord, path: Path, other: InstrumentRecord) -> None:
    """End the command if two records are of different engines: their fit would be of neither."""
    for what, one, two in (
        ("hardware", _hardware(record), _hardware(other)),
        ("model", {each.model for each in record.engines}, {each.model for each in other.engines}),
        ("engine version", {each.version for each in record.engines}, {each.version for each in other.engines}),
    ):
        ours, theirs = (sorted(each or "" for each in given) for given in (one, two))
        # Records of before have no hardware, and some engines no version.
        if all(ours) and all(theirs) and ours and theirs and ours != theirs:
            stop(
                f"--record {path}: {what} {', '.join(theirs)}, but {first} has {', '.join(ours)}: not the same engines"
            )


def _hardware(record: InstrumentRecord) -> set[str]:
    """Without the number of devices, as it is written by hand and a record may be of one engine only."""
    return {_COUNT.sub("", record.hardware).strip().lower()}


def _transport_of(source: GivenRecord, default: str | None) -> str:
    """The transport of a record of transfers, which does not name it; ends the command if it is not known."""
    from policies.types import Transport

    transport = source.transport or default
    if transport is None or (source.transport is not None and transport not in set(Transport)):
        known = ", ".join(Transport)
        stop(f"--record {source.path}: name the transport, --record TRANSPORT={source.path}; one of {known}")
    return transport


def _read(path: Path) -> InstrumentRecord:
    from bench.instruments.record import read_record

    try:
        return read_record(path)
    except OSError as error:
        stop(f"--record {path}: {error.strerror}")
    except msgspec.MsgspecError as error:
        stop(f"--record {path}: not a record of an instrument: {error}")
