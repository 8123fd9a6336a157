"""Rules of the source tree: who may import whom, what stays pure, how files are named and how long they get."""

from __future__ import annotations

import ast
import enum
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


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


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
        ("sim.server.main", {"aiohttp", "httpx", "numpy", "zmq"}),
        ("proxy.workers.supervisor", {"fastapi", "httpx", "numpy", "uvicorn", "zmq"}),
    ],
)
def test_a_process_does_not_import_at_its_start_what_it_seldom_needs(module: str, not_needed: set[str]) -> None:
    """A demo starts eight engines: these packages would double the time and take 20 MB of each."""
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
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].add(name_of(path))
    twice = {name: sorted(paths) for name, paths in places.items() if len(paths) > 1}
    assert {name: paths for name, paths in twice.items() if name not in SAME_MEANING_TWICE} == {}


def test_no_folder_is_wide() -> None:
    """More than 18 modules side by side means that a folder is missing."""
    folders = Counter(path.parent for top in (*FOLDERS, "tests") for path in (ROOT / top).rglob("*.py"))
    assert {name_of(folder): count for folder, count in folders.items() if count > MAX_MODULES} == {}


@pytest.mark.parametrize("folder", sorted({path.parent for path in SOURCES} - {ROOT}), ids=name_of)
def test_every_folder_says_what_it_is_for(folder: Path) -> None:
    init = folder / "__init__.py"
    if folder.name in {"configs", "plugin"}:
        return  # data, and a module that is copied into an engine's environment
    assert init.is_file(), f"{name_of(folder)} needs an __init__.py"
    assert ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))), f"{name_of(init)} needs a docstring"


def test_no_module_is_named_for_nothing_in_particular() -> None:
    vague = {"utils", "util", "common", "helpers", "helper", "misc"}
    assert [name_of(path) for path in SOURCES if vague & set(path.relative_to(ROOT).with_suffix("").parts)] == []


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_source_file_is_short_enough_to_have_one_job_and_says_which(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    lines = text.count("\n")
    assert lines <= MAX_LINES, f"{name_of(path)} has {lines} lines: past {MAX_LINES} something has two jobs"
    assert not text or ast.get_docstring(ast.parse(text)), f"{name_of(path)} needs a module docstring"
