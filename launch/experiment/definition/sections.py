"""The sections of an experiment file: trace, replay, arms, backends, comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from policies.admission.base import DEFAULT_RULE, MAX_HOLD_S, AdmissionRule
from policies.offload.base import OffloadPlanner
from policies.registry import make_admission, make_planner, make_routing
from policies.routing.base import RoutingPolicy
from policies.types import Role
from replayer.records.classes import PlannedClass


def is_recorded(info: ValidationInfo) -> bool:
    """True for settings from the record of an experiment: rules that came later, and code, may not be there."""
    return bool((info.context or {}).get("recorded"))


class Section(BaseModel):
    """Base of an experiment file's sections: unknown keys, NaN and infinity are refused, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class SynthSettings(Section):
    """A generated trace; see `warmroute trace synth`."""

    requests: int = Field(default=1000, ge=1, description="requests")
    seed: int = Field(default=0, ge=0, description="the same seed gives the same bytes")
    rate_per_s: float = Field(default=1.0, gt=0, description="mean arrivals per engine second")
    length_scale: float = Field(default=1.0, gt=0, description="multiplies prompt and output lengths")
    gap_scale: float = Field(default=1.0, gt=0, description="multiplies the requests between a session's turns")
    block_tokens: int = Field(default=64, ge=1, description="tokens of one block id")


class TraceSettings(Section):
    """Source of the requests: a file or a generated trace, whole or cut."""

    path: Path | None = Field(
        default=None,
        description="trace of any known format; relative to the current folder, the experiment file or the project",
    )
    synth: SynthSettings | None = Field(default=None, description="generate a trace instead")
    block_tokens: int | None = Field(default=None, ge=1, description="tokens per block id; default: detected")
    time_unit: Literal["auto", "s", "ms", "us"] = Field(
        default="auto",
        description="of the file's timestamps; auto: the format's own, refused if the rate is implausible",
    )
    sessions: Literal["derived", "single"] = Field(
        default="derived", description="of a file without sessions: by prefix chaining, or one for each request"
    )
    window_s: float | None = Field(
        default=None, gt=0, description="only requests of the trace's first seconds; sessions lose their later turns"
    )
    max_output_tokens: int | None = Field(default=None, ge=1, description="outputs are cut to this many tokens")
    prompt_scale: float | None = Field(
        default=None, gt=0, le=1, description="keep this share of each prompt's blocks, the first ones"
    )

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str | Path) else value

    @model_validator(mode="after")
    def _one_source(self) -> TraceSettings:
        if (self.path is None) == (self.synth is None):
            raise ValueError("give either `path` or `synth`")
        if self.synth is not None and self.block_tokens is not None:
            raise ValueError("block_tokens: belongs under `synth` for a generated trace")
        if self.synth is not None and self._read_otherwise:
            raise ValueError("time_unit, sessions: are for the trace at `path`; a generated one has both")
        return self

    @property
    def as_stored(self) -> bool:
        """True if the file is replayed unchanged."""
        changes = (self.synth, self.block_tokens, self.window_s, self.max_output_tokens, self.prompt_scale)
        return all(change is None for change in changes) and not self._read_otherwise

    @property
    def _read_otherwise(self) -> bool:
        return (self.time_unit, self.sessions) != ("auto", "derived")


class ReplaySettings(Section):
    """Replay settings of the trace, as for `warmroute replay`. Seconds are engine seconds."""

    time_scale: float = Field(
        default=1.0, gt=0, description="arrivals come this many times faster than in the trace (--arrival-speed)"
    )
    think_scale: float | None = Field(
        default=None, gt=0, description="think times likewise (--think-speed); default: time_scale"
    )
    request_limit: int | None = Field(default=None, ge=1, description="whole sessions up to this many requests")
    idle_gap_cap_s: float | None = Field(default=60.0, ge=0, description="longest think time, before scaling")
    max_inflight_sessions: int | None = Field(default=None, ge=1, description="most sessions in progress at once")
    timeout_s: float = Field(default=3600.0, gt=0, description="for one request (live)")
    prompt_mode: Literal["tokens", "text", "chat"] = Field(default="tokens", description="form of the prompts (live)")
    token_low: int = Field(default=1000, ge=0, description="lowest token id sent (live)")
    token_high: int = Field(default=100_000, ge=1, description="token ids sent lie below this (live)")


class ArmPolicy(Section):
    """The routing policy of an arm."""

    name: str = Field(default="warm", description="registered routing policy")
    params: dict[str, Any] = Field(default_factory=dict, description="parameters of that policy")

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _exists(self, info: ValidationInfo) -> ArmPolicy:
        if not is_recorded(info) and ":" not in self.name:
            self.make()
        return self

    def make(self) -> RoutingPolicy:
        """The policy; errors as of `policies.registry.make_routing`."""
        return make_routing(self.name, self.params, modules=True)


class ArmOffload(Section):
    """The offload planner of an arm."""

    planner: str = Field(default="never", description="registered offload planner")
    params: dict[str, Any] = Field(default_factory=dict, description="parameters of that planner")

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"planner": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _exists(self, info: ValidationInfo) -> ArmOffload:
        if not is_recorded(info) and ":" not in self.name:
            self.make()
        return self

    @property
    def name(self) -> str:
        """The planner's name, under the key that policies and rules have."""
        return self.planner

    def make(self) -> OffloadPlanner:
        """The planner; errors as of `policies.registry.make_planner`."""
        return make_planner(self.planner, self.params, modules=True)


class ArmAdmission(Section):
    """The admission rule of an arm."""

    name: str = Field(default=DEFAULT_RULE, description="registered admission rule")
    params: dict[str, Any] = Field(default_factory=dict, description="parameters of that rule")
    max_hold_s: float = Field(default=MAX_HOLD_S, gt=0, description="longest time a request is held, engine seconds")

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _exists(self, info: ValidationInfo) -> ArmAdmission:
        if not is_recorded(info) and ":" not in self.name:
            self.make()
        return self

    def make(self) -> AdmissionRule:
        """The rule; errors as of `policies.registry.make_admission`."""
        return make_admission(self.name, self.params, modules=True)


class ArmSettings(Section):
    """One arm of the comparison; a text is its routing policy, with everything else as by default."""

    policy: ArmPolicy = Field(
        description="routing policy: its name, or `name` and `params`; simulated, MODULE:Class is a name too"
    )
    offload: ArmOffload = Field(
        default_factory=ArmOffload, description="offload planner: its name, or `planner` and `params`; likewise"
    )
    admission: ArmAdmission = Field(
        default_factory=ArmAdmission,
        description="admission rule: its name, or `name`, `params` and `max_hold_s`; likewise",
    )
    fleet: dict[str, Any] = Field(
        default_factory=dict,
        description="keys that differ in this arm: of the fleet file, nested or dotted (live), or of the backend, "
        "except kind and noise (simulated)",
    )

    @model_validator(mode="before")
    @classmethod
    def _policy_alone(cls, value: Any) -> Any:
        return {"policy": value} if isinstance(value, str) else value

    @property
    def parts(self) -> dict[str, ArmPolicy | ArmOffload | ArmAdmission]:
        """Policy, planner and rule, by key."""
        return {"policy": self.policy, "offload": self.offload, "admission": self.admission}


class NoiseSettings(Section):
    """Noise: the differences between simulated repeats."""

    arrival_jitter_s: float = Field(
        default=0.0, ge=0, description="sessions' arrivals move by N(0, this), engine seconds"
    )
    speed_sigma: float = Field(default=0.0, ge=0, le=1, description="every instance's speed is drawn log-normally")
    common: bool = Field(
        default=False,
        description="true: all arms of a repeat draw the same noise (common random numbers), which detects smaller "
        "differences; false: each its own, as on real machines and as an A/A experiment needs",
    )

    @property
    def any(self) -> bool:
        """True if the seed has an effect."""
        return self.arrival_jitter_s > 0 or self.speed_sigma > 0


class LiveBackend(Section):
    """A real fleet for every run: started, proved fresh, stopped."""

    kind: Literal["live"] = Field(description="live")
    fleet: str | dict[str, Any] = Field(description="fleet file, name of a shipped one, or its keys inline")
    overrides: dict[str, Any] = Field(
        default_factory=dict, description="keys that override the fleet file, nested or dotted"
    )
    base_port: int | None = Field(
        default=None,
        ge=1024,
        le=60000,
        description="search for a free range of ports from this one; default: the fleet file's own ports",
    )


class SimulatedBackend(Section):
    """The offline simulator in virtual time (`warmroute simulate`), one process for every run."""

    kind: Literal["simulated"] = Field(description="simulated")
    instances: int = Field(default=8, ge=1, description="engines")
    profile: str = Field(default="h200", description="hardware profile: a name in configs/hardware or a YAML file")
    pool_tokens: int | None = Field(
        default=None, ge=1, description="KV pool of an instance in tokens; default: the profile's"
    )
    max_num_seqs: int | None = Field(default=None, ge=1, description="most requests in one batch")
    scheduling_policy: Literal["fcfs", "priority"] = Field(
        default="fcfs",
        description="order of waiting prompts: of arrival, or priority, which a routing policy with a slowdown sets",
    )
    max_num_batched_tokens: int | None = Field(default=None, ge=1, description="token budget of one engine step")
    long_prefill_token_threshold: int = Field(
        default=0,
        ge=0,
        description="most tokens of one step for one request, so that short prompts share steps with a long one; "
        "0: the whole budget",
    )
    transport: str | None = Field(default=None, description="KV transport; default: the profile's")
    role: Role | None = Field(
        default=None, description="of every instance; default: kv_both with a planner other than never, else none"
    )
    prefill_instances: int = Field(
        default=0, ge=0, description="this many instances only prefill, the others only decode"
    )
    slowdown: float = Field(
        default=1.0, gt=0, description="factor on the length of every engine step: an effect of known size"
    )
    speeds: list[float] = Field(
        default_factory=list,
        description="speeds of the instances over the profile's, in turn: of [1, 0.5] every second is half as fast; "
        "default: all 1",
    )
    breakdown: bool = Field(
        default=True, description="keep a row per request with every candidate's score; false: faster, smaller"
    )
    noise: NoiseSettings = Field(default_factory=NoiseSettings, description="differences between repeats")

    @field_validator("role")
    @classmethod
    def _decodes(cls, value: Role | None) -> Role | None:
        if value is Role.KV_PRODUCER:
            raise ValueError("no instance could decode; give prefill_instances for instances that only prefill")
        return value


class SloSettings(Section):
    """Objectives for goodput, as for `warmroute compare`. Engine seconds, none by default."""

    ttft_s: float | None = Field(default=None, gt=0, description="TTFT at most this")
    tpot_s: float | None = Field(default=None, gt=0, description="TPOT at most this")
    e2e_s: float | None = Field(default=None, gt=0, description="E2E at most this")
    ttft_base_s: float | None = Field(default=None, ge=0, description="length-scaled TTFT: base + slope x tokens")
    ttft_per_1k_tokens_s: float | None = Field(default=None, ge=0, description="length-scaled TTFT: per 1,000 tokens")
    tokens: Literal["prompt", "new"] = Field(default="prompt", description="tokens of the length-scaled objective")

    @model_validator(mode="after")
    def _tokens_of_an_objective(self, info: ValidationInfo) -> SloSettings:
        if is_recorded(info):  # earlier versions accepted it
            return self
        if self.tokens_unused:
            raise ValueError(
                "tokens: is for the length-scaled objective: give ttft_base_s or ttft_per_1k_tokens_s too, or remove it"
            )
        return self

    @property
    def tokens_unused(self) -> bool:
        """True if ``tokens`` is another than the default without the objective that it is for."""
        return self.tokens != "prompt" and self.ttft_base_s is None and self.ttft_per_1k_tokens_s is None


class ComparisonSettings(Section):
    """Comparison settings at the end, as for `warmroute compare`."""

    skip_first_s: float | None = Field(
        default=None, ge=0, description="engine seconds excluded at the start of every run; default: by compare's rule"
    )
    skip_last_s: float | None = Field(default=None, ge=0, description="the same at the end")
    resamples: int = Field(default=2000, ge=1000, description="bootstrap resamples")
    clock: Literal["sent", "scheduled"] = Field(
        default="sent", description="times begin when the client sent the request, or when it was scheduled"
    )
    only_class: PlannedClass | None = Field(
        default=None, description="only requests of this class by new tokens in the trace are compared; default: all"
    )
    slo: SloSettings = Field(default_factory=SloSettings, description="objectives for goodput")
