"""Checks of a fleet file across keys that are each valid alone; every message names the remedy."""

from __future__ import annotations

from collections.abc import Iterable
from math import isclose
from urllib.parse import urlsplit

from launch.fleet.drawn_ports import drawn_ports
from launch.fleet.fabric import misplaced_keys
from launch.fleet.layout import FleetLayout, is_loopback
from policies.types import Role, Transport

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables from which PyTorch reads its allocator's settings, by version."""
NVLINK_VARIABLE = "MC_INTRANODE_NVLINK"
_ALIKE = ("dtype", "block_size", "kv_cache_dtype", "tensor_parallel_size", "prefix_caching", "hash_seed", "device")
_OWN_FLAGS = {
    "--model": "model",
    "--served-model-name": "served_model_name",
    "--host": "host",
    "--port": "base_port",
    "--dtype": "vllm.dtype",
    "--block-size": "vllm.block_size",
    "--kv-cache-dtype": "vllm.kv_cache_dtype",
    "--kv-transfer-config": "role and vllm.transfer",
    "--kv-events-config": "vllm.events",
    "--tensor-parallel-size": "vllm.tensor_parallel_size",
    "-tp": "vllm.tensor_parallel_size",
    "--data-parallel-size": "vllm.data_parallel_size",
    "-dp": "vllm.data_parallel_size",
    "--scheduling-policy": "vllm.scheduling_policy",
    "--long-prefill-token-threshold": "vllm.long_prefill_token_threshold",
    "--enable-prefix-caching": "vllm.prefix_caching",
    "--no-enable-prefix-caching": "vllm.prefix_caching",
}
_OWN_VARIABLES = {
    "VLLM_MOONCAKE_BOOTSTRAP_PORT": "base_bootstrap_port",
    "MASTER_PORT": "base_master_port",
    "CUDA_VISIBLE_DEVICES": "devices",
    "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "vllm.transfer.abort_timeout_s",
    "PYTHONHASHSEED": "vllm.hash_seed",
    NVLINK_VARIABLE: "vllm.transfer.protocol: nvlink",
}


def check_fleet(fleet: FleetLayout) -> None:
    """Refuse contradicting keys.

    Raises:
        ValueError: the first problem, with its remedy.
    """
    _check_shape(fleet)
    _check_ports(fleet)
    _check_names(fleet)
    if fleet.kind == "vllm":
        _check_required(fleet)
        _check_devices(fleet)
        _check_own_settings(fleet)
        _check_alike(fleet)
        _check_transfer(fleet)
        _check_drawn_ports(fleet)
    _check_roles(fleet)
    _check_peers(fleet)
    _check_hold(fleet)


def _check_shape(fleet: FleetLayout) -> None:
    if fleet.groups and (fleet.count is not None or fleet.devices is not None):
        raise ValueError("groups: with groups, give `count` or `devices` in each of them and not at the top")
    if fleet.kind == "sim":
        for key in ("vllm", "devices", "served_model_name", "base_events_port", "base_events_replay_port"):
            if key in fleet.model_fields_set:
                raise ValueError(f"{key}: is for kind vllm; remove it or change the kind")
        for number, group in enumerate(fleet.groups):
            if group.vllm or group.devices is not None or group.model is not None:
                raise ValueError(f"groups.{number}: vllm, devices and model are for kind vllm")
    elif "sim" in fleet.model_fields_set:
        raise ValueError("sim: is for kind sim; remove it or change the kind")


def _check_ports(fleet: FleetLayout) -> None:
    taken: dict[int, str] = {}
    for port, owner in fleet.ports():
        if port < 1:
            raise ValueError(f"{owner} would get port {port}; the launcher has to know the port: give one from 1 on")
        if port > 65535:
            raise ValueError(f"{owner} would get port {port}; lower the base port or the count")
        if port in taken:
            raise ValueError(f"port {port} is assigned to both {taken[port]} and {owner}; move a base port")
        taken[port] = owner


def _check_names(fleet: FleetLayout) -> None:
    twice = _twice([member.name for member in fleet.members])
    if twice:
        raise ValueError(f"groups: {', '.join(twice)} would be named twice; give each group a name_prefix of its own")
    for member in fleet.members:
        if member.name == "proxy" or "/" in member.name:
            raise ValueError(f"name_prefix: {member.name!r} cannot be the name of an instance (it names a log file)")


def _check_required(fleet: FleetLayout) -> None:
    if "model" not in fleet.model_fields_set:
        raise ValueError("model: required with kind vllm: a model id or a folder")


def _check_devices(fleet: FleetLayout) -> None:
    for number, group in enumerate(fleet.all_groups()):
        cpu = any(member.vllm.device == "cpu" for member in fleet.members)
        if cpu and group.devices is not None:
            where = f"groups.{number}.devices" if fleet.groups else "devices"
            raise ValueError(f"{where}: engines on the CPU have none; remove the key or set vllm.device: cuda")
    groups = fleet.all_groups()
    if any(group.devices is not None for group in groups) and any(group.devices is None for group in groups):
        raise ValueError("groups: give `devices` in every group or in none")
    twice = _twice([device for member in fleet.members for device in member.devices])
    if twice:
        raise ValueError(f"devices: {', '.join(twice)} would be used twice; every instance needs devices of its own")


def _check_own_settings(fleet: FleetLayout) -> None:
    for member in fleet.members:
        for argument in member.vllm.extra_args:
            flag = argument.partition("=")[0]
            if flag in _OWN_FLAGS:
                raise ValueError(f"vllm.extra_args: the launcher sets {flag} itself; use {_OWN_FLAGS[flag]}")
        for name in member.env:
            if name in _OWN_VARIABLES:
                raise ValueError(f"env.{name}: the launcher sets it itself; use {_OWN_VARIABLES[name]}")


def _check_alike(fleet: FleetLayout) -> None:
    """Refuse incompatible engines: vLLM 0.18.1 does not compare KV geometries and answers garbage after a pull."""
    first = fleet.members[0]
    for member in fleet.members[1:]:
        if member.model != first.model:
            raise ValueError(
                f"model: {first.name} has {first.model!r} and {member.name} {member.model!r}; instances of one fleet "
                "must be compatible: use one fleet for each model"
            )
        for key in _ALIKE:
            one, other = getattr(first.vllm, key), getattr(member.vllm, key)
            if one != other:
                raise ValueError(
                    f"vllm.{key}: {first.name} has {one!r} and {member.name} {other!r}; instances of one fleet must be "
                    "compatible, or KV pulled from one to the other is garbage"
                )
        if member.vllm.transfer.protocol != first.vllm.transfer.protocol:
            raise ValueError(
                f"vllm.transfer.protocol: {first.name} and {member.name} differ; engines that exchange KV need the same"
            )


def _check_transfer(fleet: FleetLayout) -> None:
    if all(member.role is Role.NONE for member in fleet.members):
        if "transfer" in fleet.vllm.model_fields_set and "protocol" in fleet.vllm.transfer.model_fields_set:
            raise ValueError(
                "vllm.transfer.protocol: no instance has a KV connector; choose a role other than none or remove it"
            )
        return
    for member in fleet.members:
        transfer = member.vllm.transfer
        if "mooncake_protocol" in transfer.extra_config:
            raise ValueError("vllm.transfer.extra_config.mooncake_protocol: use vllm.transfer.protocol")
        for key, transports in misplaced_keys(transfer.protocol, transfer.fabric).items():
            raise ValueError(
                f"vllm.transfer.fabric.{key}: is for protocol {transports}, not {transfer.protocol}; remove it or "
                "change vllm.transfer.protocol"
            )
        if transfer.protocol is not Transport.NVLINK:
            continue
        if member.vllm.device == "cpu":
            raise ValueError("vllm.transfer.protocol: nvlink needs vllm.device: cuda")
        for name in ALLOCATOR_VARIABLES:
            if "expandable_segments" in member.env.get(name, ""):
                raise ValueError(f"env.{name}: NVLink transfers need plain device memory: remove expandable_segments")
        if "MC_FORCE_TCP" in member.env:
            raise ValueError("env.MC_FORCE_TCP: keeps Mooncake to TCP; remove it or choose protocol tcp")
        if "--enable-sleep-mode" in member.vllm.extra_args:
            raise ValueError("vllm.extra_args: NVLink transfers need plain device memory: remove --enable-sleep-mode")


def _check_drawn_ports(fleet: FleetLayout) -> None:
    """Refuse ports that another engine's Mooncake may have drawn before their owner starts to listen."""
    for member in fleet.members:
        if member.role is Role.NONE:
            continue
        drawn = drawn_ports(member.env)
        for port, owner in fleet.ports():
            if port in drawn:
                raise ValueError(
                    f"port {port} of {owner} is one of {drawn[0]} to {drawn[-1]}, from which Mooncake in {member.name} "
                    "draws ports of its own at random; move the base port, or Mooncake's range with "
                    "env.MC_MIN_RPC_PORT and env.MC_MAX_RPC_PORT"
                )


def _check_roles(fleet: FleetLayout) -> None:
    roles = [member.role for member in fleet.members] + [peer.role for peer in fleet.peers]
    gives = sum(role in {Role.KV_PRODUCER, Role.KV_BOTH} for role in roles)
    takes = sum(role in {Role.KV_CONSUMER, Role.KV_BOTH} for role in roles)
    if Role.KV_PRODUCER in roles and not takes:
        raise ValueError(
            "role: producers without consumers: nothing could decode; add a group of kv_consumer or kv_both"
        )
    if Role.KV_CONSUMER in roles and not gives:
        raise ValueError("role: consumers without producers: add a group of kv_producer or kv_both")


def _check_peers(fleet: FleetLayout) -> None:
    peer_hosts = {peer.host or urlsplit(peer.url).hostname or "" for peer in fleet.peers}
    remote = {host for host in peer_hosts if not is_loopback(host) and host != fleet.reached_as}
    if fleet.host in {"0.0.0.0", "::"} and fleet.advertise_host is None:
        raise ValueError(
            "advertise_host: required when host means all addresses: give the address for the proxy and peers"
        )
    if not remote:
        return
    where = ", ".join(sorted(remote))
    if is_loopback(fleet.reached_as):
        raise ValueError(
            f"host: {fleet.reached_as} is reachable from this machine only, but there are peers on {where}; set host "
            "(or advertise_host) to an address they can reach, or they would pull KV from themselves"
        )
    for number, peer in enumerate(fleet.peers):
        for key in ("url", "bootstrap_url", "events_url", "events_replay_url"):
            address = getattr(peer, key)
            if address and is_loopback(urlsplit(address).hostname or ""):
                raise ValueError(
                    f"peers.{number}.{key}: {address} is a loopback address, and the fleet spans several machines; "
                    "give an address that every host can reach"
                )
    if any(member.vllm.transfer.protocol is Transport.NVLINK for member in fleet.members) and any(
        peer.role is not Role.NONE for peer in fleet.peers
    ):
        raise ValueError(
            f"vllm.transfer.protocol: nvlink works within one host, but there are peers on {where}; choose rdma, efa "
            "or tcp, or give those peers role: none"
        )


def _check_hold(fleet: FleetLayout) -> None:
    offload = fleet.proxy.get("offload")
    given = offload.get("hold_s") if isinstance(offload, dict) else None
    # Another type is refused, with its key, where the proxy's settings are read.
    if fleet.hold_s is None or not isinstance(given, int | float) or isclose(given, fleet.hold_s):
        return
    key = "vllm.transfer.abort_timeout_s" if fleet.kind == "vllm" else "sim.abort_timeout_s"
    raise ValueError(
        f"proxy.offload.hold_s: {given:g} contradicts {key}, by which P holds KV for {fleet.hold_s:g} s; remove the "
        "first, or make the two agree"
    )


def _twice(items: Iterable[str]) -> list[str]:
    seen = list(items)
    return sorted({item for item in seen if seen.count(item) > 1})
