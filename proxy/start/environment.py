"""Environment variables that look like settings, but are none."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from pydantic import BaseModel

from proxy.settings import Settings

_PREFIX = "WARMROUTE_"
_OTHERS = frozenset(
    _PREFIX + name
    for name in (
        "ADMIN_KEY",
        "API_KEY",
        "CLIENTS",
        "ENGINE_MODEL",
        "ENGINE_PYTHON",
        "ENGINES",
        "ENGINES_RUN",
        "KEY",
        "TRACES",
        "TRANSFER_RECORDS",
    )
)
"""Variables of the other commands, of examples and of the tests."""
_OF_TESTS = re.compile(rf"{_PREFIX}(TEST|FUZZ)_\w+")
_OF_KUBERNETES = re.compile(r"\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
"""Set in every container for each Service of its namespace; one named ``warmroute`` has our prefix."""
_LINK = re.compile(r"(tcp|udp|sctp)://")
"""Value of the variable ``..._PORT`` of such a Service."""


def unknown_variables(environ: Mapping[str, str], settings: Settings) -> list[str]:
    """One sentence for each variable with our prefix that is no setting, with the nearest valid name.

    Args:
        environ: the environment.
        settings: as loaded; variables that hold the keys they name are known.
    """
    keys = {settings.engine_key_env, *(each.api_key_env for each in settings.instances)}
    known = frozenset(_names(Settings, _PREFIX))
    sections = frozenset(_PREFIX + name.upper() for name in Settings.model_fields)
    return [
        _sentence(name, known)
        for name, value in sorted(environ.items())
        if name.upper().startswith(_PREFIX)
        and name.upper().partition("__")[0] not in sections
        and name not in keys
        and not _of_others(name, value)
    ]


def service_link(environ: Mapping[str, str]) -> str | None:
    """Error for a ``WARMROUTE_PORT`` that Kubernetes has set for a Service named ``warmroute``; None without one."""
    name = f"{_PREFIX}PORT"
    if not _LINK.match(environ.get(name, "")):
        return None
    return (
        f"{name} is {environ[name]!r}: Kubernetes sets it for a Service named warmroute. Set enableServiceLinks: false "
        "in the pod, or give the Service another name"
    )


def _of_others(name: str, value: str) -> bool:
    if name in _OTHERS or _OF_TESTS.fullmatch(name) or _OF_KUBERNETES.fullmatch(name):
        return True
    return name.endswith("_PORT") and bool(_LINK.match(value))


def _names(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        variable = prefix + name.upper()
        yield variable
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _names(field.annotation, f"{variable}__")


def _sentence(name: str, known: frozenset[str]) -> str:
    # Without the difference between one and two underscores, the most frequent mistake is an exact match.
    spelling = {each.replace("__", "_"): each for each in sorted(known)}
    near = get_close_matches(name.upper().replace("__", "_"), spelling, n=1, cutoff=0.7)
    meant = f"did you mean {spelling[near[0]]}?" if near else "`warmroute settings` lists the settings"
    return f"the environment variable {name} is no setting and is ignored: {meant}"
