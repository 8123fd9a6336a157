"""Instances from a file that is read again and again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from proxy.discovery.source import DiscoveryError, Wanted, polled
from proxy.discovery.template import problem_of
from proxy.settings import InstanceSettings, distinct_ranks
from warmroute_yaml import load_yaml

MAX_BYTES = 8 * 1024 * 1024
"""A thousand instances need 300 KB."""

_ENTRIES = TypeAdapter(tuple[InstanceSettings, ...])


class FileInstances:
    """The instances that a YAML or JSON file lists.

    The content is compared, not the time of its change: file systems differ in how exact that is, and Kubernetes
    changes a mounted ConfigMap by swapping links. A file with one bad entry is refused as a whole.
    """

    def __init__(self, path: Path, interval_s: float, timeout_s: float) -> None:
        self._path = path
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._seen: tuple[bytes, Wanted] | None = None

    @property
    def origin(self) -> str:
        """The file."""
        return f"file {self._path}"

    def sets(self) -> AsyncGenerator[Wanted, None]:
        """Read the file every ``interval_s`` seconds. Raises DiscoveryError: it cannot be read, or is invalid."""
        return polled(self._read, self._interval_s, self._timeout_s)

    async def _read(self) -> Wanted:
        content, wanted = await asyncio.to_thread(self._load)
        self._seen = (content, wanted)
        return wanted

    def _load(self) -> tuple[bytes, Wanted]:
        """Content and set; parsed in a thread, since a large file takes a while. Blocks."""
        try:
            with self._path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise DiscoveryError(f"cannot be read: {error.strerror or error}") from error
        if self._seen is not None and self._seen[0] == content:
            return self._seen
        if len(content) > MAX_BYTES:
            raise DiscoveryError(f"has more than {MAX_BYTES} bytes")
        try:
            return content, parsed(content.decode())
        except (ValueError, RecursionError) as error:
            raise DiscoveryError(str(error)) from error


def parsed(text: str) -> Wanted:
    """The instances in a file's text.

    Raises:
        ValueError: neither YAML nor JSON, not a list of instances, an invalid entry, or a name or URL that two share.
    """
    entries = _entries(text)
    try:
        instances = _ENTRIES.validate_python(entries)
    except ValidationError as error:
        raise ValueError(f"entry {problem_of(error)}") from error
    return Wanted(distinct_ranks(instances))


def _entries(text: str) -> list[Any]:
    try:
        found = json.loads(text) if text.lstrip().startswith(("[", "{")) else load_yaml(text)
    except json.JSONDecodeError:
        try:
            found = load_yaml(text)  # YAML in brackets is no JSON
        except yaml.YAMLError as error:
            raise ValueError(f"neither JSON nor YAML: {error}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {error}") from error
    if isinstance(found, dict) and set(found) == {"instances"}:
        found = found["instances"] or []
    if not isinstance(found, list):
        raise ValueError("give a list of instances, alone or below the only key instances")
    return found
