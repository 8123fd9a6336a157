"""The tasks that change a running core, with one owner: probes, fleet changes, discovery, reload of settings."""

from __future__ import annotations

from proxy.core import Core
from proxy.operations.discovery import Discovery
from proxy.operations.fleet_changes import FleetChanges
from proxy.operations.health import HealthMonitor
from proxy.operations.reload import Reloader


class Operations:
    """Operations on one core. The application owns it and closes it before the core."""

    def __init__(self, core: Core) -> None:
        self.monitor = HealthMonitor(core)
        self.fleet = FleetChanges(core, self.monitor)
        self.discovery = Discovery(core, self.fleet)
        self.reloader = Reloader(core, self.fleet)
        if core.sharing is not None:
            core.sharing.others.on_drain = self.fleet.drain_elsewhere
            core.sharing.others.on_doubt = self.monitor.doubt

    async def close(self) -> None:
        """End reloads and fleet changes in progress."""
        await self.reloader.close()
        await self.fleet.close()
