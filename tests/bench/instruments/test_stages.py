"""Pairing of the hooks' records, and the decomposition of a hand-off, from records with known times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.instruments.engine import InstrumentError
from bench.instruments.hooked.hook_file import HookFile
from bench.instruments.hooked.stages import (
    AnyRecord,
    DecodeRecord,
    PrefillRecord,
    ReceiveRecord,
    SendRecord,
    pair_records,
    read_records,
    stages_sheet,
)


def records(transfer_id: str = "t", *, ranks: int = 1, boots: tuple[str, str] = ("b", "b")) -> list[AnyRecord]:
    """P: arrives at 0, prefill from 1 to 5. D: arrives at 2, has blocks at 3, asks P at 3.6; wire from 6 to 8."""
    common: dict[str, Any] = {"transfer_id": transfer_id, "outcome": "done", "unix_minus_monotonic_s": 0.0}
    p, d = (
        {"engine_id": name, "boot": boot, "request_id": name, **common} for name, boot in zip("pd", boots, strict=True)
    )
    found: list[AnyRecord] = [
        PrefillRecord(**p, arrived_s=0.0, scheduled_s=1.0, finished_s=5.0, blocks=10),
        DecodeRecord(**d, arrived_s=2.0, allocated_s=3.0, admitted_s=9.5, tokens=160),
    ]
    for rank in range(ranks):
        found.append(
            SendRecord(
                **p,
                tp_rank=rank,
                peer_rank=rank,
                asked_s=3.75,
                ready_s=5.25,
                wire_begin_s=6.0 + rank,
                wire_end_s=8.0,
                size_bytes=1_000,
                blocks=10,
                pieces=4,
                batch=1,
            )
        )
        found.append(ReceiveRecord(**d, tp_rank=rank, started_s=3.125, asked_s=3.625, answered_s=8.5, collected_s=9.0))
    return found


def test_a_hand_off_is_decomposed() -> None:
    found = pair_records(records()).complete["t"]
    assert (found.sender, found.receiver, found.size_bytes, found.pieces) == ("p", "d", 1_000, 4)
    assert (found.p_queue_s, found.p_prefill_s, found.d_queue_s) == (1.0, 4.0, 1.0)
    assert (found.ready_wait_s, found.wire_s, found.control_s, found.admission_s) == (1.5, 2.0, 2.5, 0.5)
    assert (found.connect_s, found.request_s, found.answer_s) == (0.5, 0.75, 1.0)
    # From blocks on D until it is in D's batch, nothing is left out.
    assert found.ready_wait_s + found.control_s + found.wire_s + found.admission_s == 9.5 - 3.0


def test_ranks_are_added_up_and_their_wires_overlap() -> None:
    found = pair_records(records(ranks=2)).complete["t"]
    assert (found.size_bytes, found.pieces, found.wire_s) == (2_000, 8, 2.0)


def test_times_between_hosts_are_left_out() -> None:
    found = pair_records(records(boots=("one", "other"))).complete["t"]
    assert (found.request_s, found.answer_s) == (None, None)
    assert found.control_s == 2.5


@pytest.mark.parametrize("place", range(4))
def test_a_missing_record_is_named(place: int) -> None:
    whole = records()
    (left_out,) = whole[place : place + 1]
    found = pair_records([each for each in whole if each is not left_out])
    kind = str(left_out.__struct_config__.tag)
    assert (found.complete, found.incomplete) == ({}, {"t": f"no record of kind {kind}"})


def test_failures_ranks_and_repeated_ids_do_not_pair() -> None:
    failed = records("failed")
    failed[2].outcome = "failed with -1"
    times = records("times")
    assert isinstance(times[1], DecodeRecord)
    times[1].admitted_s = None
    ranks = records("ranks", ranks=2)[:-1]
    twice = records("twice") + records("twice")
    found = pair_records([*failed, *times, *ranks, *twice, *records("whole")])
    assert set(found.complete) == {"whole"}
    assert found.incomplete == {
        "failed": "SendRecord: failed with -1",
        "times": "a time is missing",
        "ranks": "senders and receivers are of different ranks",
        "twice": "several transfers have this id",
    }


def written(found: list[AnyRecord]) -> bytes:
    return b"".join(msgspec.json.encode(each) + b"\n" for each in found)


async def test_records_are_read_from_now_on_without_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_bytes(written(records("earlier")))
    hooks = HookFile(path)
    with path.open("ab") as file:
        file.write(written(records("now")) + b'{"kind": "se')
    found = await hooks.of(["now"])
    assert set(found.complete) == {"now"}
    assert not found.incomplete
    assert read_records(b"torn") == []


def test_a_file_that_is_missing_or_another_is_an_error_that_names_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    with pytest.raises(InstrumentError, match="measure hooks apply"):
        HookFile(path).read()
    hooks = HookFile(path)
    path.write_bytes(b"not JSON\n")
    with pytest.raises(InstrumentError, match="not a file of the connector's hooks"):
        hooks.read()


async def test_a_hand_off_that_stays_incomplete_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.instruments.hooked.hook_file._WAIT_S", 0.0)
    path = tmp_path / "records.jsonl"
    hooks = HookFile(path)
    path.write_bytes(written([*records("whole"), *records("part")[:2]]))
    found = await hooks.of(["whole", "part", "never"])
    assert set(found.complete) == {"whole"}
    assert found.incomplete == {"part": "no record of kind send, receive", "never": "no records"}


def test_the_table_has_a_line_for_each_group_with_records() -> None:
    stages = list(pair_records(records()).complete.values())
    sheet = stages_sheet([(("0",), stages), (("1",), [])], ("background",))
    (line,) = sheet.rows
    assert dict(zip(sheet.columns, line, strict=True)) == {
        "background": "0",
        "n": "1",
        "MiB": "0.0",
        "pieces": "4",
        "queue on P": "1,000.0",
        "prefill": "4,000.0",
        "queue on D": "1,000.0",
        "wait for P": "1,500.0",
        "control": "2,500.0",
        "wire": "2,000.0",
        "admission": "500.0",
        "wire GB/s": "0.00",
    }
