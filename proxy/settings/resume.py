"""Settings of resuming streams whose engine failed."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from proxy.settings.section import Section


class ResumeWhen(StrEnum):
    """Requests that may be resumed."""

    NEVER = "never"
    ON_REQUEST = "on_request"
    """Those with the header ``x-warmroute-resume: 1``."""
    ALWAYS = "always"
    """All except those with the header ``x-warmroute-resume: 0``."""


class ResumeSettings(Section):
    """Continuing broken streams on another instance."""

    enabled: ResumeWhen = Field(
        default=ResumeWhen.NEVER,
        description="never; on_request: streams with the header x-warmroute-resume: 1; always: all except those with 0",
    )
    max_resumes: int = Field(default=2, ge=1, description="maximum number of instances that may continue one request")
    repeat_tokens: int = Field(
        default=256,
        ge=0,
        description="already sent tokens that may be generated again if an answer cannot be continued after "
        "its last token; 0: none",
    )
    sampled: bool = Field(
        default=False,
        description="also continue answers sampled without a seed: the rest is a valid sample, but not the one "
        "the first engine would have generated",
    )
