"""Tenants for ``GET /stats``."""

from __future__ import annotations

import time
from typing import Any

from proxy.core import Core

_SHOWN = 100


def tenant_rows(core: Core) -> dict[str, Any]:
    """JSON-ready: the tenants that wait, are in flight or have a key, at most ``_SHOWN`` in this order."""
    shares, quotas = core.admission.shares, {str(name): quota for name, quota in core.keys.quotas().items()}
    waiting, in_flight, deficits = shares.waiting, shares.in_flight_tokens, shares.deficits
    now_s = time.monotonic()
    names = [name for name in dict.fromkeys((*waiting, *in_flight, *quotas)) if name]
    rows = {}
    for name in names[:_SHOWN]:
        deficit, quota = deficits.get(name), quotas.get(name)
        rows[name] = {
            "waiting": waiting.get(name, 0),
            "in_flight_tokens": in_flight.get(name, 0),
            "deficit_tokens": None if deficit is None else round(deficit),
            "key": None if quota is None else quota.as_dict(now_s),
        }
    return rows
