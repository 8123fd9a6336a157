"""One line about who may call which endpoints, since a proxy that can be reached from other machines closes some."""

from __future__ import annotations

from proxy.settings import KeyLists, Settings
from proxy.settings.urls import host_and_port, is_loopback


def openness(settings: Settings) -> str:
    """Access to the client side and to the admin side under these settings, with the setting behind each."""
    keys = settings.keys.lists()
    return f"{_client_side(settings, keys)}; {_admin_side(settings, keys)}"


def is_exposed(settings: Settings) -> bool:
    """True if the engines' API is open to other machines without a key."""
    return not is_loopback(settings.host) and not settings.keys.lists().client


def _client_side(settings: Settings, keys: KeyLists) -> str:
    where = host_and_port(settings.host, settings.port)
    if keys.client:
        return f"API on {where}: open to holders of a client key"
    if is_loopback(settings.host):
        return f"API on {where}: open to this machine"
    return f"API on {where}: open to everyone who can reach it (no keys.client)"


def _admin_side(settings: Settings, keys: KeyLists) -> str:
    admin = settings.admin
    host = settings.host if admin.port is None else admin.host
    where = "there too" if admin.port is None else f"on {host_and_port(host, admin.port)}"
    metrics = ", except GET /metrics (admin.open_metrics)" if admin.open_metrics else ""
    if keys.admin:
        return f"admin endpoints {where}: open to holders of an admin key{metrics}"
    if is_loopback(host):
        return (
            f"admin endpoints {where}: open to this machine, except changes to the fleet, which need keys.admin "
            "(`warmroute key new`)"
        )
    return (
        f"admin endpoints {where}: closed{metrics}, because {host} is not loopback and there is no keys.admin: add one "
        "(`warmroute key new`), or set admin.port to give them a listener on loopback"
    )
