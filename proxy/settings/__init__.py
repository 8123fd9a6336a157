"""Settings of ``warmroute serve``."""

from proxy.settings.discovery import DiscoverySettings, EngineTemplate
from proxy.settings.front import CorsSettings, ModelNameSettings, PassThroughSettings
from proxy.settings.instance import InstanceSettings, TakenAddresses, distinct_ranks, roles_permit_hand_offs
from proxy.settings.model import Settings, load_settings
from proxy.settings.observation.meters import MeterSettings
from proxy.settings.observation.shadow import ShadowEntry, ShadowSettings
from proxy.settings.observation.tracing import TracingSettings
from proxy.settings.prediction import (
    EventSettings,
    IndexSettings,
    LedgerSettings,
    ResponseSettings,
    SnapshotSettings,
    TokenizerSettings,
)
from proxy.settings.resume import ResumeSettings, ResumeWhen
from proxy.settings.routing import AdmissionSettings, ClassSettings, OffloadSettings, PolicySettings
from proxy.settings.section import Seconds, Section, SettingsError
from proxy.settings.security import (
    AdminKey,
    AdminSettings,
    ClientKey,
    FairnessSettings,
    KeyLists,
    KeySettings,
    TlsSettings,
)
from proxy.settings.serving import BreakdownSettings, HealthSettings, LimitSettings, LogSettings, TimeoutSettings
from proxy.settings.sessions import CacheKillerSettings, NormalizeSettings, SessionSettings
from proxy.settings.sharing import SharingSettings

__all__ = [
    "AdminKey",
    "AdminSettings",
    "AdmissionSettings",
    "BreakdownSettings",
    "CacheKillerSettings",
    "ClassSettings",
    "ClientKey",
    "CorsSettings",
    "DiscoverySettings",
    "EngineTemplate",
    "EventSettings",
    "FairnessSettings",
    "HealthSettings",
    "IndexSettings",
    "InstanceSettings",
    "KeyLists",
    "KeySettings",
    "LedgerSettings",
    "LimitSettings",
    "LogSettings",
    "MeterSettings",
    "ModelNameSettings",
    "NormalizeSettings",
    "OffloadSettings",
    "PassThroughSettings",
    "PolicySettings",
    "ResponseSettings",
    "ResumeSettings",
    "ResumeWhen",
    "Seconds",
    "Section",
    "SessionSettings",
    "Settings",
    "SettingsError",
    "ShadowEntry",
    "ShadowSettings",
    "SharingSettings",
    "SnapshotSettings",
    "TakenAddresses",
    "TimeoutSettings",
    "TlsSettings",
    "TokenizerSettings",
    "TracingSettings",
    "distinct_ranks",
    "load_settings",
    "roles_permit_hand_offs",
]
