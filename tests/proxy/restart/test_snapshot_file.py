"""Snapshot files: whole or refused, and never readable by others."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from policies.costs.learned import LearnedCosts
from policies.costs.short_step import StepSums
from policies.predict.prefix_tree import PrefixRun
from proxy.restart.snapshot_file import (
    MAGIC,
    EnginePart,
    Header,
    Learned,
    Pins,
    Runs,
    SnapshotError,
    framed,
    read_snapshot,
    write_snapshot,
)

HEADER = Header(1e9, 2**64 - 1, 16, 1024)
PART = EnginePart("a", "http://127.0.0.1:1", 5.25, None)
LEARNED = Learned(
    LearnedCosts((0.1, 1e-5, 1e-9), {11: (0.5, 0.25, 3)}, {}, StepSums((0.5,) * 21, 31.5, 32)), {"/v1/completions": 3.5}
)
RECORDS = [
    framed(HEADER),
    framed(LEARNED),
    framed(PART),
    framed(Runs([PrefixRun(-1, bytes(16), 16.5)])),
    framed(Pins([(b"s\xff", "a", 1.5)])),
]
MOST = 1_000_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "snapshot"


def test_contents_come_back(path: Path) -> None:
    size = write_snapshot(path, [*RECORDS[:4], framed(Runs([PrefixRun(0, bytes(8))])), RECORDS[4]])
    assert size == path.stat().st_size
    contents = read_snapshot(path, MOST)
    assert contents.header == HEADER
    assert contents.learned == LEARNED
    assert contents.engines == [(PART, [PrefixRun(-1, bytes(16), 16.5), PrefixRun(0, bytes(8))])]
    assert contents.pins == [(b"s\xff", "a", 1.5)]


def test_it_is_readable_by_its_owner_only_whatever_was_there_before(path: Path) -> None:
    path.with_name("snapshot.new").write_text("left by a killed process")
    path.with_name("snapshot.new").chmod(0o666)
    before = os.umask(0)
    try:
        write_snapshot(path, RECORDS)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["snapshot"]


def test_a_write_that_fails_leaves_the_last_one_and_nothing_else(path: Path) -> None:
    def failing() -> Iterator[bytes]:
        yield RECORDS[0]
        raise OSError("no space left")

    write_snapshot(path, RECORDS)
    with pytest.raises(OSError, match="no space left"):
        write_snapshot(path, failing())
    assert read_snapshot(path, MOST).engines
    assert [each.name for each in path.parent.iterdir()] == ["snapshot"]


def test_every_truncation_and_every_changed_byte_is_noticed(path: Path) -> None:
    write_snapshot(path, RECORDS)
    whole = path.read_bytes()
    for at in range(len(whole)):
        for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]):
            path.write_bytes(damaged)
            with pytest.raises(SnapshotError):
                read_snapshot(path, MOST)


@pytest.mark.parametrize(
    "records",
    [
        [],
        [RECORDS[0]],
        RECORDS[1:],
        [RECORDS[0], *RECORDS[2:]],
        [*RECORDS[:2], RECORDS[3]],
        [*RECORDS[:2], RECORDS[0]],
        [*RECORDS[:2], RECORDS[1]],
        [*RECORDS[:2], b"\x00\x00\x00\x09short"],
        [*RECORDS[:2], b"\x00\x00\x00\x01\xc1"],
        [*RECORDS[:2], b"\x00\x00\x00\x05" + b"\x91" * 5],
        [framed(PART), framed(HEADER)],
    ],
)
def test_records_without_sense_are_refused_even_with_a_right_checksum(path: Path, records: list[bytes]) -> None:
    write_snapshot(path, records)
    with pytest.raises(SnapshotError, match="damaged"):
        read_snapshot(path, MOST)


def test_other_versions_large_files_and_files_open_to_others_are_refused(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_snapshot(path, MOST)
    size = write_snapshot(path, RECORDS)
    with pytest.raises(SnapshotError, match=r"snapshot\.max_bytes"):
        read_snapshot(path, size - 1)
    path.chmod(0o604)
    with pytest.raises(SnapshotError, match="mode is 604"):
        read_snapshot(path, MOST)
    path.chmod(0o600)
    path.write_bytes(MAGIC[:-1] + b"9" + path.read_bytes()[len(MAGIC) :])
    with pytest.raises(SnapshotError, match="another version"):
        read_snapshot(path, MOST)


def test_what_is_no_file_is_refused_without_waiting_for_it(path: Path) -> None:
    os.mkfifo(path, 0o600)
    with pytest.raises(SnapshotError, match="not a regular file"):
        read_snapshot(path, MOST)
    path.unlink()
    path.mkdir(0o700)
    with pytest.raises((SnapshotError, OSError)):
        read_snapshot(path, MOST)
