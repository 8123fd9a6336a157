"""Everything ``warmroute serve`` can be told."""

from proxy.settings.instance import InstanceSettings
from proxy.settings.model import Settings, load_settings
from proxy.settings.prediction import EventSettings, IndexSettings, LedgerSettings, SessionSettings, TokenizerSettings
from proxy.settings.routing import ClassSettings, OffloadSettings, PolicySettings
from proxy.settings.section import Seconds, Section, SettingsError
from proxy.settings.serving import BreakdownSettings, HealthSettings, LimitSettings, TimeoutSettings

__all__ = [
    "BreakdownSettings",
    "ClassSettings",
    "EventSettings",
    "HealthSettings",
    "IndexSettings",
    "InstanceSettings",
    "LedgerSettings",
    "LimitSettings",
    "OffloadSettings",
    "PolicySettings",
    "Seconds",
    "Section",
    "SessionSettings",
    "Settings",
    "SettingsError",
    "TimeoutSettings",
    "TokenizerSettings",
    "load_settings",
]
