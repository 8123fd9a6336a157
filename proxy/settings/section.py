"""Base types of the settings' sections."""

from __future__ import annotations

from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Seconds = Annotated[float, Field(gt=0)]


class SettingsError(ValueError):
    """Invalid settings; the message names each key and the accepted values."""


class Section(BaseModel):
    """A group of keys: immutable, unknown keys are rejected."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean(cls, value: Any, info: ValidationInfo) -> Any:
        return refuse_boolean(cls, value, info)


def refuse_boolean(model: type[BaseModel], value: Any, info: ValidationInfo) -> Any:
    """The value of a field; raises ValueError for a boolean in place of a number, which pydantic takes as 0 or 1."""
    if isinstance(value, bool) and info.field_name is not None:
        accepted = _alternatives(model.model_fields[info.field_name].annotation)
        if accepted & {int, float} and bool not in accepted:
            raise ValueError(f"a number is needed here, not {str(value).lower()}")
    return value


def _alternatives(annotation: Any) -> set[Any]:
    """Types that a value may have, without those of entries in it."""
    if get_origin(annotation) is Annotated:
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) in {Union, UnionType}:
        return {found for each in get_args(annotation) for found in _alternatives(each)}
    return {annotation} if isinstance(annotation, type) else set()
