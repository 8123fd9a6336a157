"""YAML as every file of settings is read: as ``yaml.safe_load`` does, and a key that is given twice is an error."""

from __future__ import annotations

from typing import IO, Any

import yaml


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
