"""A run directory without room: a fleet that is ready outlives it, and stops in order."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launch.__main__ import app
from launch.engines.commands import engine_specs
from launch.fleet.file import FleetFile, parse_fleet
from launch.run import files, state
from launch.run.files import FileReports
from launch.run.messages import Messages
from launch.run.processes import ManagedProcess, StartError
from launch.run.state import read_state
from launch.run.supervisor import Fleet
from launch.run.transport import prove_transport
from policies.types import Transport
from tests.full_disk import Disk, limited_to
from tests.launch.conftest import fleet_values, soon
from tests.launch.run.test_proxy_side import collect, fleet_with, stream

pytestmark = pytest.mark.usefixtures("leaves_nothing")
MakeFleet = Callable[..., FleetFile]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(state, "replace_file", disk.replace)
    return disk


@pytest.mark.usefixtures("stubs")
async def test_a_crashed_engine_is_restarted_though_its_state_cannot_be_written(
    small_fleet: MakeFleet, tmp_path: Path, disk: Disk
) -> None:
    reported: list[str] = []
    values = small_fleet(restart="on_failure", restart_backoff_s=0.05)
    async with Fleet(values, tmp_path, with_proxy=False, notify=reported.append) as fleet:
        lost, other = fleet.state.processes
        before, kept = lost.pid, other.pid
        waiting = asyncio.create_task(fleet.wait())
        disk.error = errno.ENOSPC
        os.kill(before, signal.SIGKILL)
        await soon(lambda: waiting.done() or (lost.restarts == 1 and lost.status == "ready"))
        assert not waiting.done(), waiting
        assert lost.pid != before
        assert (other.pid, other.status, other.alive) == (kept, "ready", True)
        assert read_state(tmp_path).processes[0].pid == before
        warnings = [each for each in reported if "state.json" in each]
        assert len(warnings) == 1, reported
        assert warnings[0].startswith(f"warning: {tmp_path / 'state.json'} cannot be written (No space left on device)")
        # Nothing else changes, and yet the file becomes current.
        disk.error = None
        await soon(lambda: read_state(tmp_path) == fleet.state)
        assert reported[-1] == f"{tmp_path / 'state.json'} is written again"
        assert not waiting.done()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


def test_each_reason_is_reported_once_until_the_file_is_written_again(tmp_path: Path) -> None:
    reported: list[str] = []
    reports, path = FileReports(reported.append), tmp_path / "f"

    def attempt(error: int | None) -> None:
        with reports.tolerated(path, "so what"):
            if error is not None:
                raise OSError(error, os.strerror(error))

    for error in (None, errno.ENOSPC, errno.EROFS, errno.ENOSPC, errno.EROFS):
        attempt(error)
    assert reported == [
        f"warning: {path} cannot be written (No space left on device); so what",
        f"warning: {path} cannot be written (Read-only file system); so what",
    ]
    assert reports.failing(path)
    for error in (None, None, errno.ENOSPC):
        attempt(error)
    assert reported[2:] == [f"{path} is written again", reported[0]]


def test_messages_on_a_full_disk_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def write(self, text: str, /) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sys, "stdout", Full())
    messages = Messages()
    messages.notify("inst-0 ended unexpectedly")
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    messages.notify("inst-0 restarts [soon]")
    assert shown.getvalue().endswith(" inst-0 restarts [soon]\n")


def test_a_log_cut_by_a_full_disk_does_not_take_back_a_proven_transport(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = {"transfer": {"protocol": "tcp", "transport_proof": "require"}}
    values = fleet_values(count=2, kind="vllm", model="m", vllm=vllm)
    process = ManagedProcess(engine_specs(parse_fleet(values))[0], tmp_path / "engine.log")
    process.log_path.write_text("")
    room = os.statvfs(tmp_path)
    assert room.f_bavail
    with pytest.raises(StartError, match="its log does not show any transport"):
        prove_transport(process, Transport.TCP)
    full = os.statvfs_result((*room[:4], 0, *room[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    found, message = prove_transport(process, Transport.TCP)
    assert (found, message is not None and "is full" in message) == (Transport.TCP, True)
    with pytest.raises(StartError, match="its log does not show any transport"):
        prove_transport(process)
    process.log_path.write_text("RDMA device: mlx5_0 LID 3")
    with pytest.raises(StartError, match="its log shows rdma"):
        prove_transport(process, Transport.TCP)


def test_a_file_that_cannot_be_replaced_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    files.replace_file(path, b"old")
    with limited_to(10), pytest.raises(OSError, match="File too large") as caught:
        files.replace_file(path, b"new" * 1000)
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_replaced_file_may_be_a_link(tmp_path: Path) -> None:
    path, link = tmp_path / "state.json", tmp_path / "link.json"
    path.write_bytes(b"old")
    link.symlink_to(path)
    files.replace_file(link, b"new", sync=True)
    assert link.is_symlink()
    assert path.read_bytes() == b"new"


@pytest.mark.fleet
async def test_a_stop_drains_the_proxy_first_though_the_disk_is_full(tmp_path: Path, disk: Disk) -> None:
    reported: list[str] = []
    async with Fleet(fleet_with(stop_grace_s=0.1, grace_s=60), tmp_path, notify=reported.append) as fleet:
        processes = fleet.state.processes
        events = stream(fleet.fleet.proxy_url(), 150)  # longer than stop_grace_s
        assert (await anext(events)).startswith("data: ")
        rest = asyncio.create_task(collect(events))
        disk.error = errno.ENOSPC
    assert (await rest)[-1] == "data: [DONE]"
    assert {process.name: process.exit_code for process in processes}["proxy"] == 0
    assert not any(process.alive for process in processes)
    assert len([each for each in reported if "state.json" in each]) == 1


@pytest.mark.usefixtures("stubs")
def test_up_without_room_is_one_line_before_anything_starts(tmp_path: Path, disk: Disk) -> None:
    disk.error = errno.ENOSPC
    ended = CliRunner().invoke(app, ["up", "sim-4x", "--run-dir", str(tmp_path)])
    assert ended.exit_code == 2
    assert ended.output == (
        f"error: {tmp_path}: cannot be a run directory (No space left on device); give another --run-dir\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("stubs")
@pytest.mark.parametrize("left", [1, 5])  # the proof of room; the same, two engines that start and are ready
async def test_a_disk_that_fills_during_the_start_ends_it(
    small_fleet: MakeFleet, tmp_path: Path, disk: Disk, left: int
) -> None:
    disk.error, disk.left = errno.ENOSPC, left
    reported: list[str] = []
    fleet = Fleet(small_fleet(), tmp_path, with_proxy=False, notify=reported.append)
    with pytest.raises(StartError, match=r"state\.json: cannot be written \(No space left on device\)"):
        async with fleet:
            pytest.fail("started")
    assert not any(process.alive for process in fleet.state.processes)
