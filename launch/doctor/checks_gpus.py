"""Checks of the GPUs: driver, devices, processes on them, paths between them."""

from __future__ import annotations

from collections.abc import Iterator

from launch.doctor.facts import Facts
from launch.doctor.findings import Result, check, gibibytes, note, ok, problem, warning
from launch.freshness.gpus import IDLE_BYTES
from launch.hardware.gpus import Gpu


@check(
    "nvidia-driver",
    looks_at="NVML's driver version, and its newest CUDA against the CUDA that torch was built for",
    why="an older driver cannot load torch's CUDA runtime",
    worst="problem",
)
def nvidia_driver(facts: Facts) -> Iterator[Result]:
    """The driver can run the engines' torch."""
    gpus, torch_cuda = facts.gpus, facts.engine_python.torch_cuda
    if gpus.driver_version is None:
        summary = gpus.reason or "NVML reports no driver version"
        needed = facts.fleet is not None and any(one.kind == "vllm" and one.device == "cuda" for one in facts.engines())
        if needed:
            yield problem(
                f"{summary}, but the fleet's engines need GPUs", "install the driver, or set vllm.device: cpu"
            )
        elif "no NVIDIA driver" in summary:
            yield note(f"{summary}: simulated and CPU engines only")
        else:
            yield warning(summary, "fix the driver before starting engines on its GPUs")
        return
    cuda = gpus.cuda_driver_version
    summary = f"driver {gpus.driver_version}" + (f", CUDA up to {cuda[0]}.{cuda[1]}" if cuda else "")
    if torch_cuda is None:
        yield ok(f"{summary}; the engine Python's torch has no CUDA")
        return
    # Within one major version a driver runs newer runtimes too (CUDA minor-version compatibility).
    if cuda is not None and cuda[0] < int(torch_cuda.partition(".")[0]):
        yield problem(
            f"{summary}, but torch is built for CUDA {torch_cuda}", "update the driver, or install an older torch"
        )
    else:
        yield ok(f"{summary}; torch is built for CUDA {torch_cuda}")


@check(
    "gpus",
    looks_at="GPUs by NVML, against the devices of the fleet's engines (CUDA_VISIBLE_DEVICES)",
    why="an engine with a missing device exits after a minute of start-up",
    worst="problem",
)
def gpu_list(facts: Facts) -> Iterator[Result]:
    """The GPUs of this machine cover the fleet's devices."""
    gpus = facts.gpus.gpus
    for gpu in gpus:
        yield ok(f"GPU {gpu.index}: {gpu.name}, {gibibytes(gpu.memory_total_bytes)}")
    for engine in facts.fleet.engines if facts.fleet and gpus else ():
        if engine.kind != "vllm" or engine.device != "cuda":
            continue
        wanted = [
            part.strip() for part in engine.environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()
        ]
        absent = [one for one in wanted if not any(_means(one, gpu) for gpu in gpus)]
        if absent:
            yield problem(
                f"{engine.name} needs GPU {', '.join(absent)}, but there are {len(gpus)}",
                "change `devices` or the count in the fleet file",
            )


def _means(device: str, gpu: Gpu) -> bool:
    return device == str(gpu.index) or (not device.isdigit() and gpu.uuid.startswith(device))


@check(
    "gpu-users",
    looks_at="processes and memory in use on each GPU",
    why="other processes there slow the engines and falsify every figure",
    worst="warning",
)
def gpu_users(facts: Facts) -> Iterator[Result]:
    """The GPUs are free."""
    if not facts.gpus.gpus:
        return
    idle = True
    for gpu in facts.gpus.gpus:
        if gpu.processes:
            idle = False
            users = ", ".join(f"{one.pid} ({one.name or 'unnamed'})" for one in gpu.processes)
            yield warning(
                f"GPU {gpu.index} is in use by process {users}", "end the process, or give the fleet other devices"
            )
        elif gpu.memory_used_bytes >= IDLE_BYTES:
            idle = False
            yield warning(
                f"GPU {gpu.index}: {gibibytes(gpu.memory_used_bytes)} in use, by no process that NVML shows here",
                "find the process outside this container, or give the fleet other devices",
            )
    if idle:
        yield ok("no processes on the GPUs")


@check(
    "gpu-topology",
    looks_at="NVLink lanes, peer-to-peer status and PCIe path between every two GPUs",
    why="Mooncake's intra-node NVLink transport copies between GPUs; without it KV goes through the host's memory",
    worst="problem",
)
def gpu_topology(facts: Facts) -> Iterator[Result]:
    """The GPUs reach each other over NVLink."""
    gpus = facts.gpus.gpus
    if not gpus:
        return
    asked = "nvlink" in facts.protocols()
    if len(gpus) == 1:
        summary = "one GPU: no second one to transfer KV to"
        yield warning(summary, "use protocol tcp, or a machine with more GPUs") if asked else note(summary)
        return
    pairs = [(gpu.index, peer) for gpu in gpus for peer in gpu.peers if gpu.index < peer.gpu]
    without = [(first, peer) for first, peer in pairs if peer.nvlink is False]
    untold = [(first, peer) for first, peer in pairs if peer.nvlink is None]
    lanes = sorted({gpu.nvlinks_up for gpu in gpus if gpu.nvlinks_up is not None})
    if without:
        names = ", ".join(f"{first}-{peer.gpu} ({peer.path})" for first, peer in without[:8])
        summary = f"no NVLink between GPUs {names}" + (
            f" and {len(without) - 8} more pairs" if len(without) > 8 else ""
        )
        fix = "pair engines on GPUs that NVLink connects, or use rdma or tcp between the others"
        yield problem(summary, fix) if asked else note(summary, fix)
    elif untold:
        yield note("the driver does not report whether NVLink connects all GPUs", "see `nvidia-smi topo -m`")
    else:
        yield ok(
            f"NVLink connects all {len(gpus)} GPUs" + (f" ({'/'.join(map(str, lanes))} lanes up)" if lanes else "")
        )
    if len(lanes) > 1 or (lanes and lanes[0] == 0 and not without):
        down = [str(gpu.index) for gpu in gpus if gpu.nvlinks_up != lanes[-1] or gpu.nvlinks_up == 0]
        yield warning(
            f"GPU {', '.join(down)} has NVLink lanes down", "see `nvidia-smi nvlink -s`; reset or replace the GPU"
        )
    far = [peer for _, peer in pairs if peer.path.startswith("system")]
    if far and facts.host.numa_nodes and facts.host.numa_nodes > 1:
        yield note(
            f"the GPUs are attached to {facts.host.numa_nodes} NUMA nodes: {_by_node(gpus)}",
            "bind each engine to its GPU's node (numactl --cpunodebind --membind); matters for TCP and RDMA",
        )


def _by_node(gpus: list[Gpu]) -> str:
    summary = sorted({gpu.numa_node for gpu in gpus if gpu.numa_node is not None})
    if not summary:
        return "NVML does not report which on which"
    return "; ".join(
        f"node {node}: {', '.join(str(gpu.index) for gpu in gpus if gpu.numa_node == node)}" for node in summary
    )
