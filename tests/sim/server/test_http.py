"""The engine process over HTTP: API, usage, errors, disconnects, metrics, faults, hand-off between two processes."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.fleet

IDS = list(range(1, 641))


@dataclass
class EngineProcess:
    process: subprocess.Popen[str]
    port: int
    bootstrap_port: int | None
    client: httpx.Client

    @classmethod
    def start(cls, *options: str) -> EngineProcess:
        command = [sys.executable, "-m", "sim", "--port", "0", "--engine-speed", "50", *options]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.search(r"on http://127.0.0.1:(\d+)(?:, bootstrap (\d+))?", line)
        if found is None:
            process.kill()
            raise AssertionError(line + process.stderr.read())
        port, bootstrap = int(found[1]), int(found[2]) if found[2] else None
        return cls(process, port, bootstrap, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20))

    def stop(self) -> int:
        self.client.close()
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(timeout=20)
            assert self.process.stderr is not None
            logged = self.process.stderr.read()
            assert "Traceback" not in logged, logged
            return code
        finally:
            self.process.kill()
            if self.process.stderr is not None:
                self.process.stderr.close()

    def complete(self, prompt: Any = IDS, **body: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"model": "warm-sim", "prompt": prompt, **body})

    def events(self, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
        with self.client.stream("POST", path, json={"stream": True, **body}) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.client.get("/sim/state").json()
        return state

    def wait_for(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        for _ in range(1500):
            state = self.state()
            if condition(state):
                return state
            time.sleep(0.02)
        raise AssertionError(self.state())

    def fault(self, **fault: Any) -> None:
        assert self.client.post("/sim/faults", json=fault).status_code == 200

    @property
    def engine_id(self) -> str:
        answer = httpx.get(f"http://127.0.0.1:{self.bootstrap_port}/query").json()
        engine_id: str = answer["0"]["engine_id"]
        return engine_id


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[EngineProcess, EngineProcess]]:
    engines = [EngineProcess.start("--kv-capacity-tokens", "64000", "--flush-ms", "2") for _ in range(2)]
    try:
        yield engines[0], engines[1]
    finally:
        assert [each.stop() for each in engines] == [0, 0]


@pytest.fixture
def engine(pair: tuple[EngineProcess, EngineProcess]) -> Iterator[EngineProcess]:
    yield pair[0]
    for each in pair:
        each.fault(mode="none")
        each.wait_for(lambda state: state["live_requests"] == 0)
        each.client.post("/reset_prefix_cache")


def test_a_completion_and_its_usage(engine: EngineProcess) -> None:
    body = engine.complete(max_tokens=20).json()
    assert body["object"] == "text_completion"
    assert body["choices"][0]["finish_reason"] == "length"
    assert len(body["choices"][0]["text"]) == 80
    # Nothing cached: vLLM 0.18.1 leaves the details null.
    assert body["usage"] == {
        "prompt_tokens": 640,
        "completion_tokens": 20,
        "total_tokens": 660,
        "prompt_tokens_details": None,
    }
    again = engine.complete(max_tokens=20).json()
    assert again["choices"][0]["text"] == body["choices"][0]["text"]
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 576}


def test_streaming_gives_the_same_text_in_pieces(engine: EngineProcess) -> None:
    whole = engine.complete("a stream", max_tokens=300).json()

    def first_token_came_alone() -> bool:
        events = engine.events(prompt="a stream", max_tokens=300, stream_options={"include_usage": True})
        *pieces, last = events
        assert last["choices"] == []
        assert last["usage"] == {**whole["usage"], "prompt_tokens_details": None}
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole["choices"][0]["text"]
        assert [piece["choices"][0]["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
        return len(pieces) > 2 and len(pieces[0]["choices"][0]["text"]) == 4

    # The engine's clock runs faster than this machine's: an engine that was not scheduled for some milliseconds sends
    # the tokens of that time in one piece, so a single stream proves nothing on a loaded machine.
    assert any(first_token_came_alone() for _ in range(20))
    assert not any("usage" in event for event in engine.events(prompt="a stream", max_tokens=3))


def test_chat_with_and_without_streaming(engine: EngineProcess) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 50}
    whole = engine.client.post("/v1/chat/completions", json=body).json()
    assert whole["object"] == "chat.completion"
    message = whole["choices"][0]["message"]
    events = engine.events("/v1/chat/completions", **body)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == message["content"]
    assert events[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_several_choices_with_and_without_streaming(engine: EngineProcess, path: str) -> None:
    prompt = {"prompt": IDS} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi " * 200}]}
    body = {**prompt, "max_tokens": 40, "n": 4, "logprobs": 2 if "prompt" in prompt else True, "top_logprobs": 2}
    whole = engine.client.post(path, json=body).json()

    def text(choice: dict[str, Any]) -> str:
        return str(choice["text"] if "text" in choice else choice["message"]["content"])

    texts = [text(choice) for choice in whole["choices"]]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    assert {len(each) for each in texts} == {160}
    assert whole["usage"]["completion_tokens"] == 160
    assert whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"] + 160
    streamed, logged = dict.fromkeys(range(4), ""), dict.fromkeys(range(4), 0)
    *events, last = engine.events(path, **body, stream_options={"include_usage": True})
    for event in events:
        [choice] = event["choices"]
        streamed[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content", "")
        if (found := choice["logprobs"]) is not None:
            logged[choice["index"]] += len(found.get("tokens", found.get("content", ())))
    assert [streamed[index] for index in range(4)] == texts
    assert set(logged.values()) == {40}
    assert last["usage"]["completion_tokens"] == 160
    assert engine.wait_for(lambda state: state["live_requests"] == 0)["used_blocks"] == 0


def test_a_list_of_prompts(engine: EngineProcess) -> None:
    prompts = ["first prompt " * 20, "second"]
    whole = engine.complete(prompts, n=2, max_tokens=5).json()
    alone = [engine.complete(prompt, max_tokens=5).json() for prompt in prompts]
    assert [whole["choices"][index]["text"] for index in (0, 2)] == [each["choices"][0]["text"] for each in alone]
    assert whole["usage"]["prompt_tokens"] == sum(each["usage"]["prompt_tokens"] for each in alone)
    assert whole["usage"]["completion_tokens"] == 20


def test_log_probabilities_belong_to_the_tokens(engine: EngineProcess) -> None:
    choice = engine.complete(max_tokens=6, logprobs=3).json()["choices"][0]
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"]
    assert found["text_offset"] == [0, 4, 8, 12, 16, 20]
    for token, value, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert (len(top), top[token], max(top.values())) == (3, value, value)
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "logprobs": True, "top_logprobs": 1}
    choice = engine.client.post("/v1/chat/completions", json=chat).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert "".join(each["token"] for each in content) == choice["message"]["content"]
    assert all(each["top_logprobs"][0]["token"] == each["token"] for each in content)


def test_a_client_that_leaves_several_choices_frees_their_blocks(engine: EngineProcess) -> None:
    body = {"prompt": "x", "max_tokens": 50_000, "n": 3, "stream": True}
    with engine.client.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    state = engine.wait_for(lambda state: state["live_requests"] == 0)
    assert (state["running"], state["used_blocks"]) == (0, 0)


def test_texts_without_generation(engine: EngineProcess) -> None:
    post = engine.client.post
    tokens = post("/tokenize", json={"prompt": "some text"}).json()["tokens"]
    assert post("/detokenize", json={"tokens": tokens}).json() == {"prompt": "some text"}
    assert len(post("/v1/embeddings", json={"input": "some text"}).json()["data"][0]["embedding"]) == 256
    assert post("/v1/score", json={"text_1": "a", "text_2": "a"}).json()["data"][0]["score"] == 1.0
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        assert post(path, json={"query": "a", "documents": ["b", "a"]}).json()["results"][0]["index"] == 1
    refused = post("/pooling", json={"input": "a"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (501, 501)
    assert "does not implement POST /pooling" in refused.json()["error"]["message"]


def test_a_stop_string_gives_reason_stop(engine: EngineProcess) -> None:
    text = engine.complete(max_tokens=30).json()["choices"][0]["text"]
    choice = engine.complete(max_tokens=30, stop=text[40:44]).json()["choices"][0]
    assert (choice["finish_reason"], choice["text"]) == ("stop", text[:44])


@pytest.mark.parametrize(
    ("content", "content_type", "status"),
    [
        (b"{", "application/json", 400),
        (b'{"prompt": 3}', "application/json", 400),
        (b'{"prompt": "a", "model": "other"}', "application/json", 404),
        (b'{"prompt": "a", "max_tokens": 64001}', "application/json", 400),
        (b'{"prompt": "a"}', "text/plain", 400),
    ],
)
def test_errors_have_openais_shape(engine: EngineProcess, content: bytes, content_type: str, status: int) -> None:
    response = engine.client.post("/v1/completions", content=content, headers={"content-type": content_type})
    assert response.status_code == status
    assert response.json()["error"]["code"] == status


def test_the_other_endpoints(engine: EngineProcess) -> None:
    assert engine.client.get("/health").status_code == 200
    assert engine.client.get("/version").json()["version"]
    model = engine.client.get("/v1/models").json()["data"][0]
    assert (model["id"], model["max_model_len"]) == ("warm-sim", 64_000)
    tokens = engine.client.post("/tokenize", json={"prompt": "abcdefgh"}).json()
    assert (tokens["count"], len(tokens["tokens"])) == (2, 2)
    assert engine.client.get("/nowhere").status_code == 404
    assert engine.client.get("/v1/completions").status_code == 405
    assert re.fullmatch(r"[0-9a-f-]{36}", engine.engine_id)


def test_metrics_have_vllms_names(engine: EngineProcess) -> None:
    def value(text: str, name: str) -> float:
        found = re.search(rf'^{re.escape(name)}(?:{{[^}}]*engine="0"[^}}]*}})? ([0-9.e+-]+)$', text, re.MULTILINE)
        assert found, name
        return float(found[1])

    before = engine.client.get("/metrics").text
    engine.complete(max_tokens=10)
    engine.complete(max_tokens=10)
    after = engine.client.get("/metrics").text
    for name, grown in (
        ("vllm:prompt_tokens_total", 1280),
        ("vllm:generation_tokens_total", 20),
        ("vllm:prefix_cache_queries_total", 1280),
        ("vllm:prefix_cache_hits_total", 576),
        ("vllm:num_preemptions_total", 0),
        ("vllm:time_to_first_token_seconds_count", 2),
    ):
        assert value(after, name) - value(before, name) == grown, name
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert value(after, name) == 0
    assert 'vllm:cache_config_info{block_size="64"' in after
    assert 'num_gpu_blocks="1000"' in after
    assert 'finished_reason="length"' in after
    assert value(after, "process_start_time_seconds") <= time.time()
    assert 'vllm:time_to_first_token_seconds_bucket{engine="0",le="0.25",model_name="warm-sim"}' in after


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks(engine: EngineProcess, stream: bool) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 60_000, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection(("127.0.0.1", engine.port)) as raw:
        raw.sendall(head.encode() + b"\r\n\r\n" + body)
        state = engine.wait_for(lambda state: state["running"] == 1)
        assert state["used_blocks"] > 0
    state = engine.wait_for(lambda state: state["live_requests"] == 0)
    assert (state["running"], state["used_blocks"], state["free_blocks"]) == (0, 0, 1000)


def test_requests_are_served_side_by_side(engine: EngineProcess) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: engine.complete([n] * 5000, max_tokens=200), range(8)))
    assert all(answer.json()["usage"]["completion_tokens"] == 200 for answer in answers)
    assert engine.state()["free_blocks"] == 1000


def test_faults_that_keep_the_engine_out_of_it(engine: EngineProcess) -> None:
    engine.fault(mode="error", status=503, count=1)
    assert engine.complete().status_code == 503
    assert engine.complete().status_code == 200
    engine.fault(mode="refuse", count=1)
    with pytest.raises(httpx.RemoteProtocolError, match="without sending a response"):
        engine.complete()
    engine.fault(mode="hang")
    with pytest.raises(httpx.ReadTimeout):
        engine.client.post("/v1/completions", json={"prompt": "a"}, timeout=2.0)
    assert engine.client.get("/health").status_code == 200
    engine.fault(mode="error", health=True)
    assert engine.client.get("/health").status_code == 500
    assert engine.client.post("/sim/faults", json={"mode": "explode"}).status_code == 400
    assert engine.client.get("/sim/faults").json()["mode"] == "error"


def test_a_slow_request_arrives_late(engine: EngineProcess) -> None:
    engine.fault(mode="slow", delay_s=10.0, count=1)
    before = engine.state()["now_s"]
    assert engine.complete(max_tokens=1).status_code == 200
    assert engine.state()["now_s"] - before >= 10.0


def read_stream(engine: EngineProcess, received: list[str]) -> None:
    body = {"prompt": "a", "max_tokens": 5000, "stream": True}
    with engine.client.stream("POST", "/v1/completions", json=body, timeout=2.0) as response:
        received.extend(response.iter_lines())


@pytest.mark.parametrize(
    ("mode", "error"), [("reset_mid_stream", "Connection reset"), ("hang_mid_stream", "timed out")]
)
def test_faults_in_the_middle_of_a_stream(engine: EngineProcess, mode: str, error: str) -> None:
    engine.fault(mode=mode, after_tokens=1, count=1)
    received: list[str] = []
    with pytest.raises((httpx.ReadError, httpx.ReadTimeout), match=error):
        read_stream(engine, received)
    assert '"text":"' in received[0]
    assert "data: [DONE]" not in received
    engine.wait_for(lambda state: state["live_requests"] == 0)
    engine.fault(mode=mode, count=1)
    with pytest.raises((httpx.ReadError, httpx.ReadTimeout), match=error):
        engine.client.post("/v1/completions", json={"prompt": "a"}, timeout=2.0)


def legs(p: EngineProcess, transfer_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
    first = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    second = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": transfer_id,
        "remote_engine_id": p.engine_id,
        "remote_bootstrap_addr": f"http://127.0.0.1:{p.bootstrap_port}",
    }
    return first, second


def test_a_hand_off_between_two_processes(engine: EngineProcess, pair: tuple[EngineProcess, EngineProcess]) -> None:
    p, d = pair
    first, second = legs(p, "hand-off")
    alone = p.complete(max_tokens=8).json()["choices"][0]["text"]
    assert p.complete(max_tokens=1, min_tokens=1, kv_transfer_params=first).status_code == 200
    assert p.state()["held_blocks"] == 10
    body = d.complete(max_tokens=8, kv_transfer_params=second).json()
    assert body["choices"][0]["text"] == alone
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 639}
    p.complete("anything that makes P step")
    state = p.wait_for(lambda state: state["holds"] == 0)
    assert state["free_blocks"] == 1000


def test_failed_pulls_hang_and_leak(engine: EngineProcess, pair: tuple[EngineProcess, EngineProcess]) -> None:
    p, d = pair
    leaked_before = d.state()["leaked_blocks"]
    first, second = legs(p, "broken")
    p.complete(max_tokens=1, min_tokens=1, kv_transfer_params=first)
    with pytest.raises(httpx.ReadTimeout):
        d.client.post(
            "/v1/completions",
            json={"prompt": IDS, "kv_transfer_params": {**second, "remote_engine_id": "an older one"}},
            timeout=2.0,
        )
    state = d.wait_for(lambda state: state["live_requests"] == 0)
    assert state["leaked_blocks"] - leaked_before == 10
    d.fault(mode="kv_pull_hang", count=1)
    with pytest.raises(httpx.ReadTimeout):
        d.client.post("/v1/completions", json={"prompt": [7] * 640, "kv_transfer_params": second}, timeout=2.0)
    state = d.wait_for(lambda state: state["live_requests"] == 0)
    assert state["leaked_blocks"] - leaked_before == 20
    assert state["free_blocks"] + state["leaked_blocks"] == 1000


def test_an_ending_first_token_on_p(engine: EngineProcess, pair: tuple[EngineProcess, EngineProcess]) -> None:
    p, _ = pair
    first, _ = legs(p, "eos")
    p.fault(mode="p_eos")
    safe = p.complete(max_tokens=1, min_tokens=1, kv_transfer_params=first).json()
    assert safe["choices"][0]["finish_reason"] == "length"
    holds = p.state()["holds"]
    unsafe = p.complete(max_tokens=1, kv_transfer_params=first).json()
    assert unsafe["choices"][0]["finish_reason"] == "stop"
    assert p.state()["holds"] < holds + 1
    assert p.complete(max_tokens=3).json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_other_load_failure_policies_answer(engine: EngineProcess, policy: str) -> None:
    d = EngineProcess.start("--kv-load-failure-policy", policy, "--profile", "h200", "--transport", "nvlink")
    try:
        _, second = legs(engine, "never made")
        for broken in ({"remote_bootstrap_addr": "http://127.0.0.1:9"}, {"remote_engine_id": "stale"}):
            response = d.complete(kv_transfer_params={**second, **broken})
            if policy == "fail":
                assert response.status_code == 500
                assert "KV load failure" in response.json()["error"]["message"]
            else:
                assert response.json()["usage"]["completion_tokens"] == 16
        d.fault(mode="kv_pull_error", count=1)
        assert d.complete(kv_transfer_params=second).status_code == (500 if policy == "fail" else 200)
        assert d.state()["free_blocks"] == d.state()["total_blocks"]
    finally:
        assert d.stop() == 0


def test_the_stream_of_a_response_opens_before_its_prefill() -> None:
    """As in vLLM; those of the other APIs begin with the first token."""
    engine = EngineProcess.start("--max-num-seqs", "1", "--engine-speed", "1")
    try:
        busy = {"model": "warm-sim", "prompt": IDS, "max_tokens": 30_000, "stream": True}
        asked = {"model": "warm-sim", "input": "hello", "stream": True}
        with engine.client.stream("POST", "/v1/completions", json=busy) as first:
            tokens = first.iter_lines()
            assert next(tokens)
            with engine.client.stream("POST", "/v1/responses", json=asked) as response:
                lines = response.iter_lines()
                names = [line for line in (next(lines) for _ in range(5)) if line.startswith("event: ")]
                state = engine.state()
                assert (state["running"], state["waiting"]) == (1, 1)
        assert names == ["event: response.created", "event: response.in_progress"]
        engine.wait_for(lambda state: state["live_requests"] == 0)
    finally:
        assert engine.stop() == 0


def test_sigterm_ends_a_busy_engine(engine: EngineProcess) -> None:
    doomed = EngineProcess.start("--role", "none", "--engine-speed", "1")
    assert doomed.bootstrap_port is None
    body = json.dumps({"prompt": "x", "max_tokens": 60_000, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection(("127.0.0.1", doomed.port)) as raw:
        raw.sendall(head.encode() + b"\r\n\r\n" + body)
        assert raw.recv(100).startswith(b"HTTP/1.1 200")
        assert doomed.stop() == 0
        raw.settimeout(10)
        while raw.recv(65536):
            pass


def test_a_consumer_dies_of_a_prefill_leg(engine: EngineProcess) -> None:
    doomed = EngineProcess.start("--role", "kv_consumer")
    try:
        response = doomed.complete(kv_transfer_params={"do_remote_decode": True, "transfer_id": "t"})
        assert response.status_code == 500
        assert doomed.process.wait(timeout=20) == 1
    finally:
        doomed.process.kill()
        doomed.client.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--role", "boss"], "--role"),
        (["--profile", "h999"], "h20, h200"),
        (["--port", "99999999"], "cannot listen"),
    ],
)
def test_a_bad_command_line_says_what_is_wrong(options: list[str], message: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "sim", *options], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode in {1, 2}
    assert message in result.stderr
