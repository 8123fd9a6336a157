"""Settings of resuming: what becomes of a stream whose engine died in the middle of it."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from proxy.settings.section import Section


class ResumeWhen(StrEnum):
    """Which requests may be resumed."""

    NEVER = "never"
    ON_REQUEST = "on_request"
    """Those with the header ``x-warmroute-resume: 1``."""
    ALWAYS = "always"
    """All but those with the header ``x-warmroute-resume: 0``."""


class ResumeSettings(Section):
    """Streams that an engine broke off, continued on another instance."""

    enabled: ResumeWhen = Field(
        default=ResumeWhen.NEVER,
        description="never; on_request: streams with the header x-warmroute-resume: 1; always: all but those with 0",
    )
    max_resumes: int = Field(default=2, ge=1, description="instances asked to continue one request, in all")
    repeat_tokens: int = Field(
        default=256,
        ge=0,
        description="tokens already sent that may be generated once more, where an answer cannot be continued after "
        "its last token; 0: none",
    )
    sampled: bool = Field(
        default=False,
        description="also continue answers drawn at random without a seed: the rest is a valid sample, but not the one "
        "the first engine would have drawn",
    )
