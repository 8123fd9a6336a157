"""YAML as every file of settings is read: as ``yaml.safe_load`` does, and a key that is given twice is an error.

And the text of what is wrong with its values, or with those of a body, of flags or of environment variables; and the
files of the shipped hardware profiles, which proxy, launcher and simulator read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, get_args

import yaml

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

HARDWARE_FOLDER = Path(__file__).resolve().parent / "configs" / "hardware"
"""Folder of the shipped hardware profiles; the points that they are fitted to lie beside them."""


def hardware_file(name: str) -> Path:
    """Path of a hardware profile: a path to a YAML file unchanged, a name looked up in configs/hardware."""
    return Path(name) if name.endswith((".yaml", ".yml")) else HARDWARE_FOLDER / f"{name}.yaml"


def hardware_names() -> list[str]:
    """Names of the shipped hardware profiles, sorted."""
    return sorted(path.stem for path in HARDWARE_FOLDER.glob("*.yaml") if not path.stem.endswith("_points"))


def _refuse_a_key_twice(node: yaml.MappingNode) -> None:
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


class _Loader(yaml.SafeLoader):
    # Checked when the mapping is composed: before `<<` adds keys that the mapping may have itself.
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        _refuse_a_key_twice(node)
        return node


def _load_quickly(text: str) -> Any:
    """The document by libyaml, in a tenth of the time.

    Raises:
        yaml.YAMLError: as `load_yaml`; the message lacks the line that it is about.
    """
    loader = yaml.CSafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        waiting, seen = [node], set()
        while waiting:
            each = waiting.pop()
            if id(each) in seen:  # named by an alias
                continue
            seen.add(id(each))
            if isinstance(each, yaml.MappingNode):
                _refuse_a_key_twice(each)
                waiting += [part for pair in each.value for part in pair]
            elif isinstance(each, yaml.SequenceNode):
                waiting += each.value
        return loader.construct_document(node)
    finally:
        loader.dispose()


def load_yaml(text: str | IO[str]) -> Any:
    """The one document in a text or open file; None for an empty one.

    Raises:
        yaml.YAMLError: not YAML, several documents, or a mapping with a key twice; the message has line and column.
    """
    if not isinstance(text, str):
        text = text.read()
    if hasattr(yaml, "CSafeLoader"):
        try:
            return _load_quickly(text)
        except yaml.YAMLError:
            pass  # read again for the message, which has the line of the text
    return yaml.load(text, Loader=_Loader)  # the loader is a SafeLoader


_NO_SECTION = frozenset({"model_type", "model_attributes_type", "dict_type"})
"""Pydantic's types of a value where a section belongs; its own words name classes."""
_NO_LIST = frozenset({"tuple_type", "list_type", "set_type", "frozen_set_type"})
"""The same where a list belongs."""


def problem_text(problem: Mapping[str, Any], known: Sequence[str] = ()) -> str:
    """One of ``ValidationError.errors()`` without its key, in words that name a remedy where pydantic's do not.

    ``known`` are the valid keys beside it, of which the nearest one is named.
    """
    if problem["type"] == "extra_forbidden":
        nearest = get_close_matches(str(problem["loc"][-1]), known, n=1)
        return f"unknown key; did you mean {nearest[0]}?" if nearest else "unknown key; check the spelling"
    if problem["type"] in _NO_SECTION:
        value = problem["input"]
        return f"expected keys with values, found {'nothing' if value is None else type(value).__name__}"
    if problem["type"] in _NO_LIST:
        value = problem["input"]
        return f"expected a list, found {'nothing' if value is None else type(value).__name__}"
    return str(problem["msg"]).removeprefix("Value error, ")


def written_place(model: type[BaseModel], loc: Sequence[str | int]) -> tuple[str, list[str]]:
    """Dotted key as it is written in the file, and all keys that the section of its last part may have.

    Pydantic puts the kind of a section into the place (``backend.simulated.instances``), which no file has.
    """
    sections, kind = [model], None
    path: list[str] = []
    known: list[str] = []
    for part in loc:
        of_kind = [each for each in sections if kind and part in get_args(each.model_fields[kind].annotation)]
        if of_kind:
            sections, kind = of_kind, None
            continue
        path.append(str(part))
        known = [name for each in sections for name in each.model_fields]
        # Items of lists and names of arms are no fields: the sections below them are those of the field before.
        field = next((each.model_fields[part] for each in sections if part in each.model_fields), None)
        if field is not None:
            sections = list(_sections(field.annotation))
            kind = field.discriminator if isinstance(field.discriminator, str) else None
    return ".".join(path), known


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    from pydantic import BaseModel

    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _sections(part)


def number_of_problems(count: int) -> str:
    """``1 problem``, ``2 problems``."""
    return f"{count} problem{'s' * (count != 1)}"


def problems_of(error: ValidationError, model: type[BaseModel]) -> str:
    """The problems of a file's values as one line for their number and one for each, with its key."""
    lines = [number_of_problems(error.error_count())]
    for problem in error.errors():
        where, known = written_place(model, problem["loc"])
        lines.append(f"  {where or '(top level)'}: {problem_text(problem, known)}")
    return "\n".join(lines)
