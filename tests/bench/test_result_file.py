"""Paths for figures are checked before anything is measured; the file has the cells there are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bench.figures.result_file import writable, write_cells
from bench.soak.__main__ import app
from tests.full_disk import limited_to


def test_the_folder_is_made_and_an_existing_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "today" / "figures.json"
    assert writable(path) == path
    assert path.parent.is_dir()
    path.write_text("kept")
    assert writable(path) == path
    assert path.read_text() == "kept"
    assert writable(None) is None


def test_a_folder_is_refused_as_the_file(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="give the name of a file"):
        writable(tmp_path)


def test_a_benchmark_ends_before_it_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.soak.__main__.soak", lambda *_: pytest.fail("it has begun to measure"))
    (tmp_path / "file").touch()
    ended = CliRunner().invoke(app, ["-o", str(tmp_path / "file" / "soak.json")], env={"COLUMNS": "400"})
    assert ended.exit_code == 2
    assert "its folder cannot be made" in ended.output


def test_the_cells_so_far_are_kept_where_the_next_ones_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "joint.json"
    write_cells(path, "joint", 1, {"profile": "h200"}, [{"seed": 1}, {"seed": 2}])
    found = json.loads(path.read_bytes())
    assert (found["kind"], found["schema"], found["profile"]) == ("joint", 1, "h200")
    assert found["machine"]
    assert found["cells"] == [{"seed": 1}, {"seed": 2}]
    assert path.read_text().splitlines()[1:] == ['{"seed":1},', '{"seed":2}', "]}"]
    with limited_to(10), pytest.raises(OSError, match="File too large"):
        write_cells(path, "joint", 1, {}, [{"seed": 3}])
    assert json.loads(path.read_bytes()) == found
