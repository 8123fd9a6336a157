"""Messages of the launcher, on a terminal and in a file."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from launch.run.messages import Messages


def test_events_in_a_file_have_the_date_and_utc(capsys: pytest.CaptureFixture[str]) -> None:
    """`launcher.log` of a fleet that has run for weeks is read beside proxy.log."""
    Messages().notify("inst-0 ended unexpectedly")
    when, _, text = capsys.readouterr().out.rstrip("\n").partition(" ")
    assert text == "inst-0 ended unexpectedly"
    assert abs((datetime.now(UTC) - datetime.fromisoformat(when)).total_seconds()) < 3600
    assert when.endswith("+00:00")


def test_events_on_a_terminal_have_the_time_of_day(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    Messages().notify("inst-0 is ready again")
    assert "+00:00" not in capsys.readouterr().out
