"""Stages of hand-offs, from the records of the connector's hooks (`launch.transfer_hooks`): pairing, decomposition.

A hand-off has four kinds of records: ``prefill`` and ``send`` of P, ``receive`` and ``decode`` of D; with tensor
parallelism a ``send`` for each pair of ranks and a ``receive`` for each rank of D.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from bench.analysis.output import Sheet

DONE = "done"


class HookRecord(msgspec.Struct, kw_only=True):
    """Common part of the records; times are readings of the monotonic clock of one boot."""

    transfer_id: str
    request_id: str
    engine_id: str
    boot: str
    outcome: str
    unix_minus_monotonic_s: float


class PrefillRecord(HookRecord, tag_field="kind", tag="prefill", kw_only=True):
    """The request on P, by its scheduler."""

    arrived_s: float
    scheduled_s: float
    finished_s: float
    blocks: int


class SendRecord(HookRecord, tag_field="kind", tag="send", kw_only=True):
    """One rank of P answers the pull of one rank of D."""

    tp_rank: int
    peer_rank: int
    asked_s: float
    ready_s: float | None
    wire_begin_s: float | None
    wire_end_s: float | None
    size_bytes: int
    blocks: int
    pieces: int
    batch: int


class ReceiveRecord(HookRecord, tag_field="kind", tag="receive", kw_only=True):
    """One rank of D pulls."""

    tp_rank: int
    started_s: float
    asked_s: float | None
    answered_s: float | None
    collected_s: float | None


class DecodeRecord(HookRecord, tag_field="kind", tag="decode", kw_only=True):
    """The request on D, by its scheduler."""

    arrived_s: float
    allocated_s: float
    admitted_s: float | None
    tokens: int


AnyRecord = PrefillRecord | SendRecord | ReceiveRecord | DecodeRecord


class TransferStages(msgspec.Struct, kw_only=True):
    """One hand-off, decomposed. The first three and the last four follow each other; seconds."""

    transfer_id: str
    sender: str
    """Engine id of P."""
    receiver: str
    size_bytes: int
    blocks: int
    pieces: int
    """Pieces of memory in the writes, those of other transfers in the same writes included."""
    batch: int
    """Most transfers that shared one write."""
    p_queue_s: float
    """From the request's arrival on P until its prefill is scheduled."""
    p_prefill_s: float
    d_queue_s: float
    """From arrival on D until it has blocks for the pull."""
    ready_wait_s: float
    """P has been asked and its prefill is not done."""
    control_s: float
    """From blocks on D until D's engine has noticed the end of the pull, less waiting and wire."""
    wire_s: float
    admission_s: float
    """From then until the request is in D's batch."""
    connect_s: float
    """Part of ``control_s``: from the worker's start of the pull until it asks P; a new peer is looked up meanwhile."""
    request_s: float | None
    """Part of ``control_s``: from blocks on D until P has the request; None: P and D do not share a clock."""
    answer_s: float | None
    """Part of ``control_s``: from the end of the wire until D's engine has noticed; None as above, or no bytes."""


class PairedRecords(NamedTuple):
    """Hand-offs by transfer id, and what is missing of the others."""

    complete: dict[str, TransferStages]
    incomplete: dict[str, str]


def read_records(content: bytes) -> list[AnyRecord]:
    """The records of a file, or of a part of one that begins with a whole line; a last, torn line is left out.

    Raises:
        msgspec.MsgspecError: a line is no record.
    """
    lines = content[: content.rfind(b"\n") + 1].splitlines()
    decoder = msgspec.json.Decoder(AnyRecord)
    return [decoder.decode(line) for line in lines if line]


def pair_records(records: Iterable[AnyRecord]) -> PairedRecords:
    """Match the records of both sides by transfer id, and ranks."""
    groups: dict[str, list[AnyRecord]] = defaultdict(list)
    for record in records:
        groups[record.transfer_id].append(record)
    complete, incomplete = {}, {}
    for transfer_id, group in groups.items():
        found = _stages(transfer_id, group)
        if isinstance(found, str):
            incomplete[transfer_id] = found
        else:
            complete[transfer_id] = found
    return PairedRecords(complete, incomplete)


def _stages(transfer_id: str, group: Sequence[AnyRecord]) -> TransferStages | str:
    """The stages of one hand-off, or a sentence on why there are none."""
    prefills = [each for each in group if isinstance(each, PrefillRecord)]
    sends = [each for each in group if isinstance(each, SendRecord)]
    receives = [each for each in group if isinstance(each, ReceiveRecord)]
    decodes = [each for each in group if isinstance(each, DecodeRecord)]
    failed = [f"{type(each).__name__}: {each.outcome}" for each in group if each.outcome != DONE]
    if failed:
        return ", ".join(failed)
    missing = [
        name
        for name, found in (("prefill", prefills), ("send", sends), ("receive", receives), ("decode", decodes))
        if not found
    ]
    if missing:
        return f"no record of kind {', '.join(missing)}"
    ranks = [(each.tp_rank, each.peer_rank) for each in sends]
    if len(prefills) > 1 or len(decodes) > 1 or len(set(ranks)) < len(ranks):
        return "several transfers have this id"
    if {each.peer_rank for each in sends} != {each.tp_rank for each in receives}:
        return "senders and receivers are of different ranks"
    (prefill,), (decode,) = prefills, decodes
    collected = [each.collected_s for each in receives]
    admitted_s = decode.admitted_s
    if admitted_s is None or None in collected or any(each.ready_s is None for each in sends):
        return "a time is missing"
    collected_s = max(each for each in collected if each is not None)
    begins = [each.wire_begin_s for each in sends if each.wire_begin_s is not None]
    ends = [each.wire_end_s for each in sends if each.wire_end_s is not None]
    wire_s = max(ends) - min(begins) if begins and ends else 0.0
    ready_wait_s = max(max(0.0, (each.ready_s or 0.0) - each.asked_s) for each in sends)
    one_clock = prefill.boot == decode.boot
    return TransferStages(
        transfer_id=transfer_id,
        sender=prefill.engine_id,
        receiver=decode.engine_id,
        size_bytes=sum(each.size_bytes for each in sends),
        blocks=max(each.blocks for each in sends),
        pieces=sum(each.pieces for each in sends),
        batch=max(each.batch for each in sends),
        p_queue_s=max(0.0, prefill.scheduled_s - prefill.arrived_s),
        p_prefill_s=prefill.finished_s - prefill.scheduled_s,
        d_queue_s=max(0.0, decode.allocated_s - decode.arrived_s),
        ready_wait_s=ready_wait_s,
        control_s=max(0.0, collected_s - decode.allocated_s - ready_wait_s - wire_s),
        wire_s=wire_s,
        admission_s=max(0.0, admitted_s - collected_s),  # D that has the whole prompt does not wait
        connect_s=max((each.asked_s or each.started_s) - each.started_s for each in receives),
        request_s=min(each.asked_s for each in sends) - decode.allocated_s if one_clock else None,
        answer_s=collected_s - max(ends) if one_clock and ends else None,
    )


def stages_sheet(groups: Iterable[tuple[Sequence[str], Sequence[TransferStages]]], keys: Sequence[str]) -> Sheet:
    """Medians of every group in milliseconds.

    Args:
        groups: (cells that name the group, its hand-offs).
        keys: titles of those cells.
    """
    cells = []
    for name, found in groups:
        if not found:
            continue
        wire = median(each.size_bytes / each.wire_s if each.wire_s > 0 else 0.0 for each in found)
        cells.append(
            (
                *name,
                f"{len(found)}",
                f"{median(each.size_bytes for each in found) / 2**20:,.1f}",
                f"{median(each.pieces for each in found):,.0f}",
                *(
                    _ms(median(values))
                    for values in (
                        [each.p_queue_s for each in found],
                        [each.p_prefill_s for each in found],
                        [each.d_queue_s for each in found],
                        [each.ready_wait_s for each in found],
                        [each.control_s for each in found],
                        [each.wire_s for each in found],
                        [each.admission_s for each in found],
                    )
                ),
                f"{wire / 1e9:.2f}" if wire else "-",
            )
        )
    return Sheet(
        "Stages of a hand-off by the connector's hooks, medians in ms",
        (
            *keys,
            "n",
            "MiB",
            "pieces",
            "queue on P",
            "prefill",
            "queue on D",
            "wait for P",
            "control",
            "wire",
            "admission",
            "wire GB/s",
        ),
        cells,
        left=0,
        notes=[
            "MiB: bytes written. Wait for P: D has asked, the prefill is not done. Control: all of the pull but "
            "waiting and wire. Admission: from the end of the pull until the request is in D's batch."
        ],
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.1f}"
