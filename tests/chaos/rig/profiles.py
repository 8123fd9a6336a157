"""Number of fuzzing examples: always the same hundred, or more with ``WARMROUTE_FUZZ_EXAMPLES``."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

EXAMPLES = int(os.environ.get("WARMROUTE_FUZZ_EXAMPLES", "0"))

fuzz = settings(
    max_examples=EXAMPLES or 120,
    # Without the variable the examples are the same on every machine, so that CI does not fail by chance.
    derandomize=not EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
"""Decorator for every fuzzer of this folder."""
