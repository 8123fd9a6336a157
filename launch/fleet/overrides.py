"""Overrides applied to a fleet file before it is checked: ``--set key=value``, and two environment variables."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from warmroute_yaml import load_yaml

PYTHON_VARIABLE = "WARMROUTE_ENGINE_PYTHON"
MODEL_VARIABLE = "WARMROUTE_ENGINE_MODEL"


def apply_environment(values: dict[str, Any], environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The file's values with engine Python and model from the environment, for kind vllm only."""
    environment = os.environ if environment is None else environment
    if values.get("kind") != "vllm":
        return values
    changed = copy.deepcopy(values)
    if model := environment.get(MODEL_VARIABLE):
        changed["model"] = model
    if (python := environment.get(PYTHON_VARIABLE)) and isinstance(changed.setdefault("vllm", {}), dict):
        changed["vllm"]["python"] = python
    return changed


def apply_overrides(
    values: dict[str, Any], overrides: Sequence[str], *, example: str = "vllm.max_model_len=8192"
) -> dict[str, Any]:
    """The file's values with each ``dotted.key=value`` applied; values are YAML, list items are numbered from 0.

    ``example`` is shown where one has no value.

    Raises:
        ValueError: no ``=``, a value that is not YAML, or a key below a value that has no keys.
    """
    changed = copy.deepcopy(values)
    for text in overrides:
        key, equals, written = text.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"--set {text}: write key=value, for example {example}")
        try:
            value = load_yaml(written)
        except yaml.YAMLError as error:
            raise ValueError(f"--set {text}: the value is not YAML ({error})") from error
        _put(changed, key.strip().split("."), value, text)
    return changed


def _put(values: dict[str, Any], path: list[str], value: Any, text: str) -> None:
    here: Any = values
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        if isinstance(here, list):
            if not part.isdigit() or int(part) >= len(here):
                raise ValueError(
                    f"--set {text}: {'.'.join(path[:depth])} is a list of {len(here)}; {part!r} is not in it"
                )
            if last:
                here[int(part)] = value
            else:
                here = here[int(part)]
        elif isinstance(here, dict):
            if last:
                here[part] = value
            else:
                if here.get(part) is None:
                    here[part] = {}
                here = here[part]
        else:
            where = ".".join(path[:depth])
            raise ValueError(f"--set {text}: {where} is {here!r} and has no keys; set {where} as a whole")
