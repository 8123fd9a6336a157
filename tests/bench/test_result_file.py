"""Paths for figures are checked before anything is measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bench.figures.result_file import writable
from bench.soak.__main__ import app


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
