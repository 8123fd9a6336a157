"""Outputs that are inputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from replayer.records.outputs import OverwritesInputError, refuse_inputs


@pytest.mark.parametrize("way", ["same", "relative", "symbolic", "hard", "in a folder"])
def test_an_output_that_is_an_input_is_refused_by_any_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    path, link = tmp_path / "x.json", tmp_path / "link.json"
    path.write_text("{}")
    monkeypatch.chdir(tmp_path)
    if way == "symbolic":
        link.symlink_to(path)
    elif way == "hard":
        link.hardlink_to(path)
    output = {"same": path, "relative": Path("x.json"), "in a folder": path}.get(way, link)
    with pytest.raises(OverwritesInputError, match=r"is an input and would be overwritten"):
        refuse_inputs(output, [tmp_path / "missing", tmp_path if way == "in a folder" else path])


def test_other_files_missing_ones_and_devices_may_be_written(tmp_path: Path) -> None:
    path, other = tmp_path / "x", tmp_path / "y"
    path.write_text("same")
    refuse_inputs(other, [path, other])
    other.write_text("same")
    refuse_inputs(other, [path])
    refuse_inputs(Path("/dev/null"), [Path("/dev/null")])
