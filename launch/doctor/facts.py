"""Facts about a machine as plain values, gathered by `launch.doctor.probe` or constructed by tests.

None means "unknown" everywhere, never "no".
"""

from __future__ import annotations

import msgspec

from launch.fleet.pieces import Pieces
from launch.hardware.gpus import GpuInventory


class Limit(msgspec.Struct, frozen=True):
    """A resource limit; None is unlimited."""

    soft: int | None
    hard: int | None


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """The machine itself."""

    memory_total_bytes: int
    memory_available_bytes: int
    shm_total_bytes: int | None = None
    """Size of /dev/shm; None where there is none."""
    shm_free_bytes: int | None = None
    nofile: Limit
    """Open files."""
    memlock: Limit
    """Locked memory, bytes."""
    numa_nodes: int | None = None
    cpus: int
    libraries: dict[str, bool]
    """System library by its linker name (``libnuma.so.1``) -> true if the dynamic linker finds it."""
    clock_synchronised: bool | None = None
    clock_error_s: float | None = None
    """The kernel's own bound on the error of its clock."""


class EnginePython(msgspec.Struct, frozen=True, kw_only=True):
    """Engine software of one Python."""

    executable: str
    error: str | None = None
    """Reason why it could not be run; None when it answered."""
    python: str = ""
    packages: dict[str, str] = {}
    """Distribution -> version, of the relevant ones."""
    torch_cuda: str | None = None
    """CUDA runtime that torch was built for; None without CUDA or without torch."""
    openmp: str | None = None
    """Path of its ``libiomp5.so``."""
    mooncake_missing: list[str] = []
    """Shared libraries its Mooncake needs and the dynamic linker does not find."""
    mooncake_linked: dict[str, str] = {}
    """``libfabric.so.1`` and ``libefa.so.1`` -> path that its Mooncake loads; empty for a build without EFA."""
    mooncake_bundled: list[str] = []
    """Files of libfabric and libefa inside its Mooncake package."""
    site: str | None = None
    """Folder that holds the package vllm."""
    transfer_path: dict[str, str] = {}
    """File -> SHA-256, of the files that move KV: vLLM's Mooncake connector and Mooncake's engine."""


class Rdma(msgspec.Struct, frozen=True, kw_only=True):
    """RDMA adapters as the kernel and as libibverbs see them."""

    kernel_devices: list[str] = []
    """Names under /sys/class/infiniband."""
    active_devices: list[str] = []
    """Those with a port in state ACTIVE."""
    verbs_devices: list[str] | None = None
    """Devices listed by ``ibv_devices``; None when the tool is missing."""
    missing_files: list[str] = []
    """Device files that the kernel's devices should have under /dev/infiniband, and that are not there."""
    denied_files: list[str] = []
    """Those that this user may not read and write."""


class FabricEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of ``fi_info``: an endpoint type of a domain, by the provider that offers it."""

    provider: str
    fabric: str = ""
    domain: str = ""
    version: str = ""
    endpoint: str = ""
    """``FI_EP_RDM``, ``FI_EP_MSG`` or ``FI_EP_DGRAM``."""
    protocol: str = ""


class Efa(msgspec.Struct, frozen=True, kw_only=True):
    """AWS Elastic Fabric Adapter, and the libfabric that engines would load."""

    devices: list[str] = []
    """RDMA devices that the ``efa`` driver drives."""
    fi_info: str | None = None
    """Path of libfabric's ``fi_info``; None when there is none."""
    entries: list[FabricEntry] | None = None
    """Answer of ``fi_info -p efa``; None when it could not be run."""
    error: str = ""
    """Its error message."""
    libfabric: str | None = None
    """Path of the libfabric that would be loaded."""
    libfabric_version: str | None = None
    """By ``fi_info --version``, such as ``2.1.0amzn3.0``."""
    api: tuple[int, int] | None = None
    """Newest libfabric interface it offers."""
    needed_abi: tuple[int, int] | None = None
    """Newest version of libefa's symbols that libfabric uses, ``EFA_1.4``."""
    offered_abi: tuple[int, int] | None = None
    """Newest that libefa has."""
    driver: str | None = None
    """Version of the kernel's efa module, the host's also in a container."""
    installer: str | None = None
    """Version of AWS's EFA installer, from /opt/amazon/efa_installed_packages."""

    def domains(self) -> list[str]:
        """Devices that the provider opens with reliable datagrams, the endpoints that Mooncake uses."""
        found = (one for one in self.entries or () if one.provider == "efa" and one.endpoint == "FI_EP_RDM")
        return sorted({one.domain.removesuffix("-rdm") for one in found})


class FleetEngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One engine of the fleet as it would be started."""

    name: str
    kind: str = "vllm"
    command: list[str] = []
    environment: dict[str, str] = {}
    """Complete environment: inherited, minus the variables the launcher drops, plus those it adds."""
    host: str = "127.0.0.1"
    role: str = "none"
    protocol: str | None = None
    """tcp, rdma, efa or nvlink; None without a KV connector."""
    device: str = "cuda"
    """cuda or cpu."""
    least_write_bytes: int | None = None
    """Smallest write of a hand-off; None where the model's folder is not here, or its KV is of another kind."""
    pieces: Pieces | None = None
    """Dimensions that decide the pieces of a hand-off; None in the same cases."""


class FleetFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet file with all instances expanded."""

    source: str
    engines: list[FleetEngineFacts]
    busy_ports: list[str] = []
    """Sentences from the launcher's port check."""
    start_problems: list[str] = []
    """Sentences from the launcher's own start-up checks."""


class Clock(msgspec.Struct, frozen=True, kw_only=True):
    """One answer's Date header compared with the local clock."""

    name: str
    url: str
    error: str | None = None
    """Reason why it could not be compared; None when it was."""
    offset_s: float = 0.0
    """Smallest certain offset of its clock, ahead positive; 0 within the precision of a Date header (about 2 s)."""


class ProxyCondition(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the conditions of ``GET /ready?verbose``."""

    name: str
    ok: bool
    detail: str = ""
    remedy: str | None = None


class ProxyConditions(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions of a running proxy."""

    url: str
    error: str | None = None
    """Reason why they could not be read; None when they were."""
    remedy: str | None = None
    """Remedy for ``error``, where its cause is known."""
    conditions: list[ProxyCondition] = []


class GpuPaths(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs and adapters as ``nvidia-smi topo -m`` relates them."""

    gpus: list[str] = []
    """Row names, ``GPU0``."""
    nics: dict[str, str] = {}
    """Column name -> adapter: ``NIC0`` -> ``mlx5_0``."""
    paths: dict[str, dict[str, str]] = {}
    """GPU -> other GPU or adapter column -> ``NV18``, ``PIX``, ``PXB``, ``PHB``, ``NODE`` or ``SYS``."""
    numa: dict[str, str] = {}
    """GPU -> NUMA nodes, as printed; left out where none is."""


class NearNics(msgspec.Struct, frozen=True, kw_only=True):
    """Adapters that Mooncake uses for memory in one place."""

    preferred: list[str] = []
    others: list[str] = []


class HandOffTest(msgspec.Struct, frozen=True, kw_only=True):
    """One tiny hand-off between two running engines."""

    source: str
    target: str
    error: str | None = None
    """Reason why it failed; None when it was done."""
    tokens: int = 0
    """Of the prompt, the last, partial block left out."""
    pulled_tokens: int | None = None
    """Those whose KV D pulled, by its own counter; None: it does not report them."""
    size_bytes: int | None = None
    """KV of those; None where the model's dimensions are not known."""
    same_text: bool = False
    """D's answer is the one that P gives alone."""


class Deep(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of ``--deep``; each is None when it could not be read, with the reason beside it."""

    matrix: GpuPaths | None = None
    matrix_error: str = ""
    near_nics: dict[str, NearNics] | None = None
    """Place of memory (``cpu:0``, ``cuda:0``) -> adapters, by Mooncake's own topology."""
    near_nics_error: str = ""
    hand_offs: list[HandOffTest] | None = None
    hand_offs_error: str = ""
    hand_offs_remedy: str = ""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """All inputs of the checks."""

    host: Host
    gpus: GpuInventory
    engine_python: EnginePython
    rdma: Rdma = Rdma()
    efa: Efa = Efa()
    environment: dict[str, str] = {}
    """The doctor's own, which engines started from this shell would inherit."""
    fleet: FleetFacts | None = None
    clocks: list[Clock] = []
    proxy: ProxyConditions | None = None
    """None: no proxy is known."""
    deep: Deep | None = None
    """None without ``--deep``."""

    def engines(self) -> list[FleetEngineFacts]:
        """The fleet's engines; without a fleet one that stands for any engine started from this shell."""
        if self.fleet is not None:
            return self.fleet.engines
        device = "cuda" if self.gpus.gpus else "cpu"
        return [FleetEngineFacts(name="an engine started from this shell", environment=self.environment, device=device)]

    def protocols(self) -> set[str]:
        """Transports configured in the fleet."""
        return {engine.protocol for engine in (self.fleet.engines if self.fleet else ()) if engine.protocol}
