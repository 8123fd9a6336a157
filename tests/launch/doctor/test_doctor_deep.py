"""`doctor --deep`: its checks on constructed facts, and the parsers of the two topologies.

The matrices are laid out as `nvidia-smi topo -m` of current drivers prints them, separated by tabs with a legend
(NVIDIA/nccl issues 1453 and 1737), of older ones with the adapters' names in the heading (NVIDIA/nccl issue 246).
Mooncake's topology is the output of `transfer_engine_topology_dump` of version 0.3.13, without adapters as run here,
with them as its tests have it (mooncake-transfer-engine/tests/topology_test.cpp).
"""

from __future__ import annotations

from typing import Any

import pytest

from launch.doctor.facts import Deep, EnginePython, HandOffTest, NearNics, Rdma
from launch.doctor.probes import deep as deep_probe
from launch.doctor.probes.deep import HandOffError, HandOffs
from launch.doctor.probes.output import near_nics, topology_matrix
from launch.fleet.file import parse_fleet
from launch.hardware.gpus import GpuInventory
from tests.launch.doctor.machines import bad, fleet, found, h200, reported

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1

"""
TABS = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tPIX\tSYS\t0-31,64-95\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tSYS\tSYS\t32-63,96-127\t1\t\tN/A\n"
    "NIC0\tPIX\tSYS\t X \tSYS\t\t\t\t\n"
    "NIC1\tSYS\tSYS\tSYS\t X \t\t\t\t\n"
) + LEGEND
SPACES = """\
        GPU0    GPU1    mlx5_0  CPU Affinity
GPU0     X      PHB     PXB     0-9
GPU1    PHB      X      NODE    0-9
mlx5_0  PXB     NODE     X
"""
ALONE = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-15\t0\t\tN/A\n"
EMPTY = 'Local topology [te/discover]: {\n\t"cpu:0" : \n\t[\n\t\t[],\n\t\t[]\n\t]\n}\n\n'
FOUND = '{"cpu:0" : [["mlx5_0"],["mlx5_1"]],"cuda:1" : [["mlx5_1"],[]]}'
ADAPTERS = Rdma(kernel_devices=["mlx5_0", "mlx5_1"], active_devices=["mlx5_0", "mlx5_1"])


def deep(text: str = "", **values: Any) -> Deep:
    return Deep(matrix=topology_matrix(text), **values)


def test_a_matrix_with_tabs_and_a_legend() -> None:
    matrix = topology_matrix(TABS)
    assert matrix is not None
    assert matrix.gpus == ["GPU0", "GPU1"]
    assert matrix.nics == {"NIC0": "mlx5_0", "NIC1": "mlx5_1"}
    assert matrix.paths["GPU0"] == {"GPU1": "NV18", "NIC0": "PIX", "NIC1": "SYS"}
    assert matrix.numa == {"GPU0": "0", "GPU1": "1"}


def test_a_matrix_with_the_adapters_in_its_heading() -> None:
    matrix = topology_matrix(SPACES)
    assert matrix is not None
    assert matrix.nics == {"mlx5_0": "mlx5_0"}
    assert matrix.paths["GPU1"] == {"GPU0": "PHB", "mlx5_0": "NODE"}
    assert matrix.numa == {}


@pytest.mark.parametrize("text", ["", "NVIDIA-SMI has failed because it couldn't communicate with the driver.", LEGEND])
def test_output_without_a_matrix(text: str) -> None:
    assert topology_matrix(text) is None


def test_the_topology_that_mooncake_prints() -> None:
    assert near_nics(EMPTY) == {"cpu:0": NearNics()}
    assert near_nics(f"W1125 topology.cpp:201] log\n{FOUND}\n") == {
        "cpu:0": NearNics(preferred=["mlx5_0"], others=["mlx5_1"]),
        "cuda:1": NearNics(preferred=["mlx5_1"]),
    }
    assert near_nics("") is None
    assert near_nics('{"nics": [], "mems": []}') is None


def test_without_deep_there_are_no_such_findings() -> None:
    facts = h200(fleet=fleet())
    assert [reported(facts, name) for name in ("affinity", "mooncake-topology", "hand-off")] == ["", "", ""]


def test_adapters_that_are_far_from_a_gpu() -> None:
    far = h200(deep=deep(TABS), fleet=fleet("rdma"))
    assert "ok: GPU0: nearest adapters mlx5_0 (PIX)" in reported(far, "affinity")
    assert bad(far)["affinity"].startswith("warning: GPU1: nearest adapters mlx5_0, mlx5_1 (SYS)")
    assert "ok: NVLink connects GPU0, GPU1" in reported(far, "affinity")
    near = h200(deep=deep(TABS), fleet=fleet("nvlink"))
    assert "affinity" not in bad(near)
    apart = h200(deep=deep(SPACES), fleet=fleet("nvlink"))
    assert "warning: no NVLink between GPU0-GPU1 (PHB)" in bad(apart)["affinity"]
    alone = reported(h200(deep=deep(ALONE)), "affinity")
    assert alone == "note: no adapter in `nvidia-smi topo -m`"


def test_no_nvidia_smi() -> None:
    here = h200(deep=Deep(matrix_error="[Errno 2] No such file or directory: 'nvidia-smi'"))
    assert "note: `nvidia-smi topo -m`: [Errno 2] No such file" in reported(here, "affinity")
    cpu = h200(deep=Deep(), gpus=GpuInventory(reason="no NVIDIA driver"))
    assert reported(cpu, "affinity") == "note: no GPU, no paths to adapters"


def test_adapters_that_mooncake_does_not_find() -> None:
    whole = h200(deep=Deep(near_nics=near_nics(FOUND)), rdma=ADAPTERS, fleet=fleet("rdma"))
    assert "mooncake-topology" not in bad(whole)
    assert "ok: memory at cpu:0: mlx5_0, then 1 farther" in reported(whole, "mooncake-topology")
    part = h200(deep=Deep(near_nics={"cpu:0": NearNics(preferred=["mlx5_0"])}), rdma=ADAPTERS, fleet=fleet("rdma"))
    assert bad(part)["mooncake-topology"].startswith("warning: Mooncake does not find the adapters mlx5_1")
    none = h200(deep=Deep(near_nics=near_nics(EMPTY)), rdma=ADAPTERS, fleet=fleet("rdma"))
    assert bad(none)["mooncake-topology"].startswith("problem: Mooncake does not find the adapters mlx5_0, mlx5_1")
    tcp = reported(h200(deep=Deep(near_nics=near_nics(EMPTY))), "mooncake-topology")
    assert tcp.startswith("note: Mooncake finds no adapter: KV moves over TCP")
    absent = h200(deep=Deep(near_nics_error="No module named 'mooncake'"))
    assert reported(absent, "mooncake-topology") == "note: Mooncake's topology: No module named 'mooncake'"


def made(**values: Any) -> Deep:
    whole: dict[str, Any] = {"tokens": 512, "pulled_tokens": 512, "size_bytes": 50_331_648, "same_text": True}
    return Deep(hand_offs=[HandOffTest(source="a", target="b", **{**whole, **values})])


def test_hand_offs_that_fail() -> None:
    assert reported(h200(deep=made()), "hand-off") == "ok: a to b: 512 tokens, 50,331,648 bytes pulled, same answer"
    other = bad(h200(deep=made(same_text=False)))["hand-off"]
    assert other.startswith("problem: a to b: 512 tokens, 50,331,648 bytes, but D's answer differs from P's own")
    assert bad(h200(deep=made(error="no answer within 60 s")))["hand-off"].startswith("problem: a to b: no answer")
    silent = bad(h200(deep=made(pulled_tokens=None, size_bytes=None)))["hand-off"]
    assert silent.startswith("warning: a to b: 512 tokens; D does not report pulled tokens")
    off = reported(h200(deep=Deep(hand_offs_error="no fleet is given (--fleet)")), "hand-off")
    assert off == "note: no hand-off was made: no fleet is given (--fleet)"


def no_hand_off(values: dict[str, Any] | None, made_by: HandOffs | None, monkeypatch: pytest.MonkeyPatch) -> str:
    """Remedy of the finding, where no hand-off could be made."""
    monkeypatch.setattr(deep_probe, "answer", lambda *_: (None, "not here"))
    facts = None if values is None else fleet()
    parsed = None if values is None else parse_fleet({"kind": "sim", "count": 2, **values})
    gathered = deep_probe.gather_deep(EnginePython(executable="python"), {}, parsed, facts, made_by)
    [result] = [one for one in found(h200(deep=gathered, fleet=facts)) if one.check == "hand-off"]
    return result.fix


def test_the_remedy_fits_the_reason_why_no_hand_off_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_: object) -> list[HandOffTest]:
        raise HandOffError("the fleet is busy", "run this again while the fleet is idle")

    assert no_hand_off(None, busy, monkeypatch) == "give --fleet FILE of a running fleet"
    assert no_hand_off({"role": "none"}, busy, monkeypatch).startswith("give its engines roles")
    assert no_hand_off({"role": "kv_both"}, None, monkeypatch) == "run `warmroute doctor`"
    assert no_hand_off({"role": "kv_both"}, busy, monkeypatch) == "run this again while the fleet is idle"
