"""Property tests have no deadline per example: they check behaviour, not the load of the machine."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")
