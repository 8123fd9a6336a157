"""Versions of the engines, as they report them under ``GET /version``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import httpx
import msgspec

from proxy.clip import clip
from proxy.fleet.instances import Instance, Instances

_KEPT_S = 10.0
"""Seconds for which answers are repeated: clients must not be able to multiply their requests."""
_LONGEST = 100

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class EngineVersions:
    """Reads the versions when they are requested.

    Args:
        instances: the fleet.
        get: GET of a path of an engine, bounded in time and size.
    """

    def __init__(self, instances: Instances, get: Callable[[Instance, str], Awaitable[httpx.Response]]) -> None:
        self._instances = instances
        self._get = get
        self._lock = asyncio.Lock()
        self._read_s = float("-inf")
        self._versions: dict[str, str | None] = {}

    async def read(self) -> dict[str, str | None]:
        """Version by instance; None: the engine reports none, or does not answer. At most 10 s old."""
        async with self._lock:
            if time.monotonic() - self._read_s >= _KEPT_S:
                instances = list(self._instances)
                versions = await asyncio.gather(*(self._version(instance) for instance in instances))
                self._versions = {each.name: version for each, version in zip(instances, versions, strict=True)}
                self._read_s = time.monotonic()
            return self._versions

    async def _version(self, instance: Instance) -> str | None:
        try:
            answer = await self._get(instance, "/version")
            if answer.status_code != 200:
                return None
            version = msgspec.json.decode(_decode(answer.content)["version"], type=str)
        except (httpx.HTTPError, msgspec.DecodeError, UnicodeDecodeError, KeyError, RecursionError):
            return None
        return clip(version, _LONGEST)
