"""GPU telemetry: rows, metrics, one owner, and a clear message where there is no GPU."""

from __future__ import annotations

import asyncio
import csv
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pynvml
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from launch.arm import run_arm
from launch.demo.run import make_trace, replay_options
from launch.hardware.gpus import read_inventory
from launch.hardware.telemetry import COLUMNS, TelemetryCollector, TelemetrySampler
from launch.hardware.telemetry_cli import _metrics_server
from tests.launch.conftest import REPOSITORY, free_base
from tests.launch.demo.test_demo import SMALL, settings
from tests.launch.fake_nvml import FakeGpu, FakeNvml


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


async def sampled(sampler: TelemetrySampler, count: int) -> None:
    async with asyncio.timeout(20):
        while sampler.samples < count:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_one_row_for_each_gpu_and_sample(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.csv"
    library = FakeNvml(
        FakeGpu(uuid="GPU-a", processes=[(41, 1 << 30), (42, None)]),
        FakeGpu(uuid="GPU-b", nvlink_kib=None, processes=None),
    )
    async with TelemetrySampler(path, interval_s=0.01, library=library) as sampler:
        await sampled(sampler, 3)
        while_running = rows(path)
        assert sampler.running
    assert len(while_running) >= 6  # flushed at once
    found = rows(path)
    assert len(found) == 2 * sampler.samples
    assert sampler.problem is None
    assert library.opened == 0
    first, second = found[:2]
    assert list(first) == list(COLUMNS)
    assert float(first.pop("unix_s")) > 1.7e9
    assert first == {
        "gpu": "0",
        "uuid": "GPU-a",
        "utilisation_percent": "87",
        "memory_used_bytes": str(600 << 20),
        "sm_clock_mhz": "1980",
        "power_w": "512.250",
        "temperature_c": "61",
        "pcie_tx_bytes_per_s": "3000000",
        "pcie_rx_bytes_per_s": "3001000",
        "nvlink_tx_bytes": "1024000",
        "nvlink_rx_bytes": "2048000",
        "processes": f"41:{1 << 30} 42:",
    }
    assert (second["uuid"], second["nvlink_tx_bytes"], second["processes"]) == ("GPU-b", "", "")


async def test_a_lost_gpu_leaves_empty_cells_and_the_rest_goes_on(tmp_path: Path) -> None:
    broken, well = FakeGpu(uuid="GPU-a"), FakeGpu(uuid="GPU-b")
    async with TelemetrySampler(tmp_path / "t.csv", interval_s=0.01, library=FakeNvml(broken, well)) as sampler:
        await sampled(sampler, 1)
        broken.lost = True
        await sampled(sampler, sampler.samples + 2)
        last = {sample.uuid: sample for sample in sampler.latest}
    assert (last["GPU-a"].power_w, last["GPU-b"].power_w) == (None, 512.25)
    assert sampler.problem is None


async def test_no_gpu_writes_nothing_and_gives_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.csv"
    for library in (FakeNvml(fails=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND), FakeNvml()):
        async with TelemetrySampler(path, library=library) as sampler:
            assert not sampler.running
        assert "GPU" in (sampler.problem or "") or "driver" in (sampler.problem or "")
        assert library.opened == 0
    assert not path.exists()


FULL = Path("/dev/full")
HAS_FULL = FULL.exists()


async def test_a_file_that_cannot_be_written_is_reported_and_not_raised(tmp_path: Path) -> None:
    library = FakeNvml(FakeGpu())
    async with TelemetrySampler(tmp_path / "missing" / "t.csv", library=library) as sampler:
        assert not sampler.running
    assert "cannot be written" in (sampler.problem or "")
    assert library.opened == 0
    if HAS_FULL:
        async with TelemetrySampler(FULL, interval_s=0.01, library=library) as sampler, asyncio.timeout(20):
            await sampler.finished()
        assert "No space left" in (sampler.problem or "")
        assert library.opened == 0


async def test_leaving_by_an_error_or_a_cancellation_closes_everything(tmp_path: Path) -> None:
    library = FakeNvml(FakeGpu())
    entered = asyncio.Event()

    async def watch() -> None:
        async with TelemetrySampler(tmp_path / "t.csv", interval_s=0.01, library=library):
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(watch())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert library.opened == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gpu-telemetry")]
    reads = library.reads
    await asyncio.sleep(0.05)
    assert library.reads == reads


async def test_the_latest_sample_as_prometheus_metrics() -> None:
    library = FakeNvml(
        FakeGpu(uuid="GPU-a", processes=[(1, 2)]), FakeGpu(uuid="GPU-b", nvlink_kib=None, numa_node=None)
    )
    async with TelemetrySampler(None, interval_s=0.01, library=library) as sampler:
        await sampled(sampler, 1)
        registry = CollectorRegistry()
        registry.register(TelemetryCollector(sampler))
        text = generate_latest(registry).decode()
        with _metrics_server(sampler, "127.0.0.1", free_base()) as url:
            assert url is not None
            async with httpx.AsyncClient() as client:
                served = (await client.get(url)).text
    for line in (
        'warmroute_gpu_utilisation_ratio{gpu="0",uuid="GPU-a"} 0.87',
        'warmroute_gpu_power_watts{gpu="1",uuid="GPU-b"} 512.25',
        'warmroute_gpu_sm_clock_hertz{gpu="0",uuid="GPU-a"} 1.98e+09',
        'warmroute_gpu_processes{gpu="0",uuid="GPU-a"} 1.0',
        'warmroute_gpu_nvlink_rx_bytes_total{gpu="0",uuid="GPU-a"} 2.048e+06',
    ):
        assert line in text
        assert line in served
    assert 'nvlink_rx_bytes_total{gpu="1"' not in text


def test_an_interval_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        TelemetrySampler(None, interval_s=0)


def command(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "launch", "telemetry", *arguments],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def test_the_command_on_this_machine(tmp_path: Path) -> None:
    nothing = command()
    assert "nothing to do" in nothing.communicate(timeout=60)[1]
    assert nothing.returncode == 2
    out = tmp_path / "t.csv"
    process = command("--out", str(out), "--interval", "0.1")
    if read_inventory().gpus:
        assert process.stdout is not None
        assert "sampling every 0.1 s" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert (process.returncode, out.exists()) == (130, True)
    else:
        assert "no GPU telemetry: " in process.communicate(timeout=60)[1]
        assert (process.returncode, out.exists()) == (2, False)


@pytest.mark.fleet
@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize(
    "library", [FakeNvml(FakeGpu(), FakeGpu()), FakeNvml(fails=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)]
)
async def test_an_arm_keeps_the_telemetry_of_its_replay(
    library: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.hardware.gpus.pynvml_library", lambda: library)
    chosen = settings(tmp_path, trace={**SMALL["trace"], "requests": 12})
    trace = await asyncio.to_thread(make_trace, chosen, tmp_path / "trace.jsonl")
    arm_dir = tmp_path / "arm"
    fleet = chosen.fleet_of(chosen.arms[0], free_base())
    result = await run_arm("arm", fleet, trace, replay_options(chosen), arm_dir)
    assert len(result.run.records) == 12
    assert library.opened == 0
    if library.gpus:
        assert result.telemetry == ""
        assert {row["gpu"] for row in rows(arm_dir / "telemetry.csv")} == {"0", "1"}
    else:
        assert result.telemetry == "no NVIDIA driver: libnvidia-ml.so.1 is not installed"
        assert not (arm_dir / "telemetry.csv").exists()
    # Simulated engines use no GPU, even if other processes use those of this machine.
    assert (result.proof.gpus.status, result.proof.warnings) == ("none", [])


def test_the_document_names_every_column() -> None:
    text = (REPOSITORY / "docs" / "fleet.md").read_text(encoding="utf-8")
    table = text[text.index("## GPU telemetry") :]
    assert [name for name in COLUMNS if f"`{name}`" not in table] == []
