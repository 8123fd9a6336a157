"""The settings as a Markdown table, from the model itself: ``docs/settings.md`` is this output, and a test says so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from proxy.settings import ClientKey, InstanceSettings, Settings


def reference() -> str:
    """Markdown: every key, its default and what it does."""
    lines = [
        "# Settings of `warmroute serve`",
        "",
        "Written by `warmroute settings`; a test compares it with the code. A YAML file (`--config`) comes first, then",
        "environment variables (`WARMROUTE_` + the key in capitals, `__` for the dot), then flags; the later wins.",
        "Unknown keys are refused.",
        "",
        "| key | default | what |",
        "| --- | --- | --- |",
    ]
    lines += [f"| `{key}` | {default} | {what} |" for key, default, what in _rows(Settings, "")]
    for what_of, model in (
        ("`instances`", InstanceSettings),
        ("`keys.client`; those of `keys.admin` have no `max_concurrent`", ClientKey),
    ):
        lines += ["", f"Each entry of {what_of}:", "", "| key | default | what |", "| --- | --- | --- |"]
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
