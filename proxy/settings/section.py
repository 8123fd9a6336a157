"""Base types of the settings' sections."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(gt=0)]


class SettingsError(ValueError):
    """Invalid settings; the message names each key and the accepted values."""


class Section(BaseModel):
    """A group of keys: immutable, unknown keys are rejected."""

    model_config = ConfigDict(extra="forbid", frozen=True)
