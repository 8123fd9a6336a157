"""Rules of the source tree: who may import whom, what stays pure, how files are named and how long they get."""

from __future__ import annotations

import ast
import enum
import functools
import importlib
import inspect
import os
import subprocess
import sys
import types
import typing
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("policies", "proxy", "launch", "replayer", "sim", "bench", "configs")
SOURCES = [
    *sorted(ROOT.glob("warmroute*.py")),
    *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))),
]
POLICIES = sorted((ROOT / "policies").rglob("*.py"))
MAX_LINES = 400
MAX_MODULES = 18

ALLOWED_IMPORTS = {
    *(
        "__future__",
        "array",
        "bisect",
        "collections",
        "collections.abc",
        "dataclasses",
        "enum",
        "functools",
        "heapq",
        "itertools",
    ),
    *("math", "operator", "struct", "types", "typing", "numpy", "xxhash"),
}
"""No module among these reads a clock, draws without a seed (numpy.random is refused below), or does I/O."""
IMPORTS_OF_ONE_FILE = {"policies/registry.py": {"importlib.metadata"}}
FORBIDDEN_CALLS = {"open", "print", "input", "exec", "eval", "compile", "breakpoint", "__import__", "id", "hash"}
IMMUTABLE = (int, float, str, bytes, bool, tuple, frozenset, type(None), MappingProxyType, enum.Enum)
NOT_STATE = (type, types.FunctionType, types.ModuleType, types.BuiltinFunctionType, types.GenericAlias)


class SourceFile(NamedTuple):
    """Parts of a source that several rules are about; its tree is not kept."""

    lines: int
    empty: bool
    docstring: str | None
    public_classes: tuple[str, ...]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def source_file(path: Path) -> SourceFile:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    return SourceFile(text.count("\n"), not text, ast.get_docstring(tree), tuple(classes))


def imports_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield str(node.module)


@pytest.mark.parametrize(
    ("module", "not_needed"),
    [
        ("sim.__main__", {"numpy", "pydantic", "rich.console"}),
        ("sim.server.main", {"aiohttp", "httpx", "numpy", "zmq"}),
        ("proxy.workers.supervisor", {"fastapi", "httpx", "numpy", "uvicorn", "zmq"}),
        ("launch.experiment.run.runner", {"jinja2", "matplotlib", "scipy.stats"}),
    ],
)
def test_a_process_does_not_import_at_its_start_what_it_seldom_needs(module: str, not_needed: set[str]) -> None:
    """A demo starts eight engines, a resumed experiment may run nothing: these packages would double the time."""
    program = f"import {module}, sys; print(*sys.modules)"
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    imported = set(answer.stdout.split())
    assert module in imported
    assert not_needed & imported == set()


def test_imports_go_in_the_allowed_directions() -> None:
    """The contracts are in pyproject.toml, [tool.importlinter]."""
    command = Path(sys.executable).with_name("lint-imports")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [str(command), "--no-cache"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert " 0 broken" in result.stdout


@pytest.mark.parametrize("path", POLICIES, ids=name_of)
def test_policies_import_nothing_that_has_a_clock_or_does_io(path: Path) -> None:
    allowed = ALLOWED_IMPORTS | IMPORTS_OF_ONE_FILE.get(name_of(path), set())
    imported = set(imports_of(ast.parse(path.read_text(encoding="utf-8"))))
    assert {name for name in imported if name.partition(".")[0] != "policies"} <= allowed


@pytest.mark.parametrize("path", POLICIES, ids=name_of)
def test_policies_touch_no_file_terminal_generator_or_global(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        where = f"{name_of(path)}:{getattr(node, 'lineno', 0)}"
        assert not isinstance(node, ast.Global | ast.Nonlocal | ast.Await | ast.AsyncFunctionDef), where
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in FORBIDDEN_CALLS, where
        if isinstance(node, ast.Attribute):
            assert node.attr not in {"random", "now", "today", "environ", "cache", "lru_cache"}, where
        if isinstance(node, ast.FunctionDef):
            defaults = [default for default in (*node.args.defaults, *node.args.kw_defaults) if default]
            assert not any(isinstance(d, ast.List | ast.Dict | ast.Set) for d in defaults), where


def values_kept_by(module: types.ModuleType) -> Iterator[tuple[str, object]]:
    """Module globals and public class attributes that outlive a call, without functions, classes and descriptors."""
    for name, value in vars(module).items():
        if name.startswith("__") or getattr(value, "__module__", None) == "typing":
            continue
        if inspect.isclass(value) and value.__module__ == module.__name__:
            for attribute, held in vars(value).items():
                plain = not callable(held) and not inspect.isdatadescriptor(held) and not attribute.startswith("_")
                if plain and not isinstance(held, classmethod | staticmethod):
                    yield f"{module.__name__}.{name}.{attribute}", held
        elif not isinstance(value, NOT_STATE) and not isinstance(value, typing.TypeVar):
            yield f"{module.__name__}.{name}", value


@pytest.mark.parametrize("path", POLICIES, ids=name_of)
def test_policies_keep_no_state_between_calls(path: Path) -> None:
    dotted = name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for name, value in values_kept_by(importlib.import_module(dotted)):
        if isinstance(value, type(sys.flags)) or type(value).__module__ == "__future__":
            continue
        assert isinstance(value, IMMUTABLE), f"{name} is a {type(value).__name__}, which can change"


def test_the_check_for_kept_state_sees_lists_and_class_attributes() -> None:
    module = types.ModuleType("example")
    exec("seen = []\nclass A:\n    table = {}\nLIMIT = 3", vars(module))
    vars(module)["A"].__module__ = "example"
    kept = dict(values_kept_by(module))
    assert kept == {"example.seen": [], "example.A.table": {}, "example.LIMIT": 3}


SAME_MEANING_TWICE = {"Section", "StreamOptions"}
"""A configuration section that refuses unknown keys; ``stream_options`` as proxy and simulated engine read it."""


def test_class_names_have_one_meaning() -> None:
    """Two public classes of one name make every log, trace back and page about them ambiguous."""
    places: dict[str, set[str]] = defaultdict(set)
    for path in SOURCES:
        for name in source_file(path).public_classes:
            places[name].add(name_of(path))
    twice = {name: sorted(paths) for name, paths in places.items() if len(paths) > 1}
    assert {name: paths for name, paths in twice.items() if name not in SAME_MEANING_TWICE} == {}


def test_no_folder_is_wide() -> None:
    """More than 18 modules side by side means that a folder is missing."""
    folders = Counter(path.parent for top in (*FOLDERS, "tests") for path in (ROOT / top).rglob("*.py"))
    assert {name_of(folder): count for folder, count in folders.items() if count > MAX_MODULES} == {}


def test_every_folder_says_what_it_is_for() -> None:
    folders = {path.parent for path in SOURCES} - {ROOT}
    # Not data, nor a module that is copied into an engine's environment.
    needed = [folder / "__init__.py" for folder in sorted(folders) if folder.name not in {"configs", "plugin"}]
    missing = [name_of(init) for init in needed if not init.is_file() or not source_file(init).docstring]
    assert missing == [], "each of these needs to be there and have a docstring"


def test_no_module_is_named_for_nothing_in_particular() -> None:
    vague = {"utils", "util", "common", "helpers", "helper", "misc"}
    assert [name_of(path) for path in SOURCES if vague & set(path.relative_to(ROOT).with_suffix("").parts)] == []


def test_a_source_file_is_short_enough_to_have_one_job_and_says_which() -> None:
    files = {name_of(path): source_file(path) for path in SOURCES}
    long = {name: file.lines for name, file in files.items() if file.lines > MAX_LINES}
    assert long == {}, f"past {MAX_LINES} lines something has two jobs"
    silent = [name for name, file in files.items() if not file.empty and not file.docstring]
    assert silent == [], "each of these needs a module docstring"
