"""What every section of the settings is made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(gt=0)]


class SettingsError(ValueError):
    """The settings cannot be used; the message names each key and what it takes."""


class Section(BaseModel):
    """A group of keys: immutable, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)
