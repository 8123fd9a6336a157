"""EFA and RDMA in a fleet file: the engines' environment, and the published rules for writes and queues."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from typer.testing import CliRunner

from launch.__main__ import app
from launch.engines.commands import engine_specs
from launch.fleet.fabric import (
    BATCH,
    BLOCK_BYTES,
    EFA_INSTANCES,
    bench_sizes,
    instances_with,
    least_write_bytes,
    share_of_peak,
    writes_in_flight,
)
from launch.fleet.file import FLEETS, FleetError, parse_fleet
from launch.fleet.sections import FabricSettings
from launch.run.effective import effective_config_problems
from launch.run.processes import ManagedProcess


def fleet(protocol: str, fabric: dict[str, Any] | None = None, **values: Any) -> dict[str, Any]:
    transfer = {"protocol": protocol, **({"fabric": fabric} if fabric is not None else {})}
    return {"kind": "vllm", "count": 2, "model": "m", "vllm": {"transfer": transfer}, **values}


def variables(values: dict[str, Any]) -> dict[str, str]:
    """The variables of the first engine by which libfabric and Mooncake are set."""
    environment = engine_specs(parse_fleet(values))[0].environment
    return {name: value for name, value in environment.items() if name.startswith(("MC_", "FI_"))}


def test_every_key_becomes_its_variable() -> None:
    both = {"nics": ["a", "b"], "max_wr": 512, "max_cqe": 8192, "cqs_per_nic": 2}
    common = {
        "MC_TE_FILTERS": "a,b",
        "MC_MAX_WR": "512",
        "MC_MAX_CQE_PER_CTX": "8192",
        "MC_NUM_CQ_PER_CTX": "2",
    }
    assert variables(fleet("rdma", {**both, "gid_index": 3, "traffic_class": 106, "slice_bytes": 131072})) == {
        **common,
        "MC_GID_INDEX": "3",
        "MC_IB_TC": "106",
        "MC_SLICE_SIZE": "131072",
    }
    efa = {"device_rdma": False, "tx_depth": 16384, "cq_threads": 0}
    assert variables(fleet("efa", {**both, **efa})) == {
        **common,
        "FI_PROVIDER": "efa",
        "FI_EFA_ENABLE_SHM_TRANSFER": "0",
        "FI_EFA_USE_DEVICE_RDMA": "0",
        "FI_EFA_TX_SIZE": "16384",
        "MC_EFA_CQ_THREADS": "0",
    }


def test_what_is_not_given_is_left_to_mooncake() -> None:
    assert variables(fleet("rdma")) == {}
    assert set(variables(fleet("efa"))) == {"FI_PROVIDER", "FI_EFA_ENABLE_SHM_TRANSFER", "FI_EFA_USE_DEVICE_RDMA"}
    assert variables(fleet("tcp")) == {}
    assert variables(fleet("nvlink")) == {"MC_INTRANODE_NVLINK": "1"}


@pytest.mark.parametrize(
    ("protocol", "fabric", "message"),
    [
        ("efa", {"gid_index": 3}, "fabric.gid_index: is for protocol rdma, not efa"),
        ("rdma", {"device_rdma": True}, "fabric.device_rdma: is for protocol efa, not rdma"),
        ("tcp", {"max_wr": 256}, "fabric.max_wr: is for protocol efa or rdma, not tcp"),
        ("nvlink", {"library_path": ["/x"]}, "fabric.library_path: is for protocol efa or rdma, not nvlink"),
        ("rdma", {"max_wr": 65536}, "vllm.transfer.fabric.max_wr"),
        ("rdma", {"nics": []}, "vllm.transfer.fabric.nics"),
    ],
)
def test_a_key_for_another_transport_is_refused(protocol: str, fabric: dict[str, Any], message: str) -> None:
    with pytest.raises(FleetError) as caught:
        parse_fleet(fleet(protocol, fabric))
    assert message in str(caught.value)


def test_the_own_libfabric_comes_before_inherited_directories() -> None:
    def path(values: dict[str, Any], inherited: dict[str, str]) -> str | None:
        return engine_specs(parse_fleet(values))[0].complete_environment(inherited).get("LD_LIBRARY_PATH")

    aws = "/opt/amazon/efa/lib:/opt/amazon/efa/lib64"
    assert path(fleet("efa"), {"LD_LIBRARY_PATH": "/cuda"}) == f"{aws}:/cuda"
    assert path(fleet("efa"), {}) == aws
    assert path(fleet("efa", env={"LD_LIBRARY_PATH": "/mine"}), {"LD_LIBRARY_PATH": "/cuda"}) == f"{aws}:/mine"
    assert path(fleet("efa", {"library_path": []}), {"LD_LIBRARY_PATH": "/cuda"}) == "/cuda"
    assert path(fleet("rdma", {"library_path": ["/ofed"]}), {"LD_LIBRARY_PATH": "/cuda"}) == "/ofed:/cuda"
    assert path(fleet("rdma"), {}) is None
    assert path(fleet("efa", role="none", vllm={}), {}) is None


def test_the_printed_command_keeps_the_shells_own_directories() -> None:
    printed = CliRunner().invoke(app, ["up", "efa-p5", "--dry-run"]).output
    assert "LD_LIBRARY_PATH=/opt/amazon/efa/lib:/opt/amazon/efa/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} " in printed
    own = CliRunner().invoke(app, ["up", "efa-p5", "--dry-run", "--set", "env.LD_LIBRARY_PATH=/mine"]).output
    assert "LD_LIBRARY_PATH=/opt/amazon/efa/lib:/opt/amazon/efa/lib64:/mine " in own


@pytest.mark.parametrize(
    ("received", "problems"),
    [
        ("/opt/amazon/efa/lib:/opt/amazon/efa/lib64", 0),
        ("/opt/amazon/efa/lib:/opt/amazon/efa/lib64:/cuda", 0),
        ("/cuda:/opt/amazon/efa/lib:/opt/amazon/efa/lib64", 1),
        ("/opt/amazon/efa/lib:/opt/amazon/efa/lib64x", 1),
        (None, 1),
    ],
)
def test_another_libfabric_in_a_started_engine_is_reported(received: str | None, problems: int) -> None:
    spec = engine_specs(parse_fleet(fleet("efa")))[0]
    environment = {**spec.environment, **({} if received is None else {"LD_LIBRARY_PATH": received})}
    started = SimpleNamespace(environ=lambda: environment, cmdline=lambda: list(spec.command), pid=1)
    process = cast("ManagedProcess", SimpleNamespace(spec=spec, tree=lambda: [started]))
    found = effective_config_problems(process)
    assert len(found) == problems
    assert all("which does not begin with /opt/amazon/efa/lib:/opt/amazon/efa/lib64" in one for one in found)


def test_what_a_process_must_not_see_is_left_out_of_its_environment() -> None:
    spec = engine_specs(parse_fleet(fleet("rdma")))[0]
    environment = spec.complete_environment({"MC_INTRANODE_NVLINK": "1", "HOME": "/h"})
    assert environment["HOME"] == "/h"
    assert "MC_INTRANODE_NVLINK" not in environment


def test_threads_times_batch_stay_within_what_the_adapters_hold() -> None:
    """The source's rule, threads x batch <= NICs x 256, and its own baselines: 16 threads on 16 NICs, 32 on 32."""
    assert (writes_in_flight(16), writes_in_flight(32), writes_in_flight(16, depth=2048)) == (4096, 8192, 32768)
    assert (bench_sizes(16).threads, bench_sizes(32).threads, bench_sizes(1).threads) == (16, 32, 1)
    for nics in (1, 8, 16, 32):
        sizes = bench_sizes(nics)
        assert (sizes.batch, sizes.block_bytes) == (BATCH, BLOCK_BYTES)
        assert sizes.threads * sizes.batch <= writes_in_flight(nics)
        assert sizes.buffer_bytes == sizes.block_bytes * sizes.batch * sizes.threads


def test_the_commands_of_the_bandwidth_test() -> None:
    assert bench_sizes(16).command() == (
        "transfer_engine_bench",
        "--mode=target",
        "--protocol=efa",
        "--metadata_server=P2PHANDSHAKE",
        "--buffer_size=2147483648",
        "--gpu_id=-1",
    )
    sender = bench_sizes(16).command("10.0.0.2:12345")
    assert sender[5:] == (
        "--gpu_id=-1",
        "--segment_id=10.0.0.2:12345",
        "--operation=write",
        "--duration=10",
        "--threads=16",
        "--batch_size=128",
        "--block_size=1048576",
        "--report_unit=GB",
    )


def test_small_writes_reach_a_small_share_of_the_peak() -> None:
    assert share_of_peak(64 << 10) == pytest.approx(0.26, abs=0.01)  # as the source says
    assert share_of_peak(32 << 10) == pytest.approx(share_of_peak(64 << 10) / 2)
    assert share_of_peak(BLOCK_BYTES) > 0.95
    assert share_of_peak(64 << 20) == 1.0
    between = share_of_peak(round((128 << 10) * 2**0.5))
    assert between == pytest.approx((share_of_peak(128 << 10) + share_of_peak(256 << 10)) / 2, rel=1e-4)


def test_the_least_write_is_one_block_of_k_or_v_of_one_layer() -> None:
    # Qwen3-Coder-30B-A3B: 4 KV heads of 128, 2 bytes a value: the comment in the EFA fleet files.
    assert least_write_bytes(4, 128, 2, 128) == 128 << 10


def test_every_instance_type_has_a_fleet_file_that_names_its_adapters_and_that_it_is_untested() -> None:
    assert {one.fleet for one in EFA_INSTANCES} == {path.stem for path in FLEETS.glob("efa-*.yaml")}
    for one in EFA_INSTANCES:
        text = (FLEETS / f"{one.fleet}.yaml").read_text(encoding="utf-8")
        assert f"(8 {one.gpu}) host: {one.nics} EFA adapters of {one.gbit_per_nic} Gbit/s." in text
        assert "Untested on such hardware" in text
        assert yaml.safe_load(text)["vllm"]["transfer"] == {"protocol": "efa"}
        assert one.peak_write_bytes_per_s is None or one.peak_write_bytes_per_s < one.nics * one.gbit_per_nic / 8 * 1e9
    assert instances_with(32) == ("p5.48xlarge", "p5e.48xlarge")
    assert instances_with(3) == ()


def test_the_page_has_the_instances_variables_and_commands_of_the_code() -> None:
    text = (FLEETS.parents[1] / "docs" / "efa-rdma.md").read_text(encoding="utf-8")
    for one in EFA_INSTANCES:
        peak = "–" if one.peak_write_bytes_per_s is None else f"{one.peak_write_bytes_per_s / 1e9:.0f} GB/s"
        rates = f"{one.nics} × {one.gbit_per_nic} Gbit/s | {one.nics * one.gbit_per_nic / 8:.0f} GB/s | {peak}"
        assert f"| {one.name} | 8 {one.gpu} | {rates} | `{one.fleet}` |" in text
    for command in (bench_sizes(16).command(), bench_sizes(16).command("HOST:PORT")):
        assert f"$ {' '.join(command)}\n" in text
    listed = re.findall(
        r"^\| `(\w+)` \| (?:`(\w+)`|the start of `LD_LIBRARY_PATH`) \| (efa, rdma|efa|rdma) \|", text, re.M
    )
    assert {key for key, _, _ in listed} == set(FabricSettings.model_fields)
    given: dict[str, Any] = {"nics": ["a"], "device_rdma": True}
    for key, variable, transports in listed:
        value = given.get(key, 7)
        for transport in transports.split(", "):
            assert variable == "" or variable in variables(fleet(transport, {key: value}))
