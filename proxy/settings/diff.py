"""Differences between two settings, key by key, with secrets masked, and the keys that a running proxy can change."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel, SecretStr

from proxy.settings import InstanceSettings, KeyLists, Settings

MASK = "***"
"""Shown in place of a secret."""
_SECRET_KEYS = frozenset({"sha256", "api_key", "engine_key", "password", "secret"})
_CREDENTIALS = re.compile(r"://[^/@\s]*@")

_INSTANCE_KEYS = frozenset({*InstanceSettings.model_fields, "source"})

LIVE = (
    "instances",
    "policy",
    "admission",
    "offload",
    "shadow",
    "classes",
    "ledger",
    "sessions",
    "cache_killers",
    "normalize",
    "timeouts",
    "health",
    "limits",
    "fields",
    "models",
    "pass_through",
    "cors",
    "keys",
    "fairness",
    "resume",
    "admin.open_metrics",
    "admin.allowed_hosts",
    "admin.allowed_networks",
    "forward_headers",
    "engine_key",
    "engine_key_env",
    "inject_usage",
    "grace_s",
    "drain_delay_s",
    "log_level",
)
"""Keys and sections that a reload applies. All other keys need a restart, including new ones."""


class Change(NamedTuple):
    """One differing key. Values are JSON-ready and contain no secret; None: the key is absent."""

    key: str
    old: Any
    new: Any

    @property
    def live(self) -> bool:
        """True if a running proxy can apply it."""
        return any(self.key == each or self.key.startswith(f"{each}.") for each in LIVE)

    @property
    def effect(self) -> str:
        """Effect of a reload on this key."""
        return "applied" if self.live else "needs a restart"

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"key": self.key, "old": self.old, "new": self.new, "effect": self.effect}

    def would_be(self) -> str:
        """The change as a dry run finds it."""
        effect = "would be applied" if self.live else "would need a restart"
        return f"{self.key}: {_text(self.old)} -> {_text(self.new)} ({effect})"

    def __str__(self) -> str:
        return f"{self.key}: {_text(self.old)} -> {_text(self.new)} ({self.effect})"


class Replaced(NamedTuple):
    """Parts that a reload takes from the file again, whatever was switched over HTTP before."""

    policy: bool
    planner: bool
    rule: bool
    """The admission rule."""
    bound: bool
    """``admission.max_hold_s``."""
    shadow: bool
    instances: tuple[str, ...]
    """Changed keys of instances, without the section."""

    def instance(self, name: str) -> bool:
        """True if this instance, or a rank of the engine of this name, is as in the file again."""
        return any(_is_of(name, key) for key in self.instances)


def replaced(keys: Iterable[str]) -> Replaced:
    """Parts that a reload with these changed keys takes from the file."""
    keys = tuple(keys)
    return Replaced(
        policy=any(key.startswith("policy.") for key in keys),
        planner=any(key == "offload.planner" or key.startswith("offload.params") for key in keys),
        rule=any(key == "admission.name" or key.startswith("admission.params") for key in keys),
        bound="admission.max_hold_s" in keys,
        shadow=any(key.startswith("shadow.") for key in keys),
        instances=tuple(key.removeprefix("instances.") for key in keys if key.startswith("instances.")),
    )


def differences(old: Settings, new: Settings) -> list[Change]:
    """Every differing key in the order of the settings, except the fleet (``instance_differences``).

    Of API keys only those that the settings list themselves: ``key_differences`` has those of their file too.
    """
    return _compare(old, new, skip="instances")


def instance_differences(old: Mapping[str, InstanceSettings], new: Mapping[str, InstanceSettings]) -> list[Change]:
    """Differences of the fleet by instance name: a key of an instance, or the URL of an added or removed one."""
    changes: list[Change] = []
    for name in dict.fromkeys((*old, *new)):
        before, after = old.get(name), new.get(name)
        if before is None or after is None:
            urls = (each and _CREDENTIALS.sub(f"://{MASK}@", each.url) for each in (before, after))
            changes.append(Change(f"instances.{name}", *urls))
        else:
            changes += [
                Change(f"instances.{name}.{change.key}", change.old, change.new) for change in _compare(before, after)
            ]
    return changes


def key_differences(old: KeyLists, new: KeyLists) -> list[Change]:
    """Differences of the keys by name, wherever they are listed: an added or removed one, or a field of one."""
    changes: list[Change] = []
    for side in KeyLists.model_fields:
        before, after = ({key.name: key for key in getattr(lists, side)} for lists in (old, new))
        for name in dict.fromkeys((*before, *after)):
            known, wanted, label = before.get(name), after.get(name), f"keys.{side}.{name}"
            if known is None or wanted is None:
                changes.append(Change(label, *(each and MASK for each in (known, wanted))))
            else:
                changes += [Change(f"{label}.{each.key}", each.old, each.new) for each in _compare(known, wanted)]
    return changes


def effective_settings(old: Settings, new: Settings) -> Settings:
    """``new``, with the values of ``old`` for the keys that need a restart."""
    update: dict[str, Any] = {}
    for change in differences(old, new):
        if change.live:
            continue
        section, _, rest = change.key.partition(".")
        if not rest:
            update[section] = getattr(old, section)
            continue
        field = rest.partition(".")[0]
        so_far: BaseModel = update.get(section, getattr(new, section))
        update[section] = so_far.model_copy(update={field: getattr(getattr(old, section), field)})
    return new.model_copy(update=update)


def _is_of(name: str, key: str) -> bool:
    """True if ``NAME``, ``NAME/RANK`` or a field of either is the key; names may have dots, as addresses do."""
    if not key.startswith(name):
        return False
    rank, _, rest = key.removeprefix(name).partition(".")
    if rank and not (rank[0] == "/" and rank[1:].isdecimal()):
        return False
    return not rest or rest.partition(".")[0] in _INSTANCE_KEYS


def _compare(old: BaseModel, new: BaseModel, skip: str = "") -> list[Change]:
    before, after = dict(_leaves(old, "", skip)), dict(_leaves(new, "", skip))
    return [
        Change(key, _shown(key, before.get(key)), _shown(key, after.get(key)))
        for key in dict.fromkeys((*before, *after))
        if before.get(key) != after.get(key)
    ]


def _leaves(value: Any, key: str, skip: str = "") -> Iterator[tuple[str, Any]]:
    """Keys and values of a model, down to values that are not sections, mappings or lists of named sections."""
    if isinstance(value, BaseModel):
        items = [(name, getattr(value, name)) for name in type(value).model_fields if name != skip]
    elif isinstance(value, Mapping):
        items = [(str(name), each) for name, each in value.items()]
    elif isinstance(value, tuple) and value and all(isinstance(each, BaseModel) for each in value):
        items = [(_name_of(each, number), each) for number, each in enumerate(value)]
    else:
        if not isinstance(value, tuple | Mapping):
            yield key, value
        elif value:
            yield key, tuple(value)
        return
    for name, each in items:
        yield from _leaves(each, f"{key}.{name}" if key else name)


def _name_of(entry: BaseModel, number: int) -> str:
    return str(getattr(entry, "label", "") or getattr(entry, "name", number))


def is_secret(key: str, value: Any) -> bool:
    """True if a value is not to be shown, by its type or by the last part of its key."""
    return isinstance(value, SecretStr) or key.rpartition(".")[2] in _SECRET_KEYS


def _shown(key: str, value: Any) -> Any:
    if value is None:
        return None
    if is_secret(key, value):
        return MASK
    if isinstance(value, tuple | list | frozenset):
        return [_shown(key, each) for each in value]
    if isinstance(value, bool | int | float):
        return value
    return _CREDENTIALS.sub(f"://{MASK}@", str(value))


def _text(value: Any) -> str:
    return "none" if value is None else str(value)
