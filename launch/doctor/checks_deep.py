"""Checks of ``--deep``: adapters near the GPUs, as the driver and as Mooncake see them; hand-offs between engines."""

from __future__ import annotations

from collections.abc import Iterator

from launch.doctor.facts import Facts, GpuPaths
from launch.doctor.findings import Result, check, note, ok, problem, warning

_NEAR = ("PIX", "PXB")
"""Paths below one PCIe root: the adapter reads the GPU's memory without passing the processor."""
_ORDER = (*_NEAR, "PHB", "NODE", "SYS")


@check(
    "affinity",
    looks_at="with `--deep`: `nvidia-smi topo -m`, the nearest adapters of each GPU, NVLink between the fleet's GPUs",
    why="KV that passes from a GPU to an adapter over the link between processors moves at a fraction of the line rate",
    worst="warning",
)
def affinity(facts: Facts) -> Iterator[Result]:
    """Every GPU has an adapter near it, and NVLink to the fleet's other GPUs."""
    if facts.deep is None:
        return
    matrix = facts.deep.matrix
    if matrix is None:
        if facts.gpus.gpus:
            yield note(
                f"`nvidia-smi topo -m`: {facts.deep.matrix_error}", "install nvidia-smi (the driver's utilities)"
            )
        else:
            yield note("no GPU, no paths to adapters")
        return
    used = _used(facts, matrix)
    moved = facts.protocols()
    for gpu in used:
        near = _nearest(matrix, gpu)
        if near is None:
            continue
        path, names = near
        where = f"{gpu}: nearest adapters {', '.join(names)} ({path})"
        if path in _NEAR:
            yield ok(where)
        elif moved & {"rdma", "efa"}:
            yield warning(
                where, "give the fleet GPUs with an adapter below the same PCIe switch, or expect less than line rate"
            )
        else:
            yield note(where)
    if not matrix.nics:
        yield note("no adapter in `nvidia-smi topo -m`")
    apart = [
        f"{first}-{second} ({matrix.paths[first].get(second, 'unknown')})"
        for place, first in enumerate(used)
        for second in used[place + 1 :]
        if not matrix.paths[first].get(second, "").startswith("NV")
    ]
    if apart and "nvlink" in moved:
        yield warning(
            f"no NVLink between {', '.join(apart)}", "choose `devices` that NVLink connects, or another transport"
        )
    elif not apart and len(used) > 1:
        yield ok(f"NVLink connects {', '.join(used)}")


def _used(facts: Facts, matrix: GpuPaths) -> list[str]:
    """The GPUs of the fleet's engines; all, without a fleet or where they are named by UUID."""
    wanted = {
        f"GPU{device.strip()}"
        for engine in (facts.fleet.engines if facts.fleet else ())
        if engine.device == "cuda"
        for device in engine.environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    }
    return [gpu for gpu in matrix.gpus if gpu in wanted] or matrix.gpus


def _nearest(matrix: GpuPaths, gpu: str) -> tuple[str, list[str]] | None:
    paths = {matrix.nics[column]: path for column, path in matrix.paths[gpu].items() if column in matrix.nics}
    for path in _ORDER:
        names = [name for name, found in paths.items() if found == path]
        if names:
            return path, names
    return None


@check(
    "mooncake-topology",
    looks_at="with `--deep`: adapters that Mooncake finds (`transfer_engine_topology_dump` of the engine Python)",
    why="Mooncake leaves out adapters that it cannot open, and then uses the ones that remain, or TCP",
    worst="problem",
)
def mooncake_topology(facts: Facts) -> Iterator[Result]:
    """Mooncake finds the adapters that the kernel has."""
    if facts.deep is None:
        return
    near = facts.deep.near_nics
    if near is None:
        yield note(f"Mooncake's topology: {facts.deep.near_nics_error}", "install Mooncake in the engines' Python")
        return
    found = sorted({name for place in near.values() for name in (*place.preferred, *place.others)})
    for place, nics in sorted(near.items()):
        if nics.preferred:
            yield ok(f"memory at {place}: {', '.join(nics.preferred)}" + _others(nics.others))
    asked = bool(facts.protocols() & {"rdma", "efa"})
    lost = sorted(set(facts.rdma.active_devices) - set(found))
    if lost:
        summary = f"Mooncake does not find the adapters {', '.join(lost)}"
        fix = "see the check device-files; remove MC_TE_FILTERS (vllm.transfer.fabric.nics) if it is meant to use them"
        yield problem(summary, fix) if asked and not found else warning(summary, fix)
    elif not found:
        yield note("Mooncake finds no adapter: KV moves over TCP, or over NVLink inside one host")


def _others(names: list[str]) -> str:
    return f", then {len(names)} farther" if names else ""


@check(
    "hand-off",
    looks_at="with `--deep` and a running fleet: one tiny hand-off from and to every engine: the KV that D pulled, "
    "its answer against P's own",
    why="a wrong transport, another block size or a lost variable shows in no status, only in a hand-off",
    worst="problem",
)
def hand_off(facts: Facts) -> Iterator[Result]:
    """KV moves between the fleet's engines, and arrives whole."""
    if facts.deep is None:
        return
    if facts.deep.hand_offs is None:
        yield note(f"no hand-off was made: {facts.deep.hand_offs_error}", facts.deep.hand_offs_remedy)
        return
    for one in facts.deep.hand_offs:
        pair = f"{one.source} to {one.target}"
        size = f"{one.tokens if one.pulled_tokens is None else one.pulled_tokens:,} tokens"
        size += "" if one.size_bytes is None else f", {one.size_bytes:,} bytes"
        if one.error is not None:
            yield problem(
                f"{pair}: {one.error}", "see both engines' logs, and docs/doctor.md for the pitfalls of pulls"
            )
        elif not one.same_text:
            yield problem(
                f"{pair}: {size}, but D's answer differs from P's own",
                "compare model, dtype, block size and Mooncake version of the two: the KV that arrived is not P's",
            )
        elif one.pulled_tokens is None:
            yield warning(
                f"{pair}: {size}; D does not report pulled tokens", "start it with --enable-prompt-tokens-details"
            )
        else:
            yield ok(f"{pair}: {size} pulled, same answer")
