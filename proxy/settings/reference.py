"""The settings as a Markdown table, generated from the model; kept in ``docs/reference/settings.md``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from proxy.settings import ClientKey, InstanceSettings, Settings


def reference() -> str:
    """Markdown of every key with its default and description."""
    lines = [
        "# Reference: settings of `warmroute serve`",
        "",
        "Generated from the code by `make reference`; `warmroute settings` prints it. Unknown keys are rejected.",
        "Where settings come from, with examples: [settings](../settings.md).",
        "",
        "| key | default | description |",
        "| --- | --- | --- |",
    ]
    lines += [f"| `{key}` | {default} | {what} |" for key, default, what in _rows(Settings, "")]
    for what_of, model in (
        ("`instances`", InstanceSettings),
        ("`keys.client`; those of `keys.admin` have `name` and `sha256` only", ClientKey),
    ):
        lines += ["", f"Each entry of {what_of}:", "", "| key | default | description |", "| --- | --- | --- |"]
        lines += [f"| `{key}` | {default} | {what} |" for key, default, what in _rows(model, "")]
    return "\n".join(lines) + "\n"


def _rows(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _rows(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _default(field), field.description or ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "*(required)*"
    value: Any = field.get_default(call_default_factory=True)
    if isinstance(value, tuple) and value:
        return ", ".join(f"`{item}`" for item in value)
    return f"`{json.dumps(value, default=str)}`"
