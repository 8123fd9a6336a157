"""All checks, in display order; importing the modules registers them."""

from __future__ import annotations

from launch.doctor import (
    checks_caching,
    checks_deep,
    checks_engines,
    checks_fabric,
    checks_gpus,
    checks_host,
    checks_network,
    checks_tcp,
)
from launch.doctor.findings import CHECKS, Check

MODULES = (
    checks_engines,
    checks_caching,
    checks_gpus,
    checks_fabric,
    checks_tcp,
    checks_host,
    checks_network,
    checks_deep,
)


def all_checks() -> list[Check]:
    """Every registered check."""
    return list(CHECKS)
