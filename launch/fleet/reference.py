"""The fleet file's keys as Markdown tables, from the models: ``docs/fleet.md`` is this output, and a test says so.

``python -m launch.fleet.reference > docs/fleet.md`` writes it anew.
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

_INTRODUCTION = """# Keys of a fleet file

Written by `python -m launch.fleet.reference`; a test compares it with the code. Unknown keys are refused.
For kind vllm, `WARMROUTE_ENGINE_MODEL` and `WARMROUTE_ENGINE_PYTHON` override `model` and `vllm.python` of the file;
`--model` and `--set key=value` override both. See [launch.md](launch.md) for what the keys are for.
"""
_SECTIONS = (
    ("The file", FleetFile),
    ("`vllm`: engines of kind vllm", VllmSettings),
    ("`sim`: engines of kind sim", SimSettings),
    ("Each entry of `groups`", GroupSettings),
    ("Each entry of `peers`", PeerSettings),
)


def reference() -> str:
    """Markdown: every key, its default and what it does."""
    parts = [_INTRODUCTION]
    for title, model in _SECTIONS:
        rows = "\n".join(f"| `{key}` | {default} | {what} |" for key, default, what in keys(model))
        parts.append(f"## {title}\n\n| key | default | what |\n| --- | --- | --- |\n{rows}\n")
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
