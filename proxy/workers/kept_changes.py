"""Rest of a kept change after a reload: the settings of the file replace an instance, or a part of a switch."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from proxy.settings import InstanceSettings
from proxy.settings.diff import Replaced
from proxy.sharing.frames import ChangeRequest

_INSTANCES = "/instances"


def left_of(change: ChangeRequest, parts: Replaced) -> ChangeRequest | None:
    """The change without what the file has replaced; None if nothing is left of it."""
    path = unquote(urlsplit(change.target).path)
    try:
        if path == _INSTANCES or path.startswith(f"{_INSTANCES}/"):
            name = path.removeprefix(f"{_INSTANCES}/") if path != _INSTANCES else _added(change.body)
            return None if parts.instance(name) else change
        return _left_of_switch(change, path, parts)
    except ValueError:
        return change  # One that was slow is kept before its answer: every worker refuses this body.


def _left_of_switch(change: ChangeRequest, path: str, parts: Replaced) -> ChangeRequest | None:
    if path == "/shadow":
        return None if parts.shadow else change
    gone = _gone(path, parts)
    body: Any = json.loads(change.body) if gone else None
    if not isinstance(body, dict):
        return change
    left = {key: value for key, value in body.items() if key not in gone}
    if not left:
        return None
    return change if left == body else msgspec.structs.replace(change, body=json.dumps(left).encode())


def _gone(path: str, parts: Replaced) -> frozenset[str]:
    """Keys of the body whose effect the file has replaced."""
    of_path = {
        "/policy": ((parts.policy, ("name", "params")), (parts.planner, ("planner", "planner_params"))),
        "/admission": ((parts.rule, ("name", "params")), (parts.bound, ("max_hold_s",))),
    }
    return frozenset(key for replaced, keys in of_path.get(path, ()) if replaced for key in keys)


def _added(body: bytes) -> str:
    """Name of the engine that was added: the body may leave it to its URL."""
    return InstanceSettings.model_validate(json.loads(body)).name
