"""Version of the installed package, for the records."""

from __future__ import annotations

import importlib.metadata


def installed_version() -> str:
    """Version of the installed package; "" when run from a source tree."""
    try:
        return importlib.metadata.version("warmroute")
    except importlib.metadata.PackageNotFoundError:
        return ""
