"""The fleet file: what to start, checked in full before anything starts."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from policies.types import Role
from proxy.settings import Settings, SettingsError, load_settings

FLEETS = Path(__file__).resolve().parent.parent / "configs" / "fleets"
"""Where the shipped fleet files are."""

Port = Annotated[int, Field(ge=1024, le=65535)]
Seconds = Annotated[float, Field(gt=0)]


class FleetError(ValueError):
    """A fleet file that cannot be used; the message names each key and what it takes."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SimSettings(_Section):
    """Settings of simulated engines; None leaves the engine's own default."""

    profile: str = Field(default="h20", description="hardware profile: how long prefill and decode take")
    block_size: int = Field(default=64, ge=1, description="tokens of one KV block")
    kv_capacity_tokens: int | None = Field(default=None, ge=1, description="KV pool in tokens; default: the profile's")
    time_scale: float = Field(default=1.0, gt=0, le=1000, description="how many times faster than real time it runs")
    seed: int = Field(default=0, description="seed of the generated text, the same for every engine of the fleet")
    max_num_batched_tokens: int | None = Field(default=None, ge=1, description="token budget of one engine step")
    max_num_seqs: int | None = Field(default=None, ge=1, description="requests in one batch at most")
    max_model_len: int | None = Field(default=None, ge=2, description="most tokens of prompt plus output")
    stream_interval: int | None = Field(default=None, ge=1, description="fewest tokens in one stream event")
    flush_ms: float | None = Field(default=None, ge=0.1, description="wall time over which tokens form one event")
    transport: str | None = Field(default=None, description="how KV moves; default: the profile's")
    connector_kv_fraction: float | None = Field(default=None, ge=0, lt=1, description="KV pool the connector takes")
    kv_load_failure_policy: Literal["hang", "fail", "recompute"] | None = Field(
        default=None, description="what an engine does when a KV pull fails"
    )
    abort_timeout_s: float | None = Field(default=None, gt=0, description="engine seconds P holds blocks nobody pulls")


class FleetFile(_Section):
    """N engines of one kind on one host, and the proxy in front of them."""

    kind: Literal["sim"] = Field(description="engine kind: sim (simulated engine)")
    count: int = Field(ge=1, le=64, description="number of instances")
    host: str = Field(default="127.0.0.1", description="address the engines and the proxy listen on")
    base_port: Port = Field(default=8101, description="port of the first instance; instance i gets base_port + i")
    base_bootstrap_port: Port = Field(default=9101, description="bootstrap port of the first instance")
    role: Role = Field(default=Role.KV_BOTH, description="kv_both, kv_producer, kv_consumer or none")
    model: str = Field(default="warm-sim", min_length=1, description="model name the engines serve")
    name_prefix: str = Field(default="inst-", description="instance i is called name_prefix + i")
    sim: SimSettings = Field(default_factory=SimSettings)
    env: dict[str, str] = Field(default_factory=dict, description="environment added to every engine's")
    proxy: dict[str, Any] = Field(
        default_factory=dict, description="settings of the proxy (see `warmroute serve`) without `instances`"
    )
    restart: Literal["never", "on_failure"] = Field(default="never", description="restart a process that exits")
    max_restarts: int = Field(default=3, ge=0, description="restarts of one process before it is given up")
    restart_backoff_s: Seconds = Field(default=1.0, description="wait before the first restart; doubles each time")
    stagger_s: float = Field(default=0.0, ge=0, description="pause between two engine starts")
    ready_timeout_s: Seconds = Field(default=60.0, description="how long the fleet may take to become ready")
    stop_grace_s: Seconds = Field(default=5.0, description="time between SIGTERM and SIGKILL")

    @field_validator("proxy")
    @classmethod
    def _no_instances(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "instances" in value:
            raise ValueError("the launcher fills in `instances`; remove the key")
        return value

    @model_validator(mode="after")
    def _ports_distinct(self) -> FleetFile:
        taken: dict[int, str] = {}
        for port, owner in self.ports():
            if port > 65535:
                raise ValueError(f"{owner} would get port {port}; lower the base port or the count")
            if port in taken:
                raise ValueError(f"port {port} is wanted by both {taken[port]} and {owner}; move a base port")
            taken[port] = owner
        return self

    @property
    def has_bootstrap(self) -> bool:
        """Whether the engines run a KV connector, and so answer on bootstrap ports."""
        return self.role is not Role.NONE

    @property
    def proxy_port(self) -> int:
        """Port of the proxy."""
        port = self.proxy.get("port", Settings.model_fields["port"].default)
        return port if isinstance(port, int) else 0

    def name(self, index: int) -> str:
        """Name of instance ``index``."""
        return f"{self.name_prefix}{index}"

    def url(self, index: int) -> str:
        """Base URL of instance ``index``."""
        return f"http://{self.host}:{self.base_port + index}"

    def bootstrap_url(self, index: int) -> str | None:
        """Bootstrap URL of instance ``index``; None without a KV connector."""
        return f"http://{self.host}:{self.base_bootstrap_port + index}" if self.has_bootstrap else None

    def proxy_url(self) -> str:
        """Base URL of the proxy."""
        return f"http://{self.proxy.get('host', self.host)}:{self.proxy_port}"

    def ports(self) -> list[tuple[int, str]]:
        """Every port the fleet listens on, with who wants it."""
        wanted = [(self.base_port + index, self.name(index)) for index in range(self.count)]
        if self.has_bootstrap:
            wanted += [
                (self.base_bootstrap_port + index, f"{self.name(index)} (bootstrap)") for index in range(self.count)
            ]
        return [*wanted, (self.proxy_port, "the proxy")]

    def proxy_config(self) -> dict[str, Any]:
        """The proxy's settings file: the inline settings plus this fleet's instances."""
        instances = []
        for index in range(self.count):
            entry = {"name": self.name(index), "url": self.url(index), "role": self.role.value}
            if (bootstrap := self.bootstrap_url(index)) is not None:
                entry["bootstrap_url"] = bootstrap
            instances.append(entry)
        return {"host": self.host, **self.proxy, "port": self.proxy_port, "instances": instances}


def parse_fleet(values: Any, source: str = "fleet") -> FleetFile:
    """A checked fleet from plain values, the proxy's settings included.

    Raises:
        FleetError: unknown key, wrong value, or ports that clash.
    """
    if not isinstance(values, dict):
        raise FleetError(f"{source}: expected keys such as `kind` and `count`, found {type(values).__name__}")
    try:
        fleet = FleetFile(**values)
    except ValidationError as error:
        raise FleetError(explain(error, source)) from error
    try:
        load_settings(**fleet.proxy_config())
    except SettingsError as error:
        raise FleetError(f"{source}: proxy {error}") from error
    return fleet


def load_fleet(path: Path) -> FleetFile:
    """Read a fleet file; a bare name such as ``sim-4x`` means the shipped one.

    Raises:
        FleetError: no such file, not YAML, or `parse_fleet` refuses it.
    """
    path = find_fleet(path)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise FleetError(f"{path}: cannot be read ({error})") from error
    except yaml.YAMLError as error:
        raise FleetError(f"{path}: not YAML ({error})") from error
    return parse_fleet(values, str(path))


def find_fleet(path: Path) -> Path:
    """The file meant by a path or by the name of a shipped fleet.

    Raises:
        FleetError: neither exists.
    """
    if path.is_file():
        return path
    shipped = FLEETS / f"{path.name}.yaml"
    if len(path.parts) == 1 and shipped.is_file():
        return shipped
    names = ", ".join(sorted(found.stem for found in FLEETS.glob("*.yaml")))
    raise FleetError(f"no fleet file at {path}; shipped fleets: {names or 'none'}")


def ports_in_use(fleet: FleetFile, *, with_proxy: bool = True) -> list[str]:
    """Which of the fleet's ports somebody else listens on already, as sentences; empty when all are free."""
    problems = []
    for port, owner in fleet.ports():
        if not with_proxy and owner == "the proxy":
            continue
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((fleet.host, port))
            except OSError as error:
                problems.append(f"port {port} for {owner} is not free ({error.strerror})")
    return problems


def explain(error: ValidationError, source: str) -> str:
    """A pydantic error as one line for each problem, with the key and what to do."""
    lines = [f"{source}: {error.error_count()} problem(s)"]
    for problem in error.errors():
        where = ".".join(str(part) for part in problem["loc"]) or "(top level)"
        what = "unknown key; check the spelling" if problem["type"] == "extra_forbidden" else problem["msg"]
        lines.append(f"  {where}: {what.removeprefix('Value error, ')}")
    return "\n".join(lines)
