"""Floods of rejected requests: no other row is lost, the disk stays as it is, and the log has every one of them."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from policies.row import RequestOutcome, Row
from proxy.breakdown import Breakdown
from proxy.logs import LimitedLog
from tests.chaos.conftest import BODY, StartChaos
from tests.chaos.rig.client import RawClient, head, post
from tests.chaos.rig.engine import ChaosEngine

FLOOD = 60


async def rows(proxy: Any, **query: Any) -> list[dict[str, Any]]:
    return (await proxy.client.get("/breakdown", params=query)).json()["rows"]


async def test_rejected_requests_remove_no_row_of_a_served_one(start_chaos: StartChaos, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    kept = {"capacity": 20, "rejected_capacity": 10, "jsonl_path": str(file)}
    proxy = await start_chaos(ChaosEngine(), breakdown=kept)
    for _ in range(5):
        assert (await proxy.client.post("/v1/completions", json=BODY)).status_code == 200
    for number in range(FLOOD):
        body = [b"{", b'{"model": "nobody", "prompt": "x"}', b'{"model": "stub"}'][number % 3]
        assert (await proxy.client.post("/v1/completions", content=body)).status_code in {400, 404}
    assert (await proxy.client.post("/v1/completions", json=BODY)).status_code == 200
    assert [row["outcome"] for row in await rows(proxy, limit=6)] == ["ok"] * 6
    assert [row["outcome"] for row in await rows(proxy, limit=100)] == ["ok"] * 5 + ["rejected"] * 10 + ["ok"]
    assert len(await rows(proxy, outcome="rejected")) == 10
    assert proxy.core.breakdown.outcomes == {"ok": 6, "rejected": FLOOD}
    metrics = (await proxy.client.get("/metrics")).text
    assert f'warmroute_requests_total{{instance="",outcome="rejected"}} {float(FLOOD)}' in metrics
    proxy.core.breakdown.flush()
    assert [json.loads(line)["outcome"] for line in file.read_text().splitlines()] == ["ok"] * 6


async def test_clients_that_leave_during_the_upload_remove_no_row_either(start_chaos: StartChaos) -> None:
    proxy = await start_chaos(ChaosEngine(), breakdown={"capacity": 5, "rejected_capacity": 5})
    assert (await proxy.client.post("/v1/completions", json=BODY)).status_code == 200
    for _ in range(20):
        async with RawClient(proxy.port) as client:
            await client.send(head("content-length: 1000") + b"{")
    await proxy.nothing_left()
    assert proxy.core.breakdown.outcomes == {"ok": 1, "client_gone": 20}
    assert [row["outcome"] for row in await rows(proxy, outcome="ok")] == ["ok"]


@pytest.mark.parametrize("wanted", [False, True])
def test_a_setting_adds_rejected_requests_to_the_file(tmp_path: Path, wanted: bool) -> None:
    file = tmp_path / "rows.jsonl"
    breakdown = Breakdown(5, file, rejected_capacity=5, rejected_to_file=wanted)
    for outcome in (RequestOutcome.OK, RequestOutcome.REJECTED):
        breakdown.close_row(breakdown.open_row(Row("r", "/v1/completions", 1.0, outcome=outcome)))
    breakdown.close()
    outcomes = [json.loads(line)["outcome"] for line in file.read_text().splitlines()]
    assert outcomes == (["ok", "rejected"] if wanted else ["ok"])


async def test_the_log_counts_every_rejected_request_in_few_lines(
    start_chaos: StartChaos, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = await start_chaos(ChaosEngine())
    caplog.set_level(logging.WARNING, "warmroute.proxy")
    proxy.core.rejections._interval_s = 1e6
    async with RawClient(proxy.port) as client:
        for _ in range(FLOOD):
            await client.send(post(b"{"))
            assert (await client.answer()).status == 400
    assert (await proxy.client.post("/v1/completions", json={**BODY, "model": "nobody"})).status_code == 404
    assert len(caplog.messages) == 1
    proxy.core.rejections._interval_s = 0.0
    proxy.core.rejections.flush()
    first, left_out = caplog.messages
    assert re.match(r"rejected /v1/completions from 127\.0\.0\.1: 400 the body is not valid JSON", first)
    assert left_out.endswith(
        f"(not logged since the last one: {FLOOD - 1} x 400 invalid_json, 1 x 404 model_not_found)"
    )


async def test_refused_admin_requests_name_the_peer(start_chaos: StartChaos, caplog: pytest.LogCaptureFixture) -> None:
    proxy = await start_chaos(ChaosEngine())
    caplog.set_level(logging.WARNING, "warmroute.access")
    proxy.core.access.refusals._interval_s = 1e6
    for _ in range(5):
        assert (await proxy.client.post("/reload")).status_code == 403
    (message,) = caplog.messages
    assert message.startswith("refused POST /reload from 127.0.0.1: 403 ")


def test_a_limited_log_reports_at_its_next_line_what_it_left_out(caplog: pytest.LogCaptureFixture) -> None:
    limited = LimitedLog(logging.getLogger("warmroute.test"), 1e6)
    for number in range(4):
        limited.warning("odd" if number % 2 else "even", "number %d", number)
    limited.flush()
    limited._interval_s = 0.0
    limited.warning("even", "number %d", 4)
    limited.flush()
    assert caplog.messages == ["number 0", "number 4 (not logged since the last one: 1 x even, 2 x odd)"]


async def test_data_that_is_no_request_is_counted_and_leaves_one_warning(
    start_chaos: StartChaos, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = await start_chaos(ChaosEngine())
    caplog.set_level(logging.WARNING, "warmroute.clients")
    proxy.core.clients.refusals._interval_s = 1e6
    for _ in range(FLOOD):
        async with RawClient(proxy.port) as client:
            await client.send(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
            assert (await client.answer()).status == 400
    assert len(caplog.messages) == 1
    assert "127.0.0.1: 400" in caplog.messages[0]
    metrics = (await proxy.client.get("/metrics")).text
    assert f'warmroute_client_errors_total{{code="invalid_http"}} {float(FLOOD)}' in metrics
