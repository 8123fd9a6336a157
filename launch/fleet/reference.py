"""The fleet file's keys as Markdown tables, generated from the models; kept in ``docs/reference/fleet-file.md``.

``python -m launch.fleet.reference`` prints the page.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from enum import Enum
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from launch.fleet.file import FleetFile
from launch.fleet.sections import GroupSettings, PeerSettings, SimSettings, VllmSettings

_INTRODUCTION = """# Reference: keys of a fleet file

Generated from the code by `make reference`. Unknown keys are refused. For kind vllm, `WARMROUTE_ENGINE_MODEL` and
`WARMROUTE_ENGINE_PYTHON` override `model` and `vllm.python` of the file; `--model` and `--set key=value` override both.
Explanations and examples: [fleets](../fleet.md).
"""
_SECTIONS = (
    ("The file", FleetFile),
    ("`vllm`: engines of kind vllm", VllmSettings),
    ("`sim`: engines of kind sim", SimSettings),
    ("Each entry of `groups`", GroupSettings),
    ("Each entry of `peers`", PeerSettings),
)


def reference() -> str:
    """Markdown tables of every key, its default and its effect."""
    parts = [_INTRODUCTION]
    for title, model in _SECTIONS:
        rows = "\n".join(f"| `{key}` | {default} | {what} |" for key, default, what in keys(model))
        parts.append(f"## {title}\n\n| key | default | description |\n| --- | --- | --- |\n{rows}\n")
    return "\n".join(parts)


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Dotted key, default and description of every key; `sim` and `vllm` of a fleet have tables of their own."""
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if annotation in {SimSettings, VllmSettings}:
            yield f"{prefix}{name}", "*(see below)*", f"settings of engines of kind {name}"
        elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from keys(annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _default(field), (field.description or "").replace("|", "\\|")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "*(required)*"
    value: Any = field.get_default(call_default_factory=True)
    if isinstance(value, Enum):
        value = value.value
    return f"`{json.dumps(value)}`"


if __name__ == "__main__":
    sys.stdout.write(reference())
