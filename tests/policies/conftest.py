"""Property tests measure behaviour, not how busy the machine is: no deadline per example."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")
