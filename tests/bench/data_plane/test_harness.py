"""The parts of the data-plane benchmark: engine stub, load generator, prompts, CPU clock."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import httpx
import msgspec
import pytest

from bench.data_plane import cpu
from bench.data_plane.load import prompts
from bench.data_plane.load.client import LoadTarget
from bench.data_plane.load.jobs import Aborts, ClosedLoopJob, LoadWorkload, Paired, Streams
from bench.data_plane.peers import REQUIREMENTS, peer_version
from bench.data_plane.processes import LoadProcess, StubProcess
from bench.data_plane.quantities import abort_latencies_ms
from bench.data_plane.stub import state as stub_state
from bench.data_plane.stub.answers import Renders, event
from bench.data_plane.stub.server import RouterConnection, is_true, tag_of
from bench.data_plane.stub.state import Stub, StubSettings, Ticker


@pytest.fixture(scope="module")
def stub() -> Iterator[StubProcess]:
    with StubProcess(2) as process:
        yield process


@pytest.fixture(scope="module")
def load() -> Iterator[LoadProcess]:
    with LoadProcess() as process:
        yield process


def work(kind: str = "text", size: int = 2_000, events: int = 80) -> LoadWorkload:
    return msgspec.convert({"kind": kind, "seed": 5, "size_bytes": size, "events": events}, LoadWorkload)


@pytest.mark.parametrize(("kind", "size"), [("text", 130_000), ("ids", 60_000), ("sessions", 0)])
@pytest.mark.parametrize("settings", [{}, {"events_per_write": 0}, {"events_per_write": 1}], ids=repr)
def test_what_the_stub_sends_is_what_the_generator_verifies(
    stub: StubProcess, load: LoadProcess, kind: str, size: int, settings: dict[str, int]
) -> None:
    stub.settings(**settings)
    result = load.run(
        ClosedLoopJob(targets=stub.engines, workload=work(kind, size), concurrency=3, requests=12, warmup=2)
    )
    assert result.errors == {}
    assert result.requests >= 12
    assert result.ttft_ms is not None
    report = stub.report()
    assert (report["aborted"], report["pipelined"], report["refused"]) == (0, 0, {})
    asked = "/v1/chat/completions" if kind == "sessions" else "/v1/completions"
    assert report["paths"][asked] >= 14


def test_sessions_are_sent_whole_and_in_order(stub: StubProcess, load: LoadProcess) -> None:
    stub.settings(records=True)
    job = ClosedLoopJob(
        targets=stub.engines, workload=work("sessions"), concurrency=1, requests=24, warmup=2, first=1_000_003
    )
    assert load.run(job).requests == 24
    sizes_kb = [round(record["body_bytes"], -4) // 1000 for record in stub.report()["records"]]
    assert sizes_kb == 3 * list(range(20, 260, 20))


def test_paced_streams_are_counted_and_verified(stub: StubProcess, load: LoadProcess) -> None:
    stub.settings(events=60, events_per_s=60)
    result = load.run(
        Streams(targets=stub.engines, workload=work(events=60), streams=6, settle_s=0.1, window_s=0.3, pids=[stub.pid])
    )
    assert result.errors == {}
    assert result.requests == 6
    assert 0 < result.events < 6 * 60
    assert result.cpu_s > 0


@pytest.mark.parametrize("events", [79, 81])
def test_a_wrong_number_of_events_is_an_error(stub: StubProcess, load: LoadProcess, events: int) -> None:
    stub.settings()
    result = load.run(ClosedLoopJob(targets=stub.engines, workload=work(events=events), concurrency=2, requests=4))
    assert result.requests == 0
    assert result.errors == {f"80 events instead of {events}": 4}


def test_what_is_no_answer_is_an_error(load: LoadProcess) -> None:
    with StubProcess(1) as gone:
        dead = gone.engines
    result = load.run(ClosedLoopJob(targets=dead, workload=work(), concurrency=1, requests=2))
    assert result.requests == 0
    assert sum(result.errors.values()) == 2


def test_a_refusal_is_an_error(load: LoadProcess) -> None:
    """A server that answers 404 to every request: each answer must be checked."""
    server = subprocess.Popen(
        [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline().split("port ")[1].split()[0])
        result = load.run(
            ClosedLoopJob(
                targets=[LoadTarget("127.0.0.1", port)], workload=work(), concurrency=1, requests=2, timeout_s=10
            )
        )
    finally:
        server.terminate()
        server.wait()
        assert server.stdout is not None
        server.stdout.close()
    assert result.requests == 0
    assert all(error.startswith("status 501") for error in result.errors)


@pytest.mark.parametrize("after_event", [False, True])
def test_aborts_are_seen_by_the_engine(stub: StubProcess, load: LoadProcess, after_event: bool) -> None:
    stub.settings(events_per_s=50, first_event_delay_s=0.01 if after_event else 5.0, records=True)
    result = load.run(
        Aborts(
            targets=stub.engines,
            workload=work(),
            concurrency=4,
            requests=8,
            after_event=after_event,
            wait_s=(0.01, 0.05),
        )
    )
    assert result.errors == {}
    assert len(result.left) == 8
    records = stub.settled(8)
    assert all(record["aborted"] for record in records)
    latencies = abort_latencies_ms(result.left, records)
    assert len(latencies) == 8
    assert min(latencies) >= 0
    assert stub.report()["aborted"] == 8


def test_pairs_compare_a_target_with_the_engines(stub: StubProcess, load: LoadProcess) -> None:
    stub.settings()
    result = load.run(Paired(targets=stub.engines[:1], direct=stub.engines[1:], workload=work(), pairs=10, gap_s=0.001))
    assert result.errors == {}
    assert result.added_ms is not None
    assert result.added_ms.count == 10


def test_answers_that_are_not_streamed_and_usage_on_request(stub: StubProcess) -> None:
    stub.settings(events=3)
    target = stub.engines[0]
    url = f"http://{target.host}:{target.port}"
    with httpx.Client(base_url=url, trust_env=False) as client:
        plain = client.post("/v1/completions", json={"model": "m", "prompt": "x", "stream": False}).json()
        assert plain["usage"]["completion_tokens"] == 3
        asked = {"model": "m", "prompt": "x", "stream": True, "stream_options": {"include_usage": True}}
        lines = client.post("/v1/chat/completions", json={**asked, "messages": []}).text.split("\n\n")
        assert json.loads(lines[3].removeprefix("data: "))["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        assert lines[4:] == ["data: [DONE]", ""]
        assert client.get("/v1/models").json()["data"][0]["id"]
        assert "vllm:cache_config_info{block_size=" in client.get("/metrics").text
        assert client.post("/v1/completions/render", content=b"no JSON").status_code == 400
        assert client.get("/nothing").status_code == 404
    assert set(stub.report()["refused"].values()) == {1}


def test_unknown_settings_are_refused(stub: StubProcess) -> None:
    with pytest.raises(ValueError, match="evnts"):
        stub.settings(evnts=3)


async def test_an_idle_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stub_state, "IDLE_LIMIT_S", 0.1)
    stub = Stub(StubSettings())
    server = await asyncio.get_running_loop().create_server(
        partial(RouterConnection, stub, Ticker(stub, 0.0)), "127.0.0.1", 0
    )
    closing = asyncio.create_task(stub.close_idle())
    try:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 20)  # to the end of the connection
        writer.close()
    finally:
        closing.cancel()
        server.close()
    assert answer.startswith(b"HTTP/1.1 200 OK")


def test_options_are_found_before_and_behind_a_prompt() -> None:
    assert is_true(b'{"stream":true,"prompt":""}', b'"stream"')
    assert is_true(b'{"prompt":"","stream" : true}', b'"stream"')
    assert not is_true(b'{"prompt":"","stream":false}', b'"stream"')
    assert not is_true(b'{"prompt":"true"}', b'"stream"')
    assert tag_of(prompts.text_body(1, 1, 200, 80, tag="a7")) == "a7"
    assert tag_of(prompts.text_body(1, 1, 200, 80)) == ""


def test_events_have_the_asked_size() -> None:
    for chat in (False, True):
        assert len(event(chat, 250)) == 250


def test_renders_share_prefixes_when_prompts_do() -> None:
    renders = Renders()

    def ids(path: bytes, body: bytes) -> list[int]:
        answer = json.loads(renders.answer(path, body).partition(b"\r\n\r\n")[2])
        found: list[int] = (answer[0] if isinstance(answer, list) else answer)["token_ids"]
        return found

    chat = b"/v1/chat/completions/render"
    turns = [ids(chat, prompts.session_body(1, 3, turn, 80)) for turn in (0, 1)]
    shared = len(turns[0]) - 1  # the last id of the shorter has the closing bracket in it
    assert turns[1][:shared] == turns[0][:shared]
    assert len(turns[1]) > len(turns[0]) * 1.8
    text = [ids(b"/v1/completions/render", prompts.text_body(1, number, 2_000, 80)) for number in (1, 2)]
    assert text[0][:4] != text[1][:4]
    assert ids(b"/v1/completions/render", b'{"model":"m","prompt":[5,6,7]}') == [5, 6, 7]


def test_bodies_are_json_distinct_and_repeatable() -> None:
    for size in (2_000, 130_000):
        body = prompts.text_body(1, 1, size, 80)
        assert body == prompts.text_body(1, 1, size, 80)
        assert body != prompts.text_body(2, 1, size, 80)
        fields = json.loads(body)
        assert fields["stream"]
        assert fields["max_tokens"] == 80
        assert abs(len(body) - size) < 300
        assert fields["prompt"][:16] != json.loads(prompts.text_body(1, 2, size, 80))["prompt"][:16]
    ids = json.loads(prompts.ids_body(1, 1, 60_000, 80))["prompt"]
    assert len(ids) == 10_004
    assert all(10_000 <= each <= 99_999 for each in ids)


def test_sessions_grow_by_their_own_past() -> None:
    turns = [json.loads(prompts.session_body(1, 1, turn, 80))["messages"] for turn in range(prompts.SESSION_TURNS)]
    for before, after in pairwise(turns):
        assert after[: len(before)] == before
    sizes = [len(prompts.session_body(1, 1, turn, 80)) for turn in (0, prompts.SESSION_TURNS - 1)]
    assert abs(sizes[0] - 20_000) < 600
    assert abs(sizes[1] - 240_000) < 3_000


def test_the_cpu_clock_of_a_process_is_the_kernels() -> None:
    before_s = time.process_time()
    seen_s = cpu.cpu_s([os.getpid()])
    assert before_s <= seen_s <= time.process_time()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert child.pid in cpu.tree(os.getpid())
        assert cpu.rss_bytes([child.pid]) > 0
    finally:
        child.communicate(b"\n")


def test_peers_are_pinned_by_hash() -> None:
    assert peer_version("vllm-router") == "0.1.17"
    assert peer_version("sglang-router") == "0.3.2"
    with pytest.raises(KeyError):
        peer_version("no-such-router")
    pins = [part for part in REQUIREMENTS.read_text(encoding="utf-8").split("\n") if "==" in part]
    assert all(pin.endswith("\\") for pin in pins)  # what follows each is its hashes
