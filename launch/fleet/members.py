"""The instances of a fleet, expanded from groups, base ports and devices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from launch.fleet.keys import FleetKeys
from launch.fleet.sections import GroupSettings, VllmSettings
from policies.types import Role
from warmroute_yaml import problem_text

_ROLE_PREFIX = {Role.KV_PRODUCER: "p-", Role.KV_CONSUMER: "d-"}


@dataclass(frozen=True, slots=True)
class Member:
    """One instance of a fleet; ports it does not listen on are None."""

    index: int
    """Counted through the whole fleet."""
    name: str
    role: Role
    model: str
    port: int
    bootstrap_port: int | None
    events_port: int | None
    replay_port: int | None
    master_port: int | None
    devices: tuple[str, ...]
    """GPUs by index or UUID; empty on the CPU and for simulated engines."""
    vllm: VllmSettings
    ranks: int = 1
    """Data-parallel ranks; rank r publishes its events r ports above the first."""
    priority_scheduling: bool = False
    env: dict[str, str] = field(default_factory=dict)

    @property
    def kv_role(self) -> Role:
        """The role its engine is started with."""
        return self.role if self.role is Role.NONE else self.vllm.transfer.kv_role or self.role

    def ports(self) -> tuple[tuple[tuple[int, str], ...], ...]:
        """Ports with their owners, by kind; empty for a kind it does not listen on. The same kinds for all members."""
        return (
            _owned(self.port, self.name),
            _owned(self.bootstrap_port, f"{self.name} (bootstrap)"),
            _owned(self.events_port, f"{self.name} (KV events)", self.ranks),
            _owned(self.replay_port, f"{self.name} (KV events replay)", self.ranks),
            _owned(self.master_port, f"{self.name} (MASTER_PORT)"),
        )


def _owned(first: int | None, owner: str, count: int = 1) -> tuple[tuple[int, str], ...]:
    return () if first is None else tuple((first + offset, owner) for offset in range(count))


def expand(fleet: FleetKeys) -> tuple[Member, ...]:
    """The fleet's instances in order: groups as written, instances of a group by number.

    Raises:
        ValueError: a group's settings cannot be used; the message names the key.
    """
    members: list[Member] = []
    unnumbered_device = 0
    for number, group in enumerate(fleet.all_groups()):
        vllm = _merged(fleet, group, f"groups.{number}")
        role = group.role or fleet.role
        count, devices = _devices(group, vllm, f"groups.{number}" if fleet.groups else "")
        prefix = group.name_prefix
        if prefix is None:
            prefix = _ROLE_PREFIX.get(role, fleet.name_prefix) if fleet.groups else fleet.name_prefix
        for place in range(count):
            index = len(members)
            each = vllm.tensor_parallel_size * vllm.data_parallel_size
            mine = devices[place * each : (place + 1) * each]
            if fleet.kind == "vllm" and vllm.device == "cuda" and not mine:
                mine = tuple(str(unnumbered_device + offset) for offset in range(each))
                unnumbered_device += each
            ranks_before = sum(member.ranks for member in members)
            members.append(_member(fleet, group, vllm, role, index, ranks_before, f"{prefix}{place}", mine))
    return tuple(members)


def _member(
    fleet: FleetKeys,
    group: GroupSettings,
    vllm: VllmSettings,
    role: Role,
    index: int,
    ranks_before: int,
    name: str,
    devices: tuple[str, ...],
) -> Member:
    real = fleet.kind == "vllm"
    # vLLM's consumer starts no bootstrap server; the simulated engine always does when it has a connector.
    kv_role = vllm.transfer.kv_role or role
    has_bootstrap = role is not Role.NONE and not (real and kv_role is Role.KV_CONSUMER)
    events = real and vllm.events.enabled
    return Member(
        index=index,
        name=name,
        role=role,
        model=group.model or fleet.model,
        port=fleet.base_port + index,
        bootstrap_port=fleet.base_bootstrap_port + index if has_bootstrap else None,
        events_port=fleet.base_events_port + ranks_before if events else None,
        replay_port=fleet.base_events_replay_port + ranks_before if events and vllm.events.replay else None,
        master_port=fleet.base_master_port + index if real else None,
        devices=devices,
        vllm=vllm,
        ranks=vllm.data_parallel_size if real else fleet.sim.data_parallel_size,
        priority_scheduling=(vllm if real else fleet.sim).scheduling_policy == "priority",
        env={**fleet.env, **group.env},
    )


def _merged(fleet: FleetKeys, group: GroupSettings, where: str) -> VllmSettings:
    """The fleet's `vllm` settings with the group's laid over them, section by section."""
    if not group.vllm:
        return fleet.vllm
    try:
        return VllmSettings(**_laid_over(fleet.vllm.model_dump(exclude_unset=True), group.vllm))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{where}.vllm.{key}: {problem_text(first)}") from error


def _laid_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = _laid_over(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return merged


def _devices(group: GroupSettings, vllm: VllmSettings, where: str) -> tuple[int, tuple[str, ...]]:
    """Number of instances of a group, and its devices (none when the launcher assigns them)."""
    key = f"{where}." if where else ""
    if group.devices is None:
        if group.count is None:
            raise ValueError(f"{key}count: Field required: the number of instances, or their `devices`")
        return group.count, ()
    each = vllm.tensor_parallel_size * vllm.data_parallel_size
    if not group.devices or len(group.devices) % each:
        raise ValueError(
            f"{key}devices: {len(group.devices)} devices cannot be divided into {each} per instance "
            "(tensor_parallel_size × data_parallel_size)"
        )
    count = len(group.devices) // each
    if group.count not in {None, count}:
        raise ValueError(
            f"{key}count: {group.count} instances of {each} device(s) each need {(group.count or 0) * each} devices, "
            f"found {len(group.devices)}; leave one of the two keys out"
        )
    return count, tuple(str(device) for device in group.devices)
