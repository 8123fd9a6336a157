"""The make targets of tests: each test is in exactly one, and CI runs all that need nothing but a machine."""

from __future__ import annotations

import itertools
import re
import socket
import subprocess
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest

from tests.conftest import pytest_collection_modifyitems
from tests.integration.fleet import WORKERS

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PARTS = ("unit", "test-fleets", "test-ui")
"""The targets that share the tests among them by markers; tests of other markers skip there."""
CHOOSING = {"fleet": "", "quiet": "bench", "ui": "ui"}
"""The markers that the parts choose by, each with the folder of its tests, as some parts look only there."""
NOT_IN_CI = {"test-compose"}  # it needs images of containers


def expressions(target: str) -> list[str]:
    """The expression of markers of each command line of pytest in a target."""
    recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert recipe, target
    found = re.findall(r"(?:-m pytest|\$\(PYTEST\)).* -m (\"[^\"]+\"|\w+)", recipe[1])
    assert len(found) == len(recipe[1].splitlines()), recipe[1]
    return [each.strip('"') for each in found]


def chooses(expression: str, markers: set[str]) -> bool:
    """True if tests with these markers are run; the parts' expressions are conjunctions."""
    terms = expression.split(" and ")
    assert {term.removeprefix("not ") for term in terms} <= set(CHOOSING), expression
    return all((term.removeprefix("not ") in markers) != term.startswith("not ") for term in terms)


def test_each_process_of_a_target_has_ports_of_its_own() -> None:
    processes = [int(number) for number in re.findall(r"(?<!\S)-n (\d+)", MAKEFILE)]
    assert processes
    assert max(processes) <= WORKERS


@pytest.mark.parametrize("marked", list(itertools.product([False, True], repeat=len(CHOOSING))))
def test_every_test_is_run_by_one_command_of_one_target(marked: tuple[bool, ...]) -> None:
    markers = {marker for marker, given in zip(CHOOSING, marked, strict=True) if given}
    every = [(target, expression) for target in PARTS for expression in expressions(target)]
    assert len([each for each in every if chooses(each[1], markers)]) == 1, (markers, every)


@pytest.mark.parametrize(("marker", "folder"), CHOOSING.items())
def test_a_marker_is_used_only_in_the_folder_that_its_target_looks_in(marker: str, folder: str) -> None:
    using = [
        path
        for path in (ROOT / "tests").rglob("*.py")
        if re.search(rf"\bmark\.{marker}\b", path.read_text(encoding="utf-8"))
    ]
    assert using
    assert [path for path in using if (ROOT / "tests" / folder) not in path.parents] == []


def test_a_part_that_is_given_files_is_given_all_that_have_its_marker() -> None:
    """Those are found by their own text. Tests of clients that are marked elsewhere skip in this part."""
    for marker in re.findall(r"\$\(call with_marker,(\w+)\)", MAKEFILE):
        marked = [
            path
            for path in (ROOT / "tests").rglob("*.py")
            if re.search(rf"\bmark\.{marker}\b", path.read_text(encoding="utf-8"))
        ]
        elsewhere = [path for path in marked if not path.name.startswith("test_")]
        assert elsewhere == ([ROOT / "tests" / "clients" / "extra" / "rig.py"] if marker == "fleet" else [])
        asked = f"include Makefile\nshow:\n\t@echo $(call with_marker,{marker})\n"
        command = ["make", "--no-print-directory", "--file", "-", "show"]
        shown = subprocess.run(
            command, cwd=ROOT, input=asked, capture_output=True, text=True, timeout=60, check=True
        ).stdout
        found = sorted(ROOT / each for each in shown.split())
        assert found == sorted(path for path in marked if path not in elsewhere)


def test_ci_runs_every_target_of_tests() -> None:
    lines = re.findall(r"^make ([\w -]+)", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)
    commands = " ".join(lines).split()
    targets = re.findall(r"^(test(?:-\w+)?):", MAKEFILE, re.MULTILINE)
    assert set(targets) - NOT_IN_CI == {name for name in commands if name.startswith("test")}
    assert {"test", "test-fleets", "test-ui"} <= set(commands)
    assert re.search(r"^test:.*\n(?:\t.*\n)*\t.* unit$", MAKEFILE, re.MULTILINE)


def test_a_folder_that_the_other_parts_leave_out_has_its_marker_in_every_file() -> None:
    (ignored,) = re.findall(r"--ignore (\S+)", MAKEFILE)
    files = sorted((ROOT / ignored).rglob("test_*.py"))
    assert files
    assert [
        path for path in files if not re.search(r"^pytestmark = .*\bmark\.ui\b", path.read_text(), re.MULTILINE)
    ] == []


@pytest.mark.parametrize(("uv_fails", "by"), [(False, ["uv"]), (True, ["uv", "pip"])])
def test_pip_installs_where_uv_cannot(uv_fails: bool, by: list[str], tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    for name, line in (("uv", f"exit {int(uv_fails)}"), ("python", "")):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n{line}\n', encoding="utf-8")
        program.chmod(0o755)
    goal = f"probe:\n\t$(call install,{tmp_path}/python,--no-deps WHAT)"
    subprocess.run(["make", "--eval", goal, "probe", f"BIN={tmp_path}"], cwd=ROOT, check=True, timeout=60)
    made = [line.removeprefix("-m ") for line in calls.read_text(encoding="utf-8").splitlines()]
    assert ["uv" if "--python" in line else line.split()[0] for line in made] == by
    assert all(line.split()[1:2] == ["install"] or line.startswith("pip install") for line in made)
    assert all("--no-deps WHAT" in line for line in made)


class _Item(NamedTuple):
    """A collected test, as far as the order needs it."""

    nodeid: str
    first: bool

    def get_closest_marker(self, name: str) -> bool | None:
        return True if name == "first" and self.first else None


def test_files_with_the_marker_first_are_started_before_the_others() -> None:
    items = [_Item("a", False), _Item("b", True), _Item("c", False), _Item("d", True)]
    pytest_collection_modifyitems(cast(list[pytest.Item], items))
    assert [item.nodeid for item in items] == ["b", "d", "a", "c"]


def test_the_marker_first_is_of_whole_files() -> None:
    """Else the tests of a file would not be in their order."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
    uses = [line for text in texts for line in text.splitlines() if re.search(r"\bmark\.first\b", line)]
    assert uses
    assert [line for line in uses if not line.startswith("pytestmark = ")] == []


def test_a_process_of_pytest_asks_at_once_how_often_a_test_has_failed(pytestconfig: pytest.Config) -> None:
    if not hasattr(pytestconfig, "workerinput"):
        pytest.skip("run by the only process of pytest")
    connection: socket.socket = cast(Any, pytestconfig).failures_db.sock
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
