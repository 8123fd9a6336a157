"""The fleet file: engines, peers and proxy, checked completely before anything starts."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError, model_validator

from launch.fleet.checks import check_fleet
from launch.fleet.layout import ANY_HOST, FleetLayout
from launch.fleet.overrides import apply_environment, apply_overrides
from launch.shipped import ShippedFileError, find_shipped
from policies.types import Role, Transport
from proxy.settings import SettingsError, load_settings
from proxy.settings.diff import MASK, is_secret
from warmroute_yaml import hardware_file, hardware_names, load_yaml, problems_of

FLEETS = Path(__file__).resolve().parents[2] / "configs" / "fleets"
"""Folder of the shipped fleet files."""


class FleetError(ValueError):
    """An unusable fleet file; the message names each key and its allowed values."""


class FleetFile(FleetLayout):
    """Engines of one kind on one host, peers elsewhere, and the proxy in front of them."""

    @model_validator(mode="after")
    def _makes_sense(self) -> FleetFile:
        check_fleet(self)
        return self

    def proxy_config(self, transports: Mapping[str, Transport] | None = None) -> dict[str, Any]:
        """The proxy's settings file: the inline settings plus this fleet's instances and its peers.

        Args:
            transports: KV transport of each instance (by name), as proven by its log; omitted where unknown.
        """
        instances: list[dict[str, Any]] = []
        for member in self.members:
            transport = (transports or {}).get(member.name)
            instances.append(
                {
                    "name": member.name,
                    "url": self.url(member.index),
                    "role": member.role.value,
                    "bootstrap_url": self.bootstrap_url(member.index),
                    "host": self.reached_as,
                    "transport": transport.value if transport else None,
                    "connector": "mooncake" if member.role is not Role.NONE else None,
                    "events_url": self.events_url(member.index),
                    "events_replay_url": self.events_replay_url(member.index),
                    "data_parallel_size": member.ranks if member.ranks > 1 else None,
                    "priority_scheduling": True if member.priority_scheduling else None,
                }
            )
        instances += [peer.model_dump(mode="json", exclude_defaults=True) for peer in self.peers]
        given = [{key: value for key, value in entry.items() if value is not None} for entry in instances]
        settings = {"host": self.host, **self.proxy, "port": self.proxy_port, "instances": given}
        if self.admin_port is not None:
            settings["admin"] = {**(self.proxy.get("admin") or {}), "port": self.admin_port}
        offload = self.proxy.get("offload") or {}
        if self.hold_s is not None and isinstance(offload, dict):
            settings["offload"] = {**offload, "hold_s": self.hold_s}
        return settings

    def shown_proxy_config(self) -> dict[str, Any]:
        """`proxy_config` as it may be printed, with secrets masked."""
        config = self.proxy_config()
        shown: dict[str, Any] = _masked(config, load_settings(**config).model_dump())
        return shown


def _masked(given: Any, parsed: Any, key: str = "") -> Any:
    if given is not None and is_secret(key, parsed):
        return MASK
    if isinstance(given, dict):
        values = parsed or {}
        return {name: _masked(value, values.get(name), name) for name, value in given.items()}
    if isinstance(given, list) and isinstance(parsed, list | tuple) and len(given) == len(parsed):
        return [_masked(value, one, key) for value, one in zip(given, parsed, strict=True)]
    return given


def parse_fleet(values: Any, source: str = "fleet") -> FleetFile:
    """A checked fleet from plain values, the proxy's settings included.

    Raises:
        FleetError: unknown key, wrong value, or keys that contradict each other.
    """
    if not isinstance(values, dict):
        raise FleetError(f"{source}: expected keys such as `kind` and `count`, found {type(values).__name__}")
    try:
        fleet = FleetFile(**values)
    except ValidationError as error:
        raise FleetError(explain(error, source, FleetFile)) from error
    if fleet.kind == "sim":
        _check_profile(fleet.sim.profile, source)
    try:
        load_settings(**fleet.proxy_config())
    except SettingsError as error:
        raise FleetError(f"{source}: proxy {error}") from error
    return fleet


def load_fleet(path: Path, overrides: Sequence[str] = ()) -> FleetFile:
    """Read a fleet file; a bare name such as ``sim-4x`` means the shipped one.

    Args:
        path: the file.
        overrides: ``dotted.key=value`` with a YAML value, applied in order after the file and the environment.

    Raises:
        FleetError: no such file, not YAML, an override that cannot be applied, or `parse_fleet` refuses it.
    """
    path = find_fleet(path)
    try:
        values = load_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise FleetError(f"{path}: cannot be read ({error})") from error
    except yaml.YAMLError as error:
        raise FleetError(f"{path}: not YAML ({error})") from error
    if isinstance(values, dict):
        try:
            values = apply_overrides(apply_environment(values), overrides)
        except ValueError as error:
            raise FleetError(f"{path}: {error}") from error
    return parse_fleet(values, str(path))


def _check_profile(profile: str, source: str) -> None:
    path = hardware_file(profile)
    if path.is_file():
        return
    if path == Path(profile):
        raise FleetError(f"{source}: sim.profile: no file at {profile}")
    names = ", ".join(hardware_names())
    raise FleetError(f"{source}: sim.profile: no profile {profile!r}; known: {names}, or a path to one")


def find_fleet(path: Path) -> Path:
    """The file meant by a path or by the name of a shipped fleet.

    Raises:
        FleetError: neither exists.
    """
    try:
        return find_shipped(path, FLEETS)
    except ShippedFileError as error:
        raise FleetError(f"no fleet file at {path}; shipped fleets: {error}") from error


def ports_in_use(fleet: FleetFile, *, with_proxy: bool = True) -> list[str]:
    """Sentences on the fleet's ports that are already in use; empty when all are free."""
    problems = []
    listened_to = False
    # vLLM's bootstrap and event sockets listen on all addresses, whatever the host.
    everywhere: set[int] = set()
    if fleet.kind == "vllm":
        for member in fleet.members:
            _, bootstrap, events, replay, _ = member.ports()
            everywhere |= {port for port, _ in (*bootstrap, *events, *replay)}
    for port, owner in fleet.ports():
        if not with_proxy and owner == "the proxy":
            continue
        host = ANY_HOST if port in everywhere else fleet.host
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                    return [f"host: {fleet.host!r} is no address of this machine ({error.strerror})"]
                problems.append(f"port {port} for {owner} is not free ({error.strerror})")
                listened_to |= error.errno == errno.EADDRINUSE
    if problems:
        problems[-1] += "; stop the processes that listen there or move the ports in the fleet file"
    if listened_to:
        problems[-1] += " (`warmroute status` shows if a fleet of yours runs, `warmroute down` stops it)"
    return problems


def explain(error: ValidationError, source: str, model: type[BaseModel]) -> str:
    """A pydantic error of values for ``model`` as one line per problem, with the key and the remedy."""
    return f"{source}: {problems_of(error, model)}"
