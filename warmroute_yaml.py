"""YAML as every file of settings is read: as ``yaml.safe_load`` does, and a key that is given twice is an error.

And the text of what is wrong with its values, or with those of a body, of flags or of environment variables; and the
files of the shipped hardware profiles, which proxy, launcher and simulator read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from pydantic import ValidationError

HARDWARE_FOLDER = Path(__file__).resolve().parent / "configs" / "hardware"
"""Folder of the shipped hardware profiles; the points that they are fitted to lie beside them."""


def hardware_file(name: str) -> Path:
    """Path of a hardware profile: a path to a YAML file unchanged, a name looked up in configs/hardware."""
    return Path(name) if name.endswith((".yaml", ".yml")) else HARDWARE_FOLDER / f"{name}.yaml"


def hardware_names() -> list[str]:
    """Names of the shipped hardware profiles, sorted."""
    return sorted(path.stem for path in HARDWARE_FOLDER.glob("*.yaml") if not path.stem.endswith("_points"))


class _Loader(yaml.SafeLoader):
    # Checked when the mapping is composed: before `<<` adds keys that the mapping may have itself.
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            name = (key.tag, key.value)
            if name in seen:
                raise yaml.MarkedYAMLError(
                    "in a mapping",
                    node.start_mark,
                    f"the key {key.value!r} is there twice; keep one of the two",
                    key.start_mark,
                )
            seen.add(name)
        return node


def load_yaml(text: str | IO[str]) -> Any:
    """The one document in a text or open file; None for an empty one.

    Raises:
        yaml.YAMLError: not YAML, several documents, or a mapping with a key twice; the message has line and column.
    """
    return yaml.load(text, Loader=_Loader)  # the loader is a SafeLoader


_NO_SECTION = frozenset({"model_type", "model_attributes_type", "dict_type"})
"""Pydantic's types of a value where a section belongs; its own words name classes."""


def problem_text(problem: Mapping[str, Any]) -> str:
    """One of ``ValidationError.errors()`` without its key, in words that name a remedy where pydantic's do not."""
    if problem["type"] == "extra_forbidden":
        return "unknown key; check the spelling"
    if problem["type"] in _NO_SECTION:
        value = problem["input"]
        return f"expected keys with values, found {'nothing' if value is None else type(value).__name__}"
    return str(problem["msg"]).removeprefix("Value error, ")


def problems_of(error: ValidationError) -> str:
    """The problems of a file's values as one line for their number and one for each, with its key."""
    lines = [f"{error.error_count()} problem(s)"]
    for problem in error.errors():
        where = ".".join(str(part) for part in problem["loc"]) or "(top level)"
        lines.append(f"  {where}: {problem_text(problem)}")
    return "\n".join(lines)
