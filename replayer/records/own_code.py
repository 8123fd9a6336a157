"""Source files behind a ``MODULE:Class``: its module, and the modules that this imports from the same place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

_OURS = ("policies", "proxy", "launch", "replayer", "sim", "bench", "warmroute")
"""Packages of this project; records have their version and the digest of their sources."""
_INSTALLED = ("site-packages", "dist-packages")


def own_code(module: str) -> dict[str, Path]:
    """Files that a class of a module is made of, by module name; empty for a module that is not found.

    These are the module's own file and, transitively, every module that these files name in an import statement, at any
    level, and that lies below the folder in which the module's first name was found. In a folder of installed
    packages only modules of the same package count, as the records have the versions of the others. Modules that are
    imported by other means, such as `importlib`, and files that are read as data are not found.
    """
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        return {}
    if spec is None or not spec.has_location or spec.origin is None:
        return {}
    origin = Path(spec.origin).absolute()
    root = origin.parents[module.count(".") + (origin.name == "__init__.py")]
    top = module.partition(".")[0]
    found: dict[str, Path] = {}
    found[module] = origin
    if origin.suffix != ".py" or top in _OURS:
        return found
    waiting = [*_with_parents(module), *_imports(module, origin)]
    while waiting:
        name = waiting.pop()
        first = name.partition(".")[0]
        if name in found or first in _OURS or (root.name in _INSTALLED and first != top):
            continue
        file = _file(root, name)
        if file is not None:
            found[name] = file
            waiting += _imports(name, file)
    return found


def _file(root: Path, name: str) -> Path | None:
    base = root.joinpath(*name.split("."))
    for file in (base / "__init__.py", base.with_name(f"{base.name}.py")):
        if file.is_file():
            return file
    return None


def _imports(module: str, file: Path) -> Iterator[str]:
    """Names that a file may import, those of the packages around them included; some may not be modules."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _with_parents(alias.name)
        elif isinstance(node, ast.ImportFrom):
            around = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*around, *([node.module] if node.module else [])])
            if base:
                yield from _with_parents(base)
            yield from (f"{base}.{alias.name}" if base else alias.name for alias in node.names)


def _with_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]
