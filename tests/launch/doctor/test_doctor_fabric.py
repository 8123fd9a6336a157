"""The doctor's checks of RDMA and EFA, and the parsers of what it reads for them.

No machine with EFA was at hand. The formats come from: libfabric's `fi_info` (util/info.c; entries as in
ofiwg/libfabric issue 5689, names as in Mooncake's guide), run here on a machine without EFA with libfabric 1.17 for the
other provider and for the failure; the EFA installer's list of packages (aws/aws-parallelcluster-cookbook pull request
1882).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from launch.doctor.facts import Efa, EnginePython, FabricEntry, Limit, Rdma
from launch.doctor.probe import gather
from launch.doctor.probes import fabric
from launch.doctor.probes.commands import answer
from launch.doctor.probes.output import fabric_entries, installer_version, libfabric_versions, newest_abi
from launch.doctor.probes.python import ask_python
from launch.fleet.fabric import bench_sizes
from launch.fleet.file import parse_fleet
from tests.launch.doctor.machines import H200_PACKAGES, bad, fleet, h200, host, reported
from tests.launch.fake_nvml import FakeNvml

NAMES = ["rdmap0s1", "rdmap1s1"]
RDMA = Rdma(kernel_devices=NAMES, active_devices=NAMES, verbs_devices=NAMES)
EFA = Efa(
    devices=NAMES,
    fi_info="/opt/amazon/efa/bin/fi_info",
    entries=[FabricEntry(provider="efa", domain=f"{name}-rdm", endpoint="FI_EP_RDM") for name in NAMES],
    libfabric="/opt/amazon/efa/lib/libfabric.so.1",
    libfabric_version="2.1.0amzn3.0",
    api=(2, 1),
    needed_abi=(1, 3),
    offered_abi=(1, 3),
    driver="2.15.3g",
    installer="1.42.0",
)
OFF = {"FI_EFA_ENABLE_SHM_TRANSFER": "0"}
PACKAGES = {"vllm": "0.20.2", "torch": "2.11.0+cu130", "mooncake-transfer-engine-efa-cuda13": "0.3.14"}
LINKED = {"libfabric.so.1": "/opt/amazon/efa/lib/libfabric.so.1", "libefa.so.1": "/lib/x86_64-linux-gnu/libefa.so.1"}
PYTHON = EnginePython(executable="p", packages=PACKAGES, torch_cuda="13.0", mooncake_linked=LINKED)
UNTESTED = "engine-versions"
"""No combination with an EFA build was run end to end, so this check warns on each."""

FI_INFO_EFA = """\
provider: efa
    fabric: efa-direct
    domain: rdmap79s0-rdm
    version: 201.0
    type: FI_EP_RDM
    protocol: FI_PROTO_EFA
provider: efa
    fabric: efa
    domain: rdmap79s0-rdm
    version: 201.0
    type: FI_EP_RDM
    protocol: FI_PROTO_EFA
provider: efa
    fabric: efa
    domain: rdmap79s0-dgrm
    version: 201.0
    type: FI_EP_DGRAM
    protocol: FI_PROTO_EFA
provider: efa;ofi_rxd
    fabric: efa
    domain: rdmap80s0-dgrm
    version: 201.0
    type: FI_EP_RDM
    protocol: FI_PROTO_RXD
"""
FI_INFO_RXM = """\
provider: tcp;ofi_rxm
    fabric: 127.0.0.1/32
    domain: lo
    version: 117.0
    type: FI_EP_RDM
    protocol: FI_PROTO_RXM
"""
INSTALLED = """\
# EFA installer version: 1.22.0
# Debug packages installed: no
# Packages installed:
efa-config-1.13-1.el8.noarch efa-profile-1.5-1.el8.noarch libfabric-aws-1.17.0-1.el8.x86_64
"""


def efa_host(python: EnginePython = PYTHON, environment: dict[str, str] | None = None, **values: Any) -> dict[str, str]:
    """Warnings and problems of an EFA host with a fleet, but for those values of `Efa`."""
    found = msgspec.structs.replace(EFA, **values)
    engines = fleet("efa", environment={**OFF, **(environment or {})})
    wrong = bad(h200(rdma=RDMA, efa=found, fleet=engines, engine_python=python))
    assert wrong.pop(UNTESTED).startswith("warning:")
    return wrong


def test_an_efa_host() -> None:
    assert efa_host() == {}
    facts = h200(rdma=RDMA, efa=EFA, fleet=fleet("efa", environment=OFF), engine_python=PYTHON)
    assert reported(facts, "libfabric") == "ok: libfabric 2.1.0amzn3.0, efa driver 2.15.3g, EFA installer 1.42.0"
    assert reported(facts, "device-files") == "ok: the adapters' device files can be opened"
    assert " ".join(bench_sizes(2).command()) in reported(facts, "efa-writes")
    none = efa_host(entries=[], error="fi_getinfo: -61")
    assert "`fi_info -p efa` finds no provider (fi_getinfo: -61)" in none["efa"]
    one = efa_host(entries=EFA.entries[:1] if EFA.entries else [])
    assert "opens 1 of 2 EFA devices, not rdmap1s1" in one["efa"]
    assert "/usr/lib/libfabric.so.1, not AWS's" in efa_host(libfabric="/usr/lib/libfabric.so.1")["efa"]
    low = h200(efa=EFA, fleet=fleet("efa", environment=OFF), host=host(memlock=Limit(8 << 20, 8 << 20)))
    assert bad(low)["limits"].startswith("problem: locked memory: 8,192 KiB, and the fleet's transport locks")
    assert "there is no EFA device" in bad(h200(fleet=fleet("efa", environment=OFF)))["efa"]
    untold = bad(h200(rdma=RDMA, efa=msgspec.structs.replace(EFA, entries=None)))
    assert untold["efa"].startswith("warning: EFA devices rdmap0s1, rdmap1s1; fi_info is not installed")


def test_variables_that_break_efa() -> None:
    shared = bad(h200(rdma=RDMA, efa=EFA, fleet=fleet("efa"), engine_python=PYTHON))
    assert "problem: FI_EFA_ENABLE_SHM_TRANSFER is not 0 for inst-0, inst-1" in shared["efa-variables"]
    assert "problem: FI_PROVIDER hides" in efa_host(environment={"FI_PROVIDER": "tcp,shm"})["efa-variables"]
    assert "problem: FI_PROVIDER hides" in efa_host(environment={"FI_PROVIDER": "^efa"})["efa-variables"]
    for value in ("efa", "efa,shm", "^tcp", ""):
        assert efa_host(environment={"FI_PROVIDER": value}) == {}
    emulated = efa_host(environment={"FI_EFA_USE_DEVICE_RDMA": "0"})["efa-variables"]
    assert "warning: FI_EFA_USE_DEVICE_RDMA is off for inst-0, inst-1: libfabric emulates RDMA" in emulated
    assert "warning: MC_MAX_WR is set" in efa_host(environment={"MC_MAX_WR": "16384"})["efa-variables"]
    shell = bad(h200(rdma=RDMA, efa=EFA, engine_python=PYTHON))
    assert "warning: FI_EFA_ENABLE_SHM_TRANSFER is not 0 for an engine started" in shell["efa-variables"]
    assert "efa-variables" not in bad(h200(fleet=fleet("rdma")))


def test_libfabric_that_does_not_fit() -> None:
    assert "offers interface 1.17" in efa_host(api=(1, 17), libfabric_version="1.17.0")["libfabric"]
    older = efa_host(needed_abi=(1, 4), offered_abi=(1, 2))["libfabric"]
    assert "needs EFA_1.4 of libefa, which has up to EFA_1.2" in older
    assert "mount the host's /opt/amazon/efa" in older
    plain = msgspec.structs.replace(PYTHON, packages=H200_PACKAGES, mooncake_linked={})
    engines = fleet("efa", environment=OFF)
    without = bad(h200(rdma=RDMA, efa=EFA, fleet=engines, engine_python=plain))["libfabric"]
    assert "problem: mooncake-transfer-engine-cuda13 is built without EFA" in without
    assert "mooncake-transfer-engine-efa-cuda13" in without
    bundled = msgspec.structs.replace(PYTHON, mooncake_bundled=["/site/mooncake.libs/libfabric-1a2b.so.1"])
    assert "problem: mooncake-transfer-engine-efa-cuda13 bundles /site/" in efa_host(bundled)["libfabric"]
    preloaded = {"LD_PRELOAD": "/opt/amazon/efa/lib/libfabric.so.1"}
    assert efa_host(bundled, preloaded) == {}
    absent = msgspec.structs.replace(PYTHON, mooncake_linked={}, mooncake_missing=["libfabric.so.1"])
    assert "libfabric" not in efa_host(absent)  # the check engine-libraries reports it
    assert "Mooncake needs libfabric.so.1, not found" in efa_host(absent)["engine-libraries"]


def test_device_files_that_are_missing_or_not_readable() -> None:
    adapters = Rdma(kernel_devices=["mlx5_0"], active_devices=["mlx5_0"], verbs_devices=["mlx5_0"])
    none = msgspec.structs.replace(adapters, missing_files=["/dev/infiniband/uverbs0"])
    found = bad(h200(rdma=none, fleet=fleet("rdma")))["device-files"]
    assert found.startswith("problem: /dev/infiniband/uverbs0 not found -> pass them to the container")
    denied = msgspec.structs.replace(adapters, denied_files=["/dev/infiniband/uverbs0"])
    assert (
        "problem: /dev/infiniband/uverbs0: this user may not"
        in bad(h200(rdma=denied, fleet=fleet("efa")))["device-files"]
    )
    assert bad(h200(rdma=denied, fleet=fleet("nvlink")))["device-files"].startswith("warning:")


@pytest.mark.parametrize(("size", "share"), [(128 << 10, "52%"), (1 << 20, "96%")])
def test_the_share_of_the_peak_with_a_fleets_writes(size: int, share: str) -> None:
    facts = h200(rdma=RDMA, efa=EFA, fleet=fleet("efa", environment=OFF, least_write_bytes=size), engine_python=PYTHON)
    assert f"is {size >> 10:,} KiB: {share} of the peak" in reported(facts, "efa-writes")


def test_rdma() -> None:
    assert "there is no RDMA adapter" in bad(h200(fleet=fleet("rdma")))["rdma"]
    down = Rdma(kernel_devices=["mlx5_0"])
    assert bad(h200(rdma=down, fleet=fleet("rdma")))["rdma"].startswith(
        "problem: RDMA adapters mlx5_0: no port is active"
    )
    hidden = Rdma(kernel_devices=["mlx5_0", "mlx5_1"], active_devices=["mlx5_0"], verbs_devices=["mlx5_0"])
    assert "libibverbs does not show mlx5_1 of mlx5_0, mlx5_1" in bad(h200(rdma=hidden))["rdma"]
    well = Rdma(kernel_devices=["mlx5_0"], active_devices=["mlx5_0"], verbs_devices=["mlx5_0"])
    assert bad(h200(rdma=well, fleet=fleet("rdma"))) == {}
    assert "Mooncake may use the adapter anyway" in reported(h200(rdma=well, fleet=fleet("tcp")), "rdma")
    held = fleet("tcp", environment={"MC_FORCE_TCP": "1"})
    assert "use the adapter" not in reported(h200(rdma=well, fleet=held), "rdma")


def test_entries_of_fi_info() -> None:
    entries = fabric_entries(FI_INFO_EFA)
    assert len(entries) == 4
    assert entries[0] == FabricEntry(
        provider="efa",
        fabric="efa-direct",
        domain="rdmap79s0-rdm",
        version="201.0",
        endpoint="FI_EP_RDM",
        protocol="FI_PROTO_EFA",
    )
    # Neither datagrams nor a layer above them is what Mooncake asks for.
    assert Efa(entries=entries).domains() == ["rdmap79s0"]
    [layered] = fabric_entries(FI_INFO_RXM)
    assert (layered.provider, layered.domain, layered.endpoint) == ("tcp;ofi_rxm", "lo", "FI_EP_RDM")
    assert fabric_entries("fi_getinfo: -61\n") == []
    assert Efa().domains() == []


def test_versions_of_libfabric_and_of_the_installer() -> None:
    debian = "fi_info: 1.17.0\nlibfabric: 1.17.0\nlibfabric api: 1.17\n"
    assert libfabric_versions(debian) == ("1.17.0", (1, 17))
    aws = "fi_info: 2.1.0amzn3.0\nlibfabric: 2.1.0amzn3.0\nlibfabric api: 2.1\n"
    assert libfabric_versions(aws) == ("2.1.0amzn3.0", (2, 1))
    assert libfabric_versions("") == (None, None)
    assert installer_version(INSTALLED) == "1.22.0"
    assert installer_version("") is None


def test_the_newest_symbol_version_of_a_library() -> None:
    table = b"\x7fELF\x00efadv_query_device\x00EFA_1.0\x00EFA_1.2\x00EFA_1.10\x00EFA_1.x\x00XEFA_2.0\x00"
    assert newest_abi(table) == (1, 10)
    assert newest_abi(b"\x00FABRIC_1.6\x00") is None


def test_commands_that_cannot_be_read() -> None:
    assert answer(["/nonexistent/fi_info"])[0] is None
    assert answer(["sh", "-c", "echo 'fi_getinfo: -61' >&2; exit 61"]) == (None, "fi_getinfo: -61")
    assert answer(["sh", "-c", "exit 3"]) == (None, "exit status 3")
    assert answer(["sh", "-c", "echo $X"], {"X": "1", "PATH": os.environ["PATH"]}) == ("1\n", "")
    assert answer(["sleep", "60"], limit_s=0.01) == (None, "no answer within 0.01 s")


def test_adapters_and_device_files_of_a_machine(tmp_path: Path) -> None:
    """Folders as the kernel lays them out: a class folder each for adapters and for their uverbs devices."""
    sys, verbs, files = tmp_path / "infiniband", tmp_path / "infiniband_verbs", tmp_path / "dev"
    drivers = {"rdmap0s1": "efa", "mlx5_0": "mlx5_core"}
    for number, (name, driver) in enumerate(drivers.items()):
        (sys / name / "ports" / "1").mkdir(parents=True)
        (sys / name / "ports" / "1" / "state").write_text("4: ACTIVE\n" if number else "1: DOWN\n")
        (tmp_path / "drivers" / driver).mkdir(parents=True)
        (sys / name / "device").mkdir()
        (sys / name / "device" / "driver").symlink_to(tmp_path / "drivers" / driver)
        (verbs / f"uverbs{number}").mkdir(parents=True)
    files.mkdir()
    (files / "uverbs0").touch()
    found = fabric.rdma(sys, verbs, files)
    assert (found.kernel_devices, found.active_devices) == (["mlx5_0", "rdmap0s1"], ["mlx5_0"])
    assert (found.missing_files, found.denied_files) == ([str(files / "uverbs1")], [])
    assert fabric.rdma(sys, tmp_path / "none", tmp_path / "none").missing_files == [str(tmp_path / "none" / "uverbs0")]
    assert fabric.rdma(tmp_path / "none", verbs, files).kernel_devices == []
    assert fabric.efa({}, sys).devices == ["rdmap0s1"]
    listed = "    device          \t   node GUID\n    ------          \t----------------\n    mlx5_0\t1\n"
    assert fabric.verbs_devices(listed) == ["mlx5_0"]


def test_a_library_is_looked_up_as_the_engine_would(tmp_path: Path) -> None:
    library = tmp_path / "libfabric.so.1"
    library.write_bytes(b"\x00EFA_1.4\x00")
    found = fabric.efa({"LD_LIBRARY_PATH": f"/nonexistent:{tmp_path}", "PATH": os.environ["PATH"]})
    assert (found.libfabric, found.needed_abi) == (str(library), (1, 4))


def test_what_mooncakes_package_bundles_is_found_without_loading_it(tmp_path: Path) -> None:
    """auditwheel's layout: libraries in a folder called as the distribution, beside the package."""
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "mooncake_transfer_engine.libs").mkdir()
    for name in ("libfabric-1a2b3c.so.1.24.0", "libefa-4d5e.so.1.3.50", "libglog-c0.so.0.4.0", "libfabricated.so"):
        (tmp_path / "mooncake_transfer_engine.libs" / name).touch()
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    found = ask_python(str(wrapper), {"LD_LIBRARY_PATH": "/nonexistent"})
    assert [Path(path).name for path in found.mooncake_bundled] == [
        "libefa-4d5e.so.1.3.50",
        "libfabric-1a2b3c.so.1.24.0",
    ]
    assert (found.error, found.mooncake_linked) == (None, {})


@pytest.mark.parametrize(
    ("config", "vllm", "size"),
    [
        ({"num_key_value_heads": 4, "num_attention_heads": 32, "head_dim": 128, "hidden_size": 2048}, {}, 128 << 10),
        ({"num_attention_heads": 8, "hidden_size": 512}, {"dtype": "float32"}, 8 * 64 * 4 * 128),
        ({"num_key_value_heads": 8, "head_dim": 128}, {"tensor_parallel_size": 4, "kv_cache_dtype": "fp8"}, 32 << 10),
        ({"num_key_value_heads": 4, "head_dim": 128, "kv_lora_rank": 512}, {}, None),
        ({"num_key_value_heads": 4, "head_dim": 128}, {"block_size": None}, None),
        (None, {}, None),
    ],
)
def test_the_smallest_write_comes_from_the_models_folder(
    tmp_path: Path, config: dict[str, Any] | None, vllm: dict[str, Any], size: int | None
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    settings = {"python": sys.executable, "block_size": 128, "transfer": {"protocol": "efa"}, **vllm}
    values = {"kind": "vllm", "count": 1, "model": str(tmp_path), "role": "kv_both", "vllm": settings}
    found = gather(parse_fleet(values), engine_python=sys.executable, library=FakeNvml()).fleet
    assert found is not None
    assert found.engines[0].least_write_bytes == size
    assert found.engines[0].environment["LD_LIBRARY_PATH"].startswith("/opt/amazon/efa/lib:")
