"""Secrets in the settings: read from the environment, never displayed."""

from __future__ import annotations

import os
import re

from pydantic import SecretStr

_PRINTABLE = re.compile(r"[\x21-\x7e]+")


def checked_secret(secret: SecretStr, key: str) -> SecretStr:
    """Return the secret if it is valid in a header.

    Raises:
        ValueError: it is empty or has spaces, line ends or non-ASCII characters; the message does not contain it.
    """
    if not _PRINTABLE.fullmatch(secret.get_secret_value()):
        raise ValueError(f"{key}: a key must be printable ASCII without spaces, and not empty")
    return secret


def secret_from(variable: str, key: str) -> SecretStr:
    """The secret in the environment variable that the setting ``key`` names.

    Raises:
        ValueError: the variable is not set, or its value is not a valid key.
    """
    value = os.environ.get(variable)
    if not value:
        raise ValueError(f"{key}: the environment variable {variable} is not set; set it to the engine's key")
    return checked_secret(SecretStr(value), f"{key} ({variable})")
