"""The source that the settings name."""

from __future__ import annotations

from proxy.discovery.dns import DnsInstances
from proxy.discovery.file import FileInstances
from proxy.discovery.kubernetes import PodInstances
from proxy.discovery.ray import RayInstances
from proxy.discovery.source import InstanceSource
from proxy.settings import DiscoverySettings


def source_of(settings: DiscoverySettings) -> InstanceSource | None:
    """The source; None: ``instances`` of the settings, which a reload changes.

    Raises:
        SettingsError: a package is missing, or a value cannot be used on this machine.
    """
    match settings.source:
        case "file":
            assert settings.file.path is not None
            return FileInstances(settings.file.path, settings.interval_s, settings.timeout_s)
        case "dns":
            return DnsInstances(settings)
        case "kubernetes":
            return PodInstances(settings)
        case "ray":
            return RayInstances(settings)
    return None
