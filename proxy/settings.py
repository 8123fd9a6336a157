"""One settings model: YAML file, then environment (``WARMROUTE_...``), then command-line flags, the later winning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

from policies.classes import ClassThresholds
from policies.registry import make_planner, make_routing
from policies.types import Connector, Role, Transport

Seconds = Annotated[float, Field(gt=0)]


class SettingsError(ValueError):
    """The settings cannot be used; the message names each key and what it takes."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class InstanceSettings(_Section):
    """One engine behind one URL."""

    url: str = Field(description="base URL of the engine's OpenAI server, such as http://127.0.0.1:8000")
    name: str = Field(default="", description="name in headers, metrics and records; default: host:port of the URL")
    bootstrap_url: str | None = Field(default=None, description="Mooncake bootstrap server of this engine (its /query)")
    role: Role = Field(
        default=Role.NONE, description="kv_both, kv_producer, kv_consumer, or none without a KV connector"
    )
    connector: Connector = Field(default=Connector.MOONCAKE, description="KV connector: mooncake or nixl")
    host: str = Field(default="", description="machine the engine runs on; default: the host of the URL")
    transport: Transport | None = Field(
        default=None, description="what its connector moves KV over, if proven: tcp, rdma, efa or nvlink"
    )
    events_url: str | None = Field(
        default=None, description="ZMQ endpoint of its KV events, such as tcp://127.0.0.1:5557; none: shadow index only"
    )
    events_replay_url: str | None = Field(
        default=None, description="ZMQ endpoint where it replays events that were missed, if it does"
    )

    @field_validator("url", "bootstrap_url")
    @classmethod
    def _plain_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if not value.startswith(("http://", "https://")) or not value.split("://", 1)[1]:
            raise ValueError(f"{value!r} is not an http:// or https:// URL")
        return value.rstrip("/")

    @field_validator("events_url", "events_replay_url")
    @classmethod
    def _zmq_endpoint(cls, value: str | None) -> str | None:
        if value is None:
            return None
        scheme, _, rest = value.partition("://")
        if scheme not in {"tcp", "ipc"} or not rest or (scheme == "tcp" and not rest.rpartition(":")[2].isdigit()):
            raise ValueError(f"{value!r} is not a ZMQ endpoint: give tcp://HOST:PORT or ipc://PATH")
        if "*" in rest:
            raise ValueError(f"{value!r} is what an engine binds: give the host to connect to in place of '*'")
        return value

    @model_validator(mode="after")
    def _has_name(self) -> InstanceSettings:
        if not self.name:
            object.__setattr__(self, "name", self.url.split("://", 1)[1])
        if not self.host:
            object.__setattr__(self, "host", urlsplit(self.url).hostname or self.url)
        sends = self.role in {Role.KV_BOTH, Role.KV_PRODUCER}
        if sends and self.connector is Connector.MOONCAKE and self.bootstrap_url is None:
            raise ValueError(f"instance {self.name!r} has role {self.role}: give its bootstrap_url, or role: none")
        if self.events_replay_url is not None and self.events_url is None:
            raise ValueError(f"instance {self.name!r} has an events_replay_url: give its events_url too")
        return self


class PolicySettings(_Section):
    """Routing policy by registered name."""

    name: str = Field(default="linear", description="registered routing policy")
    params: dict[str, Any] = Field(default_factory=dict, description="parameters of that policy")

    @model_validator(mode="after")
    def _exists(self) -> PolicySettings:
        make_routing(self.name, self.params)
        return self


class OffloadSettings(_Section):
    """Whether heavy prefills run elsewhere, and how long each leg may take."""

    planner: str = Field(default="never", description="registered offload planner")
    params: dict[str, Any] = Field(default_factory=dict, description="parameters of that planner")
    prefill_timeout_s: Seconds = Field(default=120.0, description="bound on the P leg")
    first_token_timeout_s: Seconds = Field(
        default=60.0, description="bound on the D leg's first token after a hand-off"
    )
    token_timeout_s: Seconds = Field(
        default=0.25, description="further time per token allowed, for answers that are not streamed"
    )
    abandoned_s: Seconds = Field(
        default=120.0,
        description="how long a pull that was given up stays open: closing one that D still has queued ends "
        "vLLM 0.18.1's engine core",
    )
    query_timeout_s: Seconds = Field(default=5.0, description="bound on one bootstrap /query")
    watch_interval_s: Seconds = Field(
        default=2.0, description="while D pulls, how often P is asked whether it is still the same engine"
    )
    hold_s: Seconds = Field(
        default=480.0,
        description="how long an engine keeps KV nobody pulls (its VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT)",
    )
    leak_share: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.1,
        description="share of D's KV pool that abandoned pulls may keep occupied before the instance is recycled",
    )

    @model_validator(mode="after")
    def _exists(self) -> OffloadSettings:
        make_planner(self.planner, self.params)
        return self


class ClassSettings(_Section):
    """Request classes by new tokens: WARM < medium_tokens <= MEDIUM < heavy_tokens <= HEAVY."""

    medium_tokens: int = Field(default=5_000, description="from here on a request is MEDIUM")
    heavy_tokens: int = Field(default=20_000, description="from here on a request is HEAVY")

    @model_validator(mode="after")
    def _ordered(self) -> ClassSettings:
        self.thresholds()
        return self

    def thresholds(self) -> ClassThresholds:
        """The same as the policies take it."""
        return ClassThresholds(self.medium_tokens, self.heavy_tokens)


class IndexSettings(_Section):
    """The shadow prefix index."""

    block_tokens: int = Field(default=16, ge=1, description="block of token-id prompts until an engine reports its own")
    text_block_bytes: int = Field(default=1024, ge=16, description="block of text and chat prompts, in UTF-8 bytes")
    capacity_blocks: int = Field(
        default=1_000_000, ge=1, description="bound per instance until its engine reports a KV pool"
    )
    bytes_per_token: Annotated[float, Field(gt=0)] = Field(
        default=4.0, description="first guess for text, then learned"
    )


class EventSettings(_Section):
    """KV events of the instances that publish them (their ``events_url``)."""

    topic: str = Field(default="", description="topic to subscribe to, a prefix; empty: all")
    receive_hwm: int = Field(default=100_000, ge=1, description="batches queued per instance before some are lost")
    blocks_per_turn: int = Field(default=256, ge=1, description="blocks entered before other work has its turn")
    replay_timeout_s: Seconds = Field(default=5.0, description="bound on fetching missed batches")
    join_interval_s: Seconds = Field(
        default=2.0, description="between two attempts to learn by replay what was stored before the proxy listened"
    )


class TokenizerSettings(_Section):
    """The model's tokenizer, so that text and chat prompts have exact blocks too."""

    path: Path | None = Field(
        default=None, description="tokenizer.json or the model's folder; none: text and chat are routed by bytes"
    )
    chat_template: str = Field(
        default="auto", description="auto (beside the tokenizer), or the Jinja file given to the engine"
    )
    threads: int = Field(default=2, ge=1, description="threads that tokenize")
    cache_bytes: int = Field(default=256 * 1024 * 1024, ge=0, description="memory for pieces of text already tokenized")
    mismatches: int = Field(
        default=3, ge=1, description="prompts in a row an engine counts otherwise before an endpoint is routed by bytes"
    )

    @model_validator(mode="after")
    def _exists(self) -> TokenizerSettings:
        if self.path is not None and not self.path.exists():
            raise ValueError(f"no tokenizer at {self.path}: give a tokenizer.json or a folder that holds one")
        if self.chat_template != "auto" and not Path(self.chat_template).is_file():
            raise ValueError(f"no chat template at {self.chat_template}: give a Jinja file, or auto")
        return self


class LedgerSettings(_Section):
    """Load kept by the router itself."""

    recent_half_life_s: Seconds = Field(default=30.0, description="half-life of the recently-assigned term")


class SessionSettings(_Section):
    """The session table."""

    capacity: int = Field(default=100_000, ge=1, description="sessions remembered at most")
    ttl_s: Seconds = Field(default=3600.0, description="an idle session is forgotten after this long")
    headers: tuple[str, ...] = Field(
        default=(
            "x-session-id",
            "x-claude-code-session-id",
            "session-id",
            "session_id",
            "thread-id",
            "x-dynamo-session-id",
        ),
        description="request headers that may carry the session id, first match wins; then prompt_cache_key, then user",
    )


class TimeoutSettings(_Section):
    """Bounds on every wait for an engine."""

    connect_s: Seconds = Field(default=2.0, description="TCP connect")
    first_byte_s: Seconds = Field(default=600.0, description="first byte of a streamed answer")
    idle_s: Seconds = Field(default=120.0, description="silence between two pieces of a stream")
    total_s: Seconds = Field(default=3600.0, description="one whole request, and a non-streamed answer")
    body_s: Seconds = Field(default=60.0, description="receiving the client's request body")


class HealthSettings(_Section):
    """Active probes and the passive breaker."""

    interval_s: Seconds = Field(default=2.0, description="between two probes of an instance")
    timeout_s: Seconds = Field(default=2.0, description="bound on one probe")
    unhealthy_after: int = Field(
        default=3, ge=1, description="failed probes or requests in a row that take an instance out"
    )
    healthy_after: int = Field(default=1, ge=1, description="good probes in a row that take it back")


class LimitSettings(_Section):
    """Bounds on what a client may send and on retries."""

    body_bytes: int = Field(default=32 * 1024 * 1024, ge=1024, description="largest request body")
    max_attempts: int = Field(
        default=3, ge=1, description="instances tried for one request, before its first byte only"
    )


class BreakdownSettings(_Section):
    """Per-request records."""

    capacity: int = Field(default=10_000, ge=1, description="rows kept in memory")
    jsonl_path: Path | None = Field(default=None, description="also append every row to this file")


class Settings(BaseSettings):
    """Everything ``warmroute serve`` can be told."""

    model_config = SettingsConfigDict(
        env_prefix="WARMROUTE_", env_nested_delimiter="__", extra="forbid", frozen=True, validate_default=True
    )

    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=9090, ge=0, le=65535, description="port to listen on; 0 picks a free one")
    instances: tuple[InstanceSettings, ...] = Field(description="the fleet: at least one engine")
    policy: PolicySettings = Field(default_factory=PolicySettings)
    offload: OffloadSettings = Field(default_factory=OffloadSettings)
    classes: ClassSettings = Field(default_factory=ClassSettings)
    index: IndexSettings = Field(default_factory=IndexSettings)
    events: EventSettings = Field(default_factory=EventSettings)
    tokenizer: TokenizerSettings = Field(default_factory=TokenizerSettings)
    ledger: LedgerSettings = Field(default_factory=LedgerSettings)
    sessions: SessionSettings = Field(default_factory=SessionSettings)
    timeouts: TimeoutSettings = Field(default_factory=TimeoutSettings)
    health: HealthSettings = Field(default_factory=HealthSettings)
    limits: LimitSettings = Field(default_factory=LimitSettings)
    breakdown: BreakdownSettings = Field(default_factory=BreakdownSettings)
    inject_usage: bool = Field(
        default=True,
        description="ask engines for usage on every stream and drop that one event if the client did not ask",
    )
    grace_s: Seconds = Field(default=30.0, description="how long running streams may go on after SIGTERM")
    log_level: str = Field(default="info", description="debug, info, warning or error")

    @field_validator("instances")
    @classmethod
    def _distinct(cls, value: tuple[InstanceSettings, ...]) -> tuple[InstanceSettings, ...]:
        if not value:
            raise ValueError("name at least one instance")
        for what in ("name", "url"):
            seen = [getattr(instance, what) for instance in value]
            twice = sorted({item for item in seen if seen.count(item) > 1})
            if twice:
                raise ValueError(f"instances share the same {what}: {', '.join(twice)}")
        return value


def load_settings(path: Path | None = None, **overrides: Any) -> Settings:
    """Settings from a YAML file (optional), the environment and ``overrides`` (command-line flags), the last winning.

    Raises:
        SettingsError: the file is missing or not YAML, a key is unknown, or a value is refused.
    """
    if path is not None and not path.is_file():
        raise SettingsError(f"no settings file at {path}")

    class FromFile(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            if path is None:
                return (init_settings, env_settings)
            written = YamlConfigSettingsSource(settings_cls, yaml_file=path)()
            for section, name in (("policy", "name"), ("offload", "planner")):
                if any(name in (source().get(section) or {}) for source in (init_settings, env_settings)):
                    # Parameters in the file are those of the file's policy; another one takes its defaults.
                    written = {**written, section: _without_params(written.get(section))}
            return (init_settings, env_settings, InitSettingsSource(settings_cls, init_kwargs=written))

    try:
        return FromFile(**overrides)
    except ValidationError as error:
        raise SettingsError(_explain(error, path)) from error
    except (ValueError, OSError, yaml.YAMLError) as error:
        raise SettingsError(f"{path or 'settings'}: {error}") from error


def _without_params(section: Any) -> Any:
    return {key: value for key, value in section.items() if key != "params"} if isinstance(section, dict) else {}


def _explain(error: ValidationError, path: Path | None) -> str:
    lines = [f"{path or 'settings'}: {error.error_count()} problem(s)"]
    for problem in error.errors():
        where = ".".join(str(part) for part in problem["loc"]) or "(top level)"
        what = "unknown key; check the spelling" if problem["type"] == "extra_forbidden" else problem["msg"]
        lines.append(f"  {where}: {what}")
    return "\n".join(lines)
