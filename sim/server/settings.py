"""Options of one engine process, resolved against its hardware profile."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace

from sim.core.engine import Engine
from sim.core.handoff import LoadFailurePolicy
from sim.core.types import EngineConfig
from sim.hardware import HardwareProfile, load_profile

ROLES = ("kv_both", "kv_producer", "kv_consumer", "none")
SCHEDULING_POLICIES = ("fcfs", "priority")


class EngineSettingsError(Exception):
    """Options that do not make an engine; the message names the option and the reason."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """One engine process. ``flush_s`` is wall time, all other times are engine seconds."""

    host: str
    port: int
    bootstrap_port: int | None
    """None for role ``none``."""
    model: str
    time_scale: float
    seed: int
    stream_interval: int
    flush_s: float
    access_log: bool
    profile: HardwareProfile
    transport: str | None
    config: EngineConfig
    kv_events_port: int | None = None
    """None: no KV events."""
    kv_events_replay_port: int | None = None
    hash_seed: int = 0
    data_parallel_size: int = 1
    """Ranks behind the port, each with ``config``'s KV pool."""

    @classmethod
    def resolve(
        cls,
        *,
        port: int,
        host: str = "127.0.0.1",
        bootstrap_port: int | None = None,
        profile: str = "h20",
        model: str = "warm-sim",
        block_size: int = 64,
        kv_capacity_tokens: int | None = None,
        role: str = "kv_both",
        max_num_batched_tokens: int | None = None,
        max_num_seqs: int | None = None,
        max_model_len: int | None = None,
        time_scale: float = 1.0,
        seed: int = 0,
        stream_interval: int = 1,
        flush_s: float = 0.008,
        transport: str | None = None,
        connector_kv_fraction: float | None = None,
        kv_load_failure_policy: str = "hang",
        abort_timeout_s: float = 480.0,
        access_log: bool = False,
        kv_events_port: int | None = None,
        kv_events_replay_port: int | None = None,
        hash_seed: int = 0,
        data_parallel_size: int = 1,
        scheduling_policy: str = "fcfs",
        long_prefill_token_threshold: int = 0,
    ) -> ServerSettings:
        """Settings with every option that is not given taken from the profile.

        Raises:
            EngineSettingsError, ProfileError: an option is out of range or the profile does not exist.
        """
        if role not in ROLES:
            raise EngineSettingsError(f"--role {role!r}: choose one of {', '.join(ROLES)}")
        if kv_load_failure_policy not in set(LoadFailurePolicy):
            raise EngineSettingsError(
                f"--kv-load-failure-policy {kv_load_failure_policy!r}: choose hang, fail or recompute"
            )
        if scheduling_policy not in SCHEDULING_POLICIES:
            raise EngineSettingsError(f"--scheduling-policy {scheduling_policy!r}: choose fcfs or priority")
        if kv_events_replay_port is not None and kv_events_port is None:
            raise EngineSettingsError("--kv-events-replay-port needs --kv-events-port")
        if connector_kv_fraction is not None and not 0 <= connector_kv_fraction < 1:
            raise EngineSettingsError(f"--connector-kv-fraction {connector_kv_fraction} is not in 0 .. 1")
        limits = (
            ("--kv-capacity-tokens", kv_capacity_tokens, 1),
            ("--max-num-batched-tokens", max_num_batched_tokens, 1),
            ("--max-num-seqs", max_num_seqs, 1),
            ("--max-model-len", max_model_len, 2),
        )
        for option, value, least in limits:
            if value is not None and value < least:
                raise EngineSettingsError(f"{option} {value}: must be at least {least}")
        hardware = load_profile(profile)
        if role != "none" or transport is not None:
            hardware.transport(transport)
        if connector_kv_fraction is None:
            connector_kv_fraction = hardware.kv.connector_fraction if kv_capacity_tokens is None else 0.0
        tokens = float(hardware.kv.pool_tokens if kv_capacity_tokens is None else kv_capacity_tokens)
        if role != "none":
            tokens *= 1 - connector_kv_fraction
        blocks = int(tokens) // block_size
        if blocks < 1:
            raise EngineSettingsError(f"a KV pool of {int(tokens)} tokens holds no block of {block_size}: enlarge it")
        longest = min(hardware.max_model_len, blocks * block_size) if max_model_len is None else max_model_len
        try:
            config = EngineConfig(
                num_blocks=blocks,
                block_tokens=block_size,
                max_num_batched_tokens=hardware.max_num_batched_tokens
                if max_num_batched_tokens is None
                else max_num_batched_tokens,
                max_num_seqs=hardware.max_num_seqs if max_num_seqs is None else max_num_seqs,
                max_model_len=longest,
                role=role,
                engine_id=str(uuid.uuid4()),
                kv_bytes_per_token=hardware.kv.bytes_per_token,
                abort_timeout_s=abort_timeout_s,
                load_failure_policy=LoadFailurePolicy(kv_load_failure_policy),
                priority_scheduling=scheduling_policy == "priority",
                long_prefill_token_threshold=long_prefill_token_threshold,
            )
        except ValueError as error:
            raise EngineSettingsError(str(error)) from error
        if bootstrap_port is None:
            bootstrap_port = port + 1000 if port else 0
        return cls(
            host=host,
            port=port,
            bootstrap_port=None if role == "none" else bootstrap_port,
            model=model,
            time_scale=time_scale,
            seed=seed,
            stream_interval=stream_interval,
            flush_s=flush_s,
            access_log=access_log,
            profile=hardware,
            transport=transport,
            config=config,
            kv_events_port=kv_events_port,
            kv_events_replay_port=kv_events_replay_port,
            hash_seed=hash_seed,
            data_parallel_size=data_parallel_size,
        )

    def engines(self) -> list[Engine]:
        """A fresh engine for each rank; ranks have ids of their own, as vLLM's."""
        config, transfers = self.config, f"{self.seed}/transfers/{self.port}"
        if self.data_parallel_size == 1:
            return [Engine(config, self.profile.timing, self.profile.transfer_seconds(self.transport, transfers))]
        return [
            Engine(
                replace(config, engine_id=f"{config.engine_id}_dp{rank}"),
                self.profile.timing,
                self.profile.transfer_seconds(self.transport, f"{transfers}/{rank}"),
            )
            for rank in range(self.data_parallel_size)
        ]


def bracketed(host: str) -> str:
    """A host as URLs have it: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host
