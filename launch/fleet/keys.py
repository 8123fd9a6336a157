"""Keys of a fleet file."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from launch.fleet.sections import (
    GroupSettings,
    PairWarmupSettings,
    PeerSettings,
    Port,
    Seconds,
    Section,
    SimSettings,
    VllmSettings,
)
from policies.types import Role


class FleetKeys(Section):
    """Keys of a fleet file, each valid alone."""

    kind: Literal["sim", "vllm"] = Field(description="engine kind: sim (simulated engine) or vllm")
    count: int | None = Field(default=None, ge=1, le=64, description="number of instances (or `devices`, or `groups`)")
    devices: tuple[int | str, ...] | None = Field(
        default=None,
        description="GPUs of the instances, by index or UUID; default: 0, 1, ...; kind vllm on cuda only",
    )
    groups: tuple[GroupSettings, ...] = Field(
        default=(), description="several groups of instances instead of `count`, for example producers and consumers"
    )
    peers: tuple[PeerSettings, ...] = Field(
        default=(), description="instances that are already running, usually on other hosts; only the proxy uses them"
    )
    host: str = Field(default="127.0.0.1", description="address the engines and the proxy listen on")
    advertise_host: str | None = Field(
        default=None, description="address under which proxy and peers reach the engines; default: host"
    )
    base_port: Port = Field(default=8101, description="port of the first instance; instance i gets base_port + i")
    base_bootstrap_port: Port = Field(default=9101, description="bootstrap port of the first instance")
    base_events_port: Port = Field(default=5701, description="KV events port of the first instance (vllm)")
    base_events_replay_port: Port = Field(
        default=5801, description="KV events replay port of the first instance (vllm)"
    )
    base_master_port: Port = Field(default=29500, description="MASTER_PORT of the first instance (vllm)")
    role: Role = Field(default=Role.KV_BOTH, description="kv_both, kv_producer, kv_consumer or none")
    model: str = Field(
        default="warm-sim",
        min_length=1,
        description="sim: the name the engines serve; vllm: a model id or a folder, relative to the current folder or "
        "the project; --model, then WARMROUTE_ENGINE_MODEL override it",
    )
    served_model_name: str | None = Field(default=None, description="name clients use; default: model (vllm)")
    name_prefix: str = Field(default="inst-", description="instance i is called name_prefix + i")
    sim: SimSettings = Field(default_factory=SimSettings)
    vllm: VllmSettings = Field(default_factory=VllmSettings)
    env: dict[str, str] = Field(default_factory=dict, description="environment added to every engine's")
    proxy: dict[str, Any] = Field(
        default_factory=dict, description="settings of the proxy (see `warmroute serve`) without `instances`"
    )
    pair_warmup: PairWarmupSettings = Field(default_factory=PairWarmupSettings)
    restart: Literal["never", "on_failure"] = Field(default="never", description="restart a process that exits")
    max_restarts: int = Field(default=3, ge=0, description="restarts of one process before the launcher gives up")
    max_recycles: int = Field(default=10, ge=0, description="most recycles of one engine requested by the proxy")
    restart_backoff_s: Seconds = Field(default=1.0, description="wait before the first restart; doubles each time")
    stagger_s: float = Field(default=0.0, ge=0, description="pause between two engine starts")
    ready_timeout_s: Seconds = Field(default=60.0, description="time limit for the fleet to become ready")
    stop_grace_s: Seconds = Field(
        default=5.0,
        description="time the engines have between SIGTERM and SIGKILL; the proxy, which ends first, has its grace_s",
    )

    @field_validator("proxy")
    @classmethod
    def _no_instances(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "instances" in value:
            raise ValueError("the launcher fills in `instances`; remove the key")
        return value

    def all_groups(self) -> tuple[GroupSettings, ...]:
        """The groups, or the one group that the keys at the top describe."""
        return self.groups or (GroupSettings(count=self.count, devices=self.devices),)
