"""Environment variables: secrets in them, and those that a problem with the settings comes from. No value is shown."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, SecretStr

PREFIX = "WARMROUTE_"
_PRINTABLE = re.compile(r"[\x21-\x7e]+")
_UNREAD = re.compile(r'field "(\w+)" from source "EnvSettingsSource"')


def checked_secret(secret: SecretStr, key: str) -> SecretStr:
    """Return the secret if it is valid in a header.

    Raises:
        ValueError: it is empty or has spaces, line ends or non-ASCII characters; the message does not contain it.
    """
    if not _PRINTABLE.fullmatch(secret.get_secret_value()):
        raise ValueError(f"{key}: a key must be printable ASCII without spaces, and not empty")
    return secret


def secret_from(variable: str, key: str, what: str = "the engine's key") -> SecretStr:
    """The secret in the environment variable that the setting ``key`` names; ``what`` it is, for errors.

    Raises:
        ValueError: the variable is not set, or its value is not a valid key.
    """
    value = os.environ.get(variable)
    if not value:
        raise ValueError(f"{key}: the environment variable {variable} is not set; set it to {what}")
    return checked_secret(SecretStr(value), f"{key} ({variable})")


def origin(location: Sequence[int | str], flags: dict[str, Any]) -> str | None:
    """The variable that set a value, or a part of it; None if none did. ``flags`` win over the environment."""
    if not location or _has(flags, location):
        return None
    for end in range(len(location), 0, -1):
        name = _set(_variable(location[:end]))
        if name is not None and _has(_decoded(os.environ[name]), location[end:]):
            return name
    below = _variable(location) + "__"
    return next((name for name in sorted(os.environ) if name.upper().startswith(below)), None)


def remark(name: str) -> str:
    """End of the message about a problem with this variable."""
    return f" (environment variable {name}{'' if os.environ.get(name) else ' is empty: give a value, or unset it'})"


def unread(error: ValueError, settings: type[BaseModel]) -> str | None:
    """Explain the failure of reading a variable that takes JSON; None if the error is another one."""
    found = _UNREAD.search(str(error))
    if found is None:
        return None
    field = found[1]
    whole = _variable([field])
    names = [
        name
        for name, value in sorted(os.environ.items())
        if (name.upper() == whole or name.upper().startswith(whole + "__")) and not _is_json(value)
    ]
    known = settings.model_fields.get(field)
    section = known.annotation if known is not None else None
    remedy = "write its value as JSON"
    if isinstance(section, type) and issubclass(section, BaseModel):
        key = next(iter(section.model_fields))
        remedy = f'write a JSON object, as {{"{key}": …}}, or set one variable for each key, as {whole}__{key.upper()}'
    return f"environment variable {', '.join(names) or whole}: {remedy}"


def _variable(location: Sequence[int | str]) -> str:
    return f"{PREFIX}{'__'.join(str(part) for part in location)}".upper()


def _set(variable: str) -> str | None:
    return next((name for name in os.environ if name.upper() == variable), None)


def _decoded(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def _is_json(value: str) -> bool:
    try:
        json.loads(value)
    except ValueError:
        return False
    return True


def _has(value: Any, location: Sequence[int | str]) -> bool:
    """True if the value at this place was given, or no part of it can be looked at."""
    for part in location:
        if not isinstance(value, dict | list):
            # Not what is expected there, or one text for a list.
            return True
        if isinstance(value, dict):
            if part not in value:
                return False
            value = value[part]
        elif not isinstance(part, int) or part >= len(value):
            return False
        else:
            value = value[part]
    return True
