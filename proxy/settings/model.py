"""Settings model: YAML file, then environment (``WARMROUTE_...``), then command-line flags; later ones win."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from proxy.settings import environment
from proxy.settings.discovery import DiscoverySettings
from proxy.settings.environment import checked_secret, secret_from
from proxy.settings.fields import FieldSettings
from proxy.settings.front import CorsSettings, ModelNameSettings, PassThroughSettings
from proxy.settings.instance import InstanceSettings, distinct_ranks, instances_of
from proxy.settings.observation.meters import MeterSettings
from proxy.settings.observation.shadow import ShadowSettings
from proxy.settings.observation.tracing import TracingSettings
from proxy.settings.prediction import (
    EventSettings,
    IndexSettings,
    LedgerSettings,
    ResponseSettings,
    SnapshotSettings,
    TokenizerSettings,
)
from proxy.settings.resume import ResumeSettings
from proxy.settings.routing import (
    AdmissionSettings,
    ClassSettings,
    OffloadSettings,
    PolicySettings,
    hardware_constants,
)
from proxy.settings.section import Seconds, SettingsError, refuse_boolean
from proxy.settings.security import AdminSettings, FairnessSettings, KeySettings, TlsSettings, checked_forward_headers
from proxy.settings.serving import BreakdownSettings, HealthSettings, LimitSettings, LogSettings, TimeoutSettings
from proxy.settings.sessions import CacheKillerSettings, NormalizeSettings, SessionSettings
from proxy.settings.sharing import SharingSettings
from warmroute_yaml import load_yaml, number_of_problems, problem_text, written_place

LOG_LEVELS = ("debug", "info", "warning", "error")
_NO_ENGINE = (
    "give at least one engine: --instance http://HOST:PORT, instances in --config, WARMROUTE_INSTANCES, or discovery"
)


class Settings(BaseSettings):
    """Settings of ``warmroute serve``."""

    model_config = SettingsConfigDict(
        env_prefix=environment.PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        validate_default=True,
        hide_input_in_errors=True,
    )

    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=9090, ge=0, le=65535, description="port to listen on; 0 picks a free one")
    workers: int = Field(
        default=1, ge=1, le=64, description="processes that serve the port together; see docs/workers.md"
    )
    worker_silence_s: float = Field(
        default=60.0,
        ge=0,
        description="time without a sign of life of its event loop after which one of several workers is killed and "
        "started again, 1 or more; 0: never",
    )
    instances: Annotated[tuple[InstanceSettings, ...], NoDecode] = Field(
        default=(), description="the fleet: at least one engine, unless discovery finds them"
    )
    discovery: DiscoverySettings = Field(default_factory=DiscoverySettings)
    policy: PolicySettings = Field(default_factory=PolicySettings)
    admission: AdmissionSettings = Field(default_factory=AdmissionSettings)
    offload: OffloadSettings = Field(default_factory=OffloadSettings)
    hardware: str | None = Field(
        default=None,
        description="calibrated hardware profile whose constants the cost models start from: a name in "
        "configs/hardware or a YAML file; none: the built-in constants, an H200's",
    )
    shadow: ShadowSettings = Field(default_factory=ShadowSettings)
    classes: ClassSettings = Field(default_factory=ClassSettings)
    index: IndexSettings = Field(default_factory=IndexSettings)
    events: EventSettings = Field(default_factory=EventSettings)
    tokenizer: TokenizerSettings = Field(default_factory=TokenizerSettings)
    ledger: LedgerSettings = Field(default_factory=LedgerSettings)
    sessions: SessionSettings = Field(default_factory=SessionSettings)
    responses: ResponseSettings = Field(default_factory=ResponseSettings)
    cache_killers: CacheKillerSettings = Field(default_factory=CacheKillerSettings)
    normalize: NormalizeSettings = Field(default_factory=NormalizeSettings)
    snapshot: SnapshotSettings = Field(default_factory=SnapshotSettings)
    sharing: SharingSettings = Field(default_factory=SharingSettings)
    timeouts: TimeoutSettings = Field(default_factory=TimeoutSettings)
    health: HealthSettings = Field(default_factory=HealthSettings)
    limits: LimitSettings = Field(default_factory=LimitSettings)
    fields: FieldSettings = Field(default_factory=FieldSettings)
    models: ModelNameSettings = Field(default_factory=ModelNameSettings)
    pass_through: PassThroughSettings = Field(default_factory=PassThroughSettings)
    cors: CorsSettings = Field(default_factory=CorsSettings)
    resume: ResumeSettings = Field(default_factory=ResumeSettings)
    breakdown: BreakdownSettings = Field(default_factory=BreakdownSettings)
    logs: LogSettings = Field(default_factory=LogSettings)
    tracing: TracingSettings = Field(default_factory=TracingSettings)
    meters: MeterSettings = Field(default_factory=MeterSettings)
    keys: KeySettings = Field(default_factory=KeySettings)
    fairness: FairnessSettings = Field(default_factory=FairnessSettings)
    admin: AdminSettings = Field(default_factory=AdminSettings)
    tls: TlsSettings = Field(default_factory=TlsSettings)
    forward_headers: tuple[str, ...] = Field(
        default=("*",),
        description="request headers forwarded to engines, besides x-request-id and the engine's key; *: all but those "
        "that docs/security.md lists",
    )
    engine_key_env: str | None = Field(
        default=None, description="environment variable with the engines' key (vLLM's --api-key)"
    )
    engine_key: SecretStr | None = Field(
        default=None, description="the key itself; engine_key_env keeps it out of files"
    )
    inject_usage: bool = Field(
        default=True,
        description="request usage from engines on every stream; the event is dropped if the client did not request it",
    )
    grace_s: Seconds = Field(default=30.0, description="time running streams have to finish after SIGTERM")
    drain_delay_s: float = Field(
        default=0.0,
        ge=0,
        description="time from not being ready to closing the listener, for load balancers to notice; requests are "
        "served until then",
    )
    log_level: str = Field(default="info", description="debug, info, warning or error")
    log_format: Literal["text", "json"] = Field(default="text", description="text, or json: one object per line")

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean(cls, value: Any, info: ValidationInfo) -> Any:
        return refuse_boolean(cls, value, info)

    @field_validator("instances", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return instances_of(value)

    @field_validator("worker_silence_s")
    @classmethod
    def _at_least_a_second(cls, value: float) -> float:
        if 0 < value < 1:
            raise ValueError(f"{value:g} s would end workers that are only busy: give 1 or more, or 0 for never")
        return value

    @field_validator("log_level")
    @classmethod
    def _known_level(cls, value: str) -> str:
        if value.lower() not in LOG_LEVELS:
            raise ValueError(f"{value!r} is no log level: give {', '.join(LOG_LEVELS[:-1])} or {LOG_LEVELS[-1]}")
        return value.lower()

    @field_validator("instances")
    @classmethod
    def _distinct(cls, value: tuple[InstanceSettings, ...]) -> tuple[InstanceSettings, ...]:
        return distinct_ranks(value)

    @field_validator("forward_headers")
    @classmethod
    def _may_be_forwarded(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return checked_forward_headers(value)

    @field_validator("engine_key")
    @classmethod
    def _plain_secret(cls, value: SecretStr | None) -> SecretStr | None:
        return None if value is None else checked_secret(value, "engine_key")

    @field_validator("hardware")
    @classmethod
    def _calibrated(cls, value: str | None) -> str | None:
        if value is not None:
            hardware_constants(value)
        return value

    @model_validator(mode="after")
    def _some_engine(self) -> Settings:
        if not self.instances and self.discovery.source == "static":
            raise ValueError(_NO_ENGINE)
        return self

    @model_validator(mode="after")
    def _one_engine_key(self) -> Settings:
        if self.engine_key is not None and self.engine_key_env is not None:
            raise ValueError("engine_key and engine_key_env: give one of them")
        for instance in self.instances:
            self.engine_key_for(instance)
        return self

    def engine_key_for(self, instance: InstanceSettings) -> SecretStr | None:
        """The key for an engine: its own, else the fleet's, else None.

        Raises:
            ValueError: the configured environment variable is not set.
        """
        own = instance.own_key()
        if own is not None or self.engine_key_env is None:
            return own or self.engine_key
        return secret_from(self.engine_key_env, "engine_key_env")


@functools.lru_cache(maxsize=4)
def _layered(path: Path | None) -> type[Settings]:
    """Settings whose sources are the flags, the environment and the file, which is read for every instance.

    Kept: making the class takes longer than loading the settings with it.
    """

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
            written = InitSettingsSource(settings_cls, init_kwargs=_written(path))()
            for section, name in (("policy", "name"), ("admission", "name"), ("offload", "planner")):
                if any(name in _section(source(), section) for source in (init_settings, env_settings)):
                    # Parameters in the file belong to the file's policy; another policy starts from its defaults.
                    written = {**written, section: _without_params(written.get(section))}
            return (init_settings, env_settings, InitSettingsSource(settings_cls, init_kwargs=written))

    return FromFile


def load_settings(path: Path | None = None, **overrides: Any) -> Settings:
    """Load settings from an optional YAML file, the environment and ``overrides`` (flags); later ones win.

    Raises:
        SettingsError: the file is missing or not YAML, a key is unknown, or a value is invalid.
    """
    if path is not None and not path.is_file():
        raise SettingsError(f"no settings file at {path}")

    try:
        return _layered(path)(**overrides)
    except ValidationError as error:
        raise SettingsError(_explain(error, path, overrides)) from error
    except ValueError as error:
        raise SettingsError(environment.unread(error, Settings) or f"{path or 'settings'}: {error}") from error
    except (TypeError, OSError, yaml.YAMLError) as error:
        raise SettingsError(f"{path or 'settings'}: {error}") from error
    except RecursionError as error:
        raise SettingsError(f"{path or 'settings'}: nested too deeply") from error


def _written(path: Path) -> dict[str, Any]:
    """Contents of a settings file. Raises OSError, ValueError and YAMLError."""
    with path.open(encoding="utf-8") as file:
        written = load_yaml(file)
    if written is None:
        return {}
    if not isinstance(written, dict):
        raise ValueError("give settings by name, one a line, for example `port: 9090`")
    for key in written:
        if not isinstance(key, str):
            raise ValueError(f"the key {key!r} is not the name of a setting")
    return written


def _section(given: dict[str, Any], name: str) -> dict[str, Any]:
    """A section of one source; empty if it is missing or no section, which the model refuses."""
    section = given.get(name)
    return section if isinstance(section, dict) else {}


def _without_params(section: Any) -> Any:
    return {key: value for key, value in section.items() if key != "params"} if isinstance(section, dict) else {}


def _explain(error: ValidationError, path: Path | None, flags: dict[str, Any]) -> str:
    lines, elsewhere = [], False
    for problem in error.errors():
        where, known = written_place(Settings, problem["loc"])
        variable = environment.origin(problem["loc"], flags)
        from_variable = environment.remark(variable) if variable else ""
        elsewhere |= variable is None
        what = problem_text(problem, known) + from_variable
        if what == _NO_ENGINE:
            where = "instances"
        lines.append(f"  {where or '(top level)'}: {what}")
    source = (path or "settings") if elsewhere else "environment"
    return "\n".join([f"{source}: {number_of_problems(error.error_count())}", *lines])
