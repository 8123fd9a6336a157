"""Shared fixtures: entry points are read once per session."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoints, entry_points
from typing import Any

import pytest

from policies import registry


@pytest.fixture(scope="session", autouse=True)
def _entry_points_read_once() -> Iterator[None]:
    """Every proxy looks at what is installed, package by package; two thousand of them need not."""

    @functools.cache
    def installed(group: str, path: tuple[str, ...]) -> EntryPoints:
        return original(group=group)

    def read_once(**query: Any) -> EntryPoints:
        return installed(query["group"], tuple(sys.path))

    original = entry_points
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "entry_points", read_once)
        yield
