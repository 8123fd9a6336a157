"""Settings of what clients see: names of models, further paths, pages of other origins."""

from __future__ import annotations

import re

from pydantic import Field, field_validator, model_validator

from proxy.paths import OtherPaths
from proxy.settings.section import Section

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+")
_MAX_NAME = 256

ANY_END = "*"
"""Last character of an alias that stands for all names with what is before it."""


class ModelNameSettings(Section):
    """Names under which clients may use models."""

    aliases: dict[str, str] = Field(
        default_factory=dict,
        description="further name of a model, or the beginning of such names with a * behind it: the name that engines "
        "serve it by, which replaces it in the body",
    )

    @model_validator(mode="after")
    def _plain(self) -> ModelNameSettings:
        for alias, model in self.aliases.items():
            for name in (alias, model):
                if not 0 < len(name) <= _MAX_NAME or not name.isprintable():
                    raise ValueError(f"models.aliases: {name!r} is not a model's name")
            if ANY_END in alias[:-1]:
                raise ValueError(
                    f"models.aliases: {alias!r}: a * may only be the last character, where it stands for any end of "
                    "the name, as in claude-*"
                )
            if ANY_END in model:
                raise ValueError(
                    f"models.aliases: {model!r}, which {alias!r} stands for, is not one model: * is for aliases"
                )
            if model in self.aliases:
                raise ValueError(f"models.aliases: {alias!r} is an alias of {model!r}, which is itself an alias")
        return self


class PassThroughSettings(Section):
    """Requests that are passed on to the least loaded instance."""

    paths: tuple[str, ...] = Field(
        default=(),
        description="further paths below /v1/ to pass on (GET and POST): /v1/NAME, or /v1/NAME/* for everything below",
    )

    @field_validator("paths")
    @classmethod
    def _below_v1(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        OtherPaths(value)
        return tuple(dict.fromkeys(value))


class CorsSettings(Section):
    """Pages of other origins that may use the client endpoints."""

    allowed_origins: tuple[str, ...] = Field(
        default=(),
        description="origins whose pages may use the client endpoints, as SCHEME://HOST[:PORT]; *: all; none: no page",
    )

    @field_validator("allowed_origins")
    @classmethod
    def _are_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        lowered = tuple(dict.fromkeys(origin.lower() for origin in value))
        for origin in lowered:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is not an origin: give SCHEME://HOST[:PORT] without a path, or *")
        return lowered
