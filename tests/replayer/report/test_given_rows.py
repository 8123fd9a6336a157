"""Breakdown rows that are given to a report: of the run, of another run, of two runs, with some missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner, Result

from replayer.records.runs import Run
from replayer.report.cli import register
from tests.replayer.constructed_runs import make_run

Store = Callable[[Run], Path]


@pytest.fixture(scope="module")
def app() -> typer.Typer:
    application = typer.Typer()
    register(application)
    return application


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("moved", "refused"), [(0, False), (1, False), (4, True)])
def test_rows_of_another_run_of_the_same_trace_are_refused_by_their_instances(
    app: typer.Typer, stored: Store, tmp_path: Path, moved: int, refused: bool
) -> None:
    """Request ids are of the trace, so another arm's rows have the same ones."""
    run, rows = make_run(sessions=8), tmp_path / "rows.jsonl"
    records = run.records[:20]
    rows.write_bytes(
        b"".join(
            msgspec.json.encode(
                {"request_id": one.request_id, "outcome": "ok", "instance": "moved" if place < moved else one.instance}
            )
            + b"\n"
            for place, one in enumerate(records)
        )
    )
    options = ["--output", str(tmp_path / "report.html"), "--breakdown", f"baseline={rows}"]
    result = CliRunner().invoke(app, ["report", str(stored(run)), *options])
    assert result.exit_code == (2 if refused else 0), result.output
    assert ("4 of 20 rows name another instance than the first run" in " ".join(result.output.split())) is refused


@pytest.mark.usefixtures("undrawn")
def test_breakdown_rows_of_another_run_are_counted_and_refused_if_none_fits(
    app: typer.Typer, stored: Store, tmp_path: Path
) -> None:
    run, rows, output = make_run(sessions=3), tmp_path / "rows.jsonl", tmp_path / "report.html"
    own, others = [record.request_id for record in run.records[:3]], ["other-1", "other-2"]

    def reported(ids: list[str]) -> Result:
        rows.write_bytes(b"".join(msgspec.json.encode({"request_id": one, "outcome": "ok"}) + b"\n" for one in ids))
        options = ["--output", str(output), "--breakdown", f"baseline={rows}"]
        return CliRunner().invoke(app, ["report", str(stored(run)), *options])

    refused = reported(others)
    assert refused.exit_code == 2
    assert "none of its 2 rows has a request_id of the first run of arm baseline" in refused.output
    assert not output.exists()
    mixed = reported(own + others)
    assert mixed.exit_code == 0, mixed.output
    sentence = "2 of 5 rows are of no request of the run"
    assert sentence in mixed.output
    assert sentence in output.read_text()
    assert reported(own).exit_code == 0
    assert "of no request" not in output.read_text()


@pytest.mark.usefixtures("undrawn")
def test_a_file_with_two_runs_of_the_trace_is_refused(app: typer.Typer, stored: Store, tmp_path: Path) -> None:
    """A policy that places both alike names the same instances; a resumed run has a few requests twice."""
    run, rows, output = make_run(sessions=8), tmp_path / "rows.jsonl", tmp_path / "report.html"
    ids = [record.request_id for record in run.records]
    cut = [{"request_id": one, "outcome": "client_disconnect"} for one in ids[:2]]
    whole = [{"request_id": one, "outcome": "ok"} for one in ids]
    path = str(stored(run))

    def reported(written: list[dict[str, str]]) -> Result:
        rows.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in written))
        return CliRunner().invoke(app, ["report", path, "-o", str(output), "--breakdown", f"baseline={rows}"])

    refused = reported(whole + whole)
    assert refused.exit_code == 2
    assert f"{len(ids)} of {2 * len(ids)} rows are of requests with another row" in refused.output
    resumed = reported(cut + whole)
    assert resumed.exit_code == 0, resumed.output
    assert f"{len(ids)} rows, 0 with a failed attempt. Outcomes: ok {len(ids)}." in output.read_text()


@pytest.mark.usefixtures("undrawn")
def test_requests_without_a_row_are_counted_and_a_line_that_is_cut_is_ignored(
    app: typer.Typer, stored: Store, tmp_path: Path
) -> None:
    run, rows, output = make_run(sessions=3), tmp_path / "rows.jsonl", tmp_path / "report.html"
    lines = [msgspec.json.encode({"request_id": one.request_id, "outcome": "ok"}) for one in run.records]
    rows.write_bytes(b"\n".join(lines)[:-9])
    arguments = ["report", str(stored(run)), "-o", str(output), "--breakdown", f"baseline={rows}"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    sentence = f"1 of {len(lines)} successful requests of the run have no row in it"
    assert sentence in " ".join(result.output.split())
    assert sentence in output.read_text()
    rows.write_bytes(b"\n".join([*lines[:2], lines[2][:-9], *lines[3:]]))
    assert "rows.jsonl:3: not a breakdown row" in CliRunner().invoke(app, arguments).output
