"""Instances from Ray: the engines of a fleet that `warmroute up --on ray` started."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator

from pydantic import TypeAdapter, ValidationError

from proxy.discovery.source import DiscoveryError, Wanted, distinct
from proxy.discovery.template import problem_of
from proxy.settings import DiscoverySettings, InstanceSettings

_JOIN_S = 60.0
"""Bound on joining the cluster, which imports Ray."""
_MAX_LINE_BYTES = 4 * 1024 * 1024
_ENTRIES = TypeAdapter(list[InstanceSettings])


class RayInstances:
    """The engines that a fleet's actors report as ready, read by a process that has joined the cluster."""

    def __init__(self, settings: DiscoverySettings) -> None:
        self._settings = settings

    @property
    def origin(self) -> str:
        """Fleet and cluster."""
        return f"Ray at {self._settings.ray.address}, fleet {self._settings.ray.fleet}"

    async def sets(self) -> AsyncGenerator[Wanted, None]:
        """Yield what the reader prints. Raises DiscoveryError: it cannot be started, ends, or is silent."""
        settings, ray = self._settings, self._settings.ray
        assert ray.fleet is not None
        command = (ray.python or sys.executable, "-m", "proxy.discovery.ray_reader", ray.fleet, ray.address)
        try:
            reader = await asyncio.create_subprocess_exec(
                *command,
                *(str(settings.interval_s), str(settings.timeout_s)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                limit=_MAX_LINE_BYTES,
            )
        except OSError as error:
            raise DiscoveryError(f"the reader cannot be started: {error}") from error
        assert reader.stdout is not None
        patience_s = _JOIN_S
        try:
            while True:
                try:
                    async with asyncio.timeout(patience_s):
                        line = await reader.stdout.readline()
                except (TimeoutError, ValueError) as error:
                    raise DiscoveryError(f"the reader was silent for {patience_s:g} s, or its line too long") from error
                if not line:
                    raise DiscoveryError("the reader has ended: is warmroute installed for discovery.ray.python?")
                yield _wanted(line)
                patience_s = settings.interval_s + 2 * settings.timeout_s
        finally:
            if reader.returncode is None:
                reader.kill()
            await reader.wait()


def _wanted(line: bytes) -> Wanted:
    """Raises DiscoveryError: the line has an error, or no instances."""
    try:
        found = json.loads(line)
        if isinstance(found, dict):
            raise DiscoveryError(str(found.get("error")))
        return distinct(_ENTRIES.validate_python(found), [])
    except ValidationError as error:
        raise DiscoveryError(f"an actor reported an invalid instance: {problem_of(error)}") from error
    except json.JSONDecodeError as error:
        raise DiscoveryError(f"the reader printed {line[:100]!r}") from error
