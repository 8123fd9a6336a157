"""A fleet on Ray whose run directory has no room; the cluster is a stub, so Ray is not needed."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from launch.fleet.file import parse_fleet
from launch.on_ray import fleet as on_ray
from launch.on_ray.actor import EngineActor, Report
from launch.on_ray.fleet import RayFleet
from launch.run import state
from launch.run.processes import StartError
from launch.run.state import read_state
from tests.full_disk import Disk
from tests.launch.conftest import fleet_values

LOG = b"one\ntwo\nthree\n"


class StubCluster:
    """A cluster of engines that are ready, with one log each."""

    def __init__(self) -> None:
        self.closed = False

    def open(self) -> str:
        return "joined"

    def place(self, timeout_s: float) -> None: ...

    def call(self, name: str, method: Callable[..., Any], timeout_s: float, offset: int = 0) -> bytes:
        assert method is EngineActor.report
        return msgspec.json.encode(
            Report(
                name=name,
                node_id="n",
                node_ip="127.0.0.1",
                pid=1,
                starts=1,
                since_unix_s=1.0,
                status="ready",
                instance={"name": name},
                log=LOG[offset:],
                log_offset=len(LOG),
            )
        )

    def close(self, stop_grace_s: float) -> None:
        self.closed = True


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(state, "replace_file", disk.replace)
    monkeypatch.setattr(on_ray, "replace_file", disk.replace)
    return disk


def fleet_in(folder: Path, reported: list[str]) -> tuple[RayFleet, StubCluster]:
    fleet = parse_fleet(fleet_values(count=1))
    runner = RayFleet(fleet, folder, source=Path("test.yaml"), with_proxy=False, notify=reported.append)
    cluster = StubCluster()
    runner._cluster = cluster  # type: ignore[assignment]
    return runner, cluster


async def test_the_engines_are_stopped_though_the_state_cannot_be_written(tmp_path: Path, disk: Disk) -> None:
    reported: list[str] = []
    runner, cluster = fleet_in(tmp_path, reported)
    async with runner:
        assert read_state(tmp_path).status == "ready"
        disk.error = errno.ENOSPC
    assert cluster.closed
    assert runner.state.status == "stopped"
    assert [each for each in reported if "state.json cannot be written (No space left on device)" in each] == [
        reported[-1]
    ]


async def test_a_change_that_cannot_be_written_is_reported_and_tried_again(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_ray, "_LOOK_S", 0.01)
    reported: list[str] = []
    runner, _ = fleet_in(tmp_path, reported)
    async with runner:
        disk.error = errno.ENOSPC
        runner.placed["inst-0"].restarts = 1
        await until(lambda: any("instances.json cannot be written" in each for each in reported), runner)
        disk.error = None
        await until(lambda: any("instances.json is written again" in each for each in reported), runner)
        assert msgspec.json.decode((tmp_path / "nodes.json").read_bytes())[0]["restarts"] == 1


async def test_a_piece_of_a_log_without_room_is_written_later(tmp_path: Path) -> None:
    reported: list[str] = []
    runner, _ = fleet_in(tmp_path, reported)
    log = tmp_path / "inst-0.log"
    log.mkdir()  # cannot be opened for writing
    async with runner:
        assert any(f"{log} cannot be written" in each for each in reported)
        log.rmdir()
        await until(lambda: log.exists() and log.read_bytes() == LOG, runner)


async def test_a_start_without_room_is_an_error_that_names_the_file(tmp_path: Path, disk: Disk) -> None:
    disk.error = errno.ENOSPC
    runner, cluster = fleet_in(tmp_path, [])
    with pytest.raises(StartError, match=r"state\.json: cannot be written \(No space left on device\)"):
        async with runner:
            pytest.fail("started")
    assert cluster.closed


async def until(holds: Callable[[], bool], runner: RayFleet) -> None:
    async with asyncio.timeout(20):
        while True:
            if holds():
                return
            assert runner._watching is not None
            assert not runner._watching.done(), runner._watching
            await asyncio.sleep(0.01)
