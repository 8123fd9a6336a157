"""Instance settings from an address and the template of the fleet's engines."""

from __future__ import annotations

import ipaddress
from typing import Any

from pydantic import ValidationError

from proxy.settings import EngineTemplate, InstanceSettings
from warmroute_yaml import problem_text


def instance_at(
    template: EngineTemplate, address: str, port: int | None, name: str = "", **other: Any
) -> InstanceSettings:
    """The engine at an address.

    Args:
        template: keys that all engines share.
        address: host name or IP address.
        port: port of its API; None: the template's.
        name: its name; default: host:port.
        other: keys that differ from the template: ``role``, ``host``, ``data_parallel_size``, ``priority_scheduling``,
            the three other ports.

    Raises:
        ValueError: no port is known, or a value is invalid; the message names the key.
    """
    port = port or template.port
    if port is None:
        raise ValueError("its port is not known: give discovery.engine.port")
    host = authority(address)
    ports = {
        key: other.pop(key, None) or getattr(template, key)
        for key in ("bootstrap_port", "events_port", "events_replay_port")
    }
    try:
        return InstanceSettings(
            url=f"{template.scheme}://{host}:{port}",
            name=name,
            bootstrap_url=_url("http", host, ports["bootstrap_port"]),
            events_url=_url("tcp", host, ports["events_port"]),
            events_replay_url=_url("tcp", host, ports["events_replay_port"]),
            connector=template.connector,
            api_key_env=template.api_key_env,
            **{key: getattr(template, key) for key in ("role", "data_parallel_size", "priority_scheduling")} | other,
        )
    except ValidationError as error:
        raise ValueError(problem_of(error)) from error


def problem_of(error: ValidationError) -> str:
    """First problem of a validation in one line, without the values."""
    first = error.errors(include_url=False)[0]
    where, what = ".".join(str(part) for part in first["loc"]), problem_text(first)
    return f"{where}: {what}" if where else what


def _url(scheme: str, host: str, port: int | None) -> str | None:
    return None if port is None else f"{scheme}://{host}:{port}"


def authority(address: str) -> str:
    """A host as URLs have it: IPv6 addresses in brackets."""
    try:
        return f"[{address}]" if ipaddress.ip_address(address).version == 6 else address
    except ValueError:
        return address
