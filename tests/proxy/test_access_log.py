"""The access log: its lines, its bounds, and the warnings for failed requests."""

from __future__ import annotations

import hashlib
import json
import logging
import resource
import threading
from pathlib import Path
from typing import Any

import pytest

from policies.row import Row
from proxy.access_log import AccessLog, access_line
from proxy.settings import SettingsError
from tests.proxy.conftest import Running, StartProxy
from tests.proxy.stub_engine import StubEngine

KEY = "wr-client-key-for-the-access-log"
BODY = {"model": "stub", "prompt": [1, 2, 3], "max_tokens": 4}


def row(name: str = "r", **more: Any) -> Row:
    return Row(name, "/v1/completions", 1_700_000_000.0, **more)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


async def written(proxy: Running, path: Path, count: int) -> list[dict[str, Any]]:
    await proxy.until(lambda: path.read_bytes().count(b"\n") >= count)
    return lines(path)


async def test_every_request_has_a_line_without_its_key_or_prompt(start_proxy: StartProxy, tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    keys = {"client": [{"name": "team-a", "sha256": hashlib.sha256(KEY.encode()).hexdigest()}]}
    engine = StubEngine(cached_tokens=2)
    proxy = await start_proxy(engines=[engine], keys=keys, logs={"access": str(path)})
    proxy.client.headers["authorization"] = f"Bearer {KEY}"
    sent = {**BODY, "stream": True}
    headers = {"x-session-id": "s-1", "x-request-id": "named"}
    assert (await proxy.client.post("/v1/completions", json=sent, headers=headers)).status_code == 200
    assert (await proxy.client.post("/v1/completions", json={**BODY, "model": "other"})).status_code == 404
    proxy.client.headers["authorization"] = "Bearer wr-another-key-that-is-unknown"
    assert (await proxy.client.post("/v1/completions", json=BODY)).status_code == 401
    served, refused, unknown = await written(proxy, path, 3)
    assert served["time"].startswith("20")
    assert 0 < served.pop("ttft_s") <= served.pop("e2e_s")
    served.pop("time")
    assert served == {
        "request_id": "named",
        "session_id": "s-1",
        "tenant": "team-a",
        "endpoint": "/v1/completions",
        "stream": True,
        "status": 200,
        "outcome": "ok",
        "instance": "inst-0",
        "prefill_instance": None,
        "class": "WARM",
        "attempts": 0,
        "prompt_tokens": 3,
        "cached_tokens": 2,
        "completion_tokens": 4,
        "held_s": 0.0,
        "error": None,
    }
    assert (refused["status"], refused["outcome"], refused["tenant"]) == (404, "rejected", "team-a")
    assert (unknown["status"], unknown["tenant"], unknown["instance"]) == (401, None, None)
    assert KEY not in path.read_text("utf-8")


async def test_without_the_setting_there_is_neither_thread_nor_file(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    await proxy.client.post("/v1/completions", json=BODY)
    assert not [thread for thread in threading.enumerate() if thread.name == "access-log"]
    assert "warmroute_access_log_dropped_total 0.0" in (await proxy.client.get("/metrics")).text


def test_the_rest_is_written_when_it_closes_and_a_renamed_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    log = AccessLog(str(path), 10)
    log.open()
    log.record(row("first"))
    log.close()
    path.rename(tmp_path / "access.jsonl.1")
    log.open()
    log.record(row("second"))
    log.close()
    log.record(row("late"))
    assert [line["request_id"] for line in lines(path)] == ["second"]
    assert [line["request_id"] for line in lines(tmp_path / "access.jsonl.1")] == ["first"]


class Stuck(AccessLog):
    """Its disk takes nothing until ``free`` is set."""

    def __init__(self, path: Path, capacity: int) -> None:
        super().__init__(str(path), capacity)
        self.free, self.writing = threading.Event(), threading.Event()

    def _write(self, lines: bytes) -> None:
        if lines:
            self.writing.set()
            assert self.free.wait(20)
        super()._write(lines)


def test_requests_above_the_buffer_are_dropped_and_counted(tmp_path: Path) -> None:
    log = Stuck(tmp_path / "access.jsonl", 3)
    log.open()
    log.record(row("writing"))
    assert log.writing.wait(20)
    for number in range(5):
        log.record(row(str(number)))
    assert log.dropped == 2
    log.free.set()
    log.close()
    assert [line["request_id"] for line in lines(tmp_path / "access.jsonl")] == ["writing", "0", "1", "2"]


def test_a_file_that_cannot_be_written_is_reported_at_the_start_and_counted_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "warmroute.access_log")  # a proxy served in this process may have set another one
    with pytest.raises(SettingsError, match=r"logs\.access: .*cannot be written"):
        AccessLog(str(tmp_path / "missing" / "access.jsonl"), 10)
    folder = tmp_path / "logs"
    folder.mkdir()
    log = AccessLog(str(folder / "access.jsonl"), 10)
    (folder / "access.jsonl").unlink()
    folder.rmdir()
    log.open()
    log.record(row())
    log.close()
    assert log.dropped == 1
    assert "writing the access log failed" in caplog.text


def test_the_first_line_after_a_full_disk_is_not_lost_with_the_one_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    log = AccessLog(str(path), 10)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    log.open()
    log.record(row("cut-off"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # a write is incomplete there, as on a full disk
    try:
        log.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (path.stat().st_size, log.dropped) == (100, 1)
    for name in ("first", "second"):
        log.open()
        log.record(row(name))
        log.close()
    torn, *rest = path.read_bytes().splitlines()
    assert len(torn) == 100
    assert [json.loads(line)["request_id"] for line in rest] == ["first", "second"]


def test_standard_output_is_a_dash(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    log = AccessLog("-", 10)
    log.open()
    log.record(row("on stdout"))
    log.close()
    assert json.loads(capfdbinary.readouterr().out)["request_id"] == "on stdout"


def test_odd_texts_and_secrets_do_not_break_a_line() -> None:
    odd = row("\ud800", session_id='"\n', error="engine said Bearer abcdefgh12345678")
    line = access_line(odd)
    assert line.count(b"\n") == 1
    shown = json.loads(line)
    assert (shown["request_id"], shown["session_id"]) == ("?", '"\n')
    assert "abcdefgh" not in shown["error"]


async def test_a_failed_request_is_a_warning_with_id_instance_and_reason(
    start_proxy: StartProxy, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = await start_proxy(engines=[StubEngine(mode="error")])
    headers = {"x-request-id": "lost-1"}
    assert (await proxy.client.post("/v1/completions", json=BODY, headers=headers)).status_code == 502
    said = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    found = [text for text in said if "lost-1 failed" in text]
    assert len(found) == 1
    assert "502 upstream_error, on inst-0 after 1 failed attempt(s)" in found[0]
    assert "boom" in found[0]
    for _ in range(20):
        await proxy.client.post("/v1/completions", json=BODY)
    assert len([each for each in caplog.messages if " failed: 50" in each and "not logged since" in each]) <= 5


async def test_a_request_is_one_line_at_debug_and_none_at_info(
    start_proxy: StartProxy, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = await start_proxy(1)
    caplog.set_level(logging.DEBUG, "warmroute.proxy")
    await proxy.client.post("/v1/completions", json=BODY, headers={"x-request-id": "seen"})
    assert "request seen: 200 ok, on inst-0" in caplog.messages
    caplog.set_level(logging.INFO, "warmroute.proxy")
    await proxy.client.post("/v1/completions", json=BODY, headers={"x-request-id": "unseen"})
    assert "unseen" not in caplog.text
