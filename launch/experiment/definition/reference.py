"""The experiment file's keys as Markdown tables, from the models; kept in ``docs/reference/experiment-file.md``.

``python -m launch.experiment.definition.reference`` prints the page.
"""

from __future__ import annotations

import json
import sys
from enum import Enum
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from launch.experiment.definition import sections
from launch.experiment.definition.file import ExperimentSettings

_INTRODUCTION = """# Reference: keys of an experiment file

Generated from the code by `make reference`. Unknown keys are refused. Explanations and examples:
[compare](../compare.md).
"""
SECTIONS: tuple[tuple[str, type[BaseModel]], ...] = (
    ("The file", ExperimentSettings),
    ("`trace`", sections.TraceSettings),
    ("`trace.synth`", sections.SynthSettings),
    ("`replay`", sections.ReplaySettings),
    ("Each arm of `arms`", sections.ArmSettings),
    ("`backend` of kind live", sections.LiveBackend),
    ("`backend` of kind simulated", sections.SimulatedBackend),
    ("`backend.noise`", sections.NoiseSettings),
    ("`comparison`", sections.ComparisonSettings),
    ("`comparison.slo`", sections.SloSettings),
)


def reference() -> str:
    """Markdown tables of every key, its default and its effect."""
    parts = [_INTRODUCTION]
    for title, model in SECTIONS:
        rows = "\n".join(
            f"| `{name}` | {_default(field)} | {(field.description or '').replace('|', chr(92) + '|')} |"
            for name, field in model.model_fields.items()
        )
        parts.append(f"## {title}\n\n| key | default | description |\n| --- | --- | --- |\n{rows}\n")
    return "\n".join(parts)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "*(required)*"
    value: Any = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "*(its defaults)*"
    return f"`{json.dumps(value.value if isinstance(value, Enum) else value)}`"


if __name__ == "__main__":
    sys.stdout.write(reference())
