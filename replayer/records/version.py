"""Which version of the product wrote a file."""

from __future__ import annotations

import importlib.metadata


def installed_version() -> str:
    """Version of the installed package; "" when run from bare sources."""
    try:
        return importlib.metadata.version("warmroute")
    except importlib.metadata.PackageNotFoundError:
        return ""
