"""Log of a simulated engine."""

from __future__ import annotations

import logging
import time

import pytest

from sim.server.main import log_format


def test_times_are_in_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    record = logging.LogRecord("sim", logging.INFO, __file__, 1, "ready on %d", (8101,), None)
    record.created, record.msecs = 1_700_000_000.25, 250.0
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("TZ", "Asia/Kolkata")
        time.tzset()
        line = log_format().format(record)
    time.tzset()
    assert line == "2023-11-14T22:13:20.250+00:00 INFO sim ready on 8101"
