"""An engine killed under streams that may be resumed: their clients get the answers of an unbroken run."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import uuid
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import psutil

from tests.engines.conftest import StartProxy
from tests.engines.rig import REAL_ENGINES, Engines, Proxy, fresh_prompt, fresh_text, many, sse_data, until

pytestmark = REAL_ENGINES

SESSIONS = ("one", "two")
"""Each is on a separate engine, both of which are killed: one engine has no seats for ten streams."""
TOKENS = 1000
BEGUN = 4
"""Events that every stream has had before the kill, of one token or several."""


@dataclass
class Stream:
    """A client's received stream."""

    events: list[dict[str, Any]] = field(default_factory=list)
    done: int = 0
    instance: str = ""
    request_id: str = ""

    def said(self, name: str) -> Any:
        """The texts, the roles or the ids of all events, joined."""
        found: list[Any] = []
        for event in self.events:
            for choice in event.get("choices", []):
                part = {**choice, **(choice.get("delta") or {})}
                if part.get(name):
                    found.append(part[name])
        return found

    @property
    def answer(self) -> dict[str, Any]:
        """The fields that are equal in a resumed stream and an unbroken one."""
        assert all("error" not in event for event in self.events), self.events[-1]
        usage = [event["usage"] for event in self.events if event.get("usage")]
        # Present in every event on request; the number of tokens in an event depends on the engine.
        completion = [each["completion_tokens"] for each in usage]
        assert completion == sorted(completion)
        return {
            "text": "".join(self.said("text") + self.said("content")),
            "ids": list(itertools.chain.from_iterable(self.said("token_ids"))),
            "prompt_ids": self.said("prompt_token_ids")
            + [e["prompt_token_ids"] for e in self.events if e.get("prompt_token_ids")],
            "roles": self.said("role"),
            "finish_reasons": self.said("finish_reason"),
            "usage": [{name: count for name, count in each.items() if name.endswith("_tokens")} for each in usage[-1:]],
            "models": {event["model"] for event in self.events},
            "objects": {event["object"] for event in self.events},
            "done": self.done,
        }


async def listen(proxy: Proxy, body: dict[str, Any], stream: Stream) -> Stream:
    stream.request_id = f"t-{uuid.uuid4().hex}"
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    headers = {"x-request-id": stream.request_id, "x-warmroute-resume": "1"}
    async with proxy.client.stream("POST", path, json=body, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        stream.instance = answer.headers["x-warmroute-instance"]
        async for data in sse_data(answer):
            if data == b"[DONE]":
                stream.done += 1
            else:
                stream.events.append(json.loads(data))
    return stream


def signal_cores(engines: Engines, numbers: list[int], signum: int) -> None:
    """Signal all processes of these engines except their API servers."""
    for number in numbers:
        for process in psutil.Process(engines.state(number).pid).children(recursive=True):
            if not any("api_server" in part for part in process.cmdline()):
                process.send_signal(signum)


def bodies(model: str) -> list[dict[str, Any]]:
    """Streams of every kind that may be resumed."""
    plain = {"model": model, "stream": True, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    ids = {"return_token_ids": True}
    usage = {"stream_options": {"include_usage": True}}

    def chat() -> dict[str, Any]:
        messages = [{"role": "system", "content": fresh_text(50)}, {"role": "user", "content": fresh_text(120)}]
        return {"messages": messages}

    without_limit = {name: value for name, value in plain.items() if name != "max_tokens"}
    return [
        {**plain, "prompt": fresh_prompt(90), **ids, **usage},
        {
            **plain,
            "prompt": fresh_prompt(100),
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
        {**plain, "prompt": fresh_prompt(30), **usage, "repetition_penalty": 1.2, "min_tokens": 300},
        {**plain, "prompt": fresh_text(300), **usage},
        {**plain, "prompt": fresh_text(200), **ids},
        {**plain, **chat(), **usage},
        {**plain, **chat(), **ids, **usage},
        {**without_limit, **chat(), "max_completion_tokens": TOKENS, **usage},
        {**plain, **chat()},
        # This depends on the whole output: it is repeated, not continued.
        {**plain, "prompt": fresh_text(100), **usage, "presence_penalty": 0.7, "stop": ["\u0000\u0000never"]},
    ]


async def test_a_seeded_stream_is_repeated_and_goes_on(engines: Engines, start_proxy: StartProxy) -> None:
    """vLLM restarts the generator of a seed with each request, so only the whole request draws the same again.

    Alone on its engine: vLLM 0.18.1 on the CPU forgets seeds in a batch that has sampled requests without one.
    """
    relays = {number: await start_proxy.relay(engines.file.url(number)) for number in (2, 3)}
    proxy = await start_proxy(
        *relays,
        urls={number: relay.url for number, relay in relays.items()},
        offload={"planner": "never", "params": {}},
        resume={"enabled": "always", "repeat_tokens": TOKENS},
    )
    body = {**bodies(proxy.model)[6], "temperature": 0.8, "seed": 7}
    whole = await listen(proxy, body, Stream())
    stream = Stream()
    async with many([listen(proxy, body, stream)]) as listening:
        while len(stream.events) < BEGUN:
            assert not listening[0].done()
            await asyncio.sleep(0.005)
        await relays[engines.number(stream.instance)].stop()
        await asyncio.gather(*listening)
    row = await proxy.row(stream.request_id)
    assert row is not None
    assert (row["outcome"], row["resume"], row["resumed"]) == ("ok", "resumed", 1), row
    assert row["instance"] != stream.instance
    assert stream.answer == whole.answer
    [again] = [relay.bodies[-1] for number, relay in relays.items() if engines.name(number) == row["instance"]]
    assert again["messages"] == body["messages"]
    assert (await listen(proxy, {**body, "seed": 8}, Stream())).answer["text"] != whole.answer["text"]
    await proxy.settled()


async def test_ten_streams_outlive_their_engines(engines: Engines, start_proxy: StartProxy) -> None:
    proxy = await start_proxy(
        *range(4),
        policy={"name": "session_sticky", "params": {"overload_factor": 1000.0}},
        offload={"planner": "never", "params": {}},
        # Two busy processors: a slow connection is no error.
        timeouts={"connect_s": 20, "first_byte_s": 60, "total_s": 120, "idle_s": 20},
        # The other killed engine may be tried before its end is noticed.
        resume={"enabled": "on_request", "repeat_tokens": TOKENS, "max_resumes": 3},
    )
    asked = bodies(proxy.model)
    for number, body in enumerate(asked):
        body["user"] = SESSIONS[number % 2]
    unbroken = await asyncio.gather(*(listen(proxy, body, Stream()) for body in asked))
    victims = sorted({each.instance for each in unbroken})
    assert len(victims) == len(SESSIONS)
    numbers = [engines.number(name) for name in victims]
    streams = [Stream() for _ in asked]
    async with AsyncExitStack() as stack:
        # On a busy machine a decoding engine admits further requests late, so all are sent first.
        stack.callback(engines.resume_all)
        signal_cores(engines, numbers, signal.SIGSTOP)
        listening = await stack.enter_async_context(
            many([listen(proxy, body, stream) for body, stream in zip(asked, streams, strict=True)])
        )

        async def sent() -> bool:
            return bool((await proxy.client.get("/stats")).json()["requests"]["in_flight"] == len(asked))

        await until(sent, "all streams are requested")
        await asyncio.sleep(1.0)
        signal_cores(engines, numbers, signal.SIGCONT)
        while min(len(stream.events) for stream in streams) < BEGUN:
            assert not any(task.done() for task in listening), [len(stream.events) for stream in streams]
            await asyncio.sleep(0.005)
        for number in numbers:
            engines.kill(number)
        await asyncio.gather(*listening)

    for body, stream, whole in zip(asked, streams, unbroken, strict=True):
        row = await proxy.row(stream.request_id)
        assert row is not None
        assert (row["outcome"], row["resume"], row["resumed"]) == ("ok", "resumed", 1), (body, row)
        assert row["attempts"][0]["instance"] == stream.instance
        assert stream.instance in victims
        assert row["instance"] not in victims
        assert stream.answer == whole.answer, body
        assert [len({event[name] for event in stream.events}) for name in ("id", "created")] == [1, 1]
        assert row["completion_tokens"] == TOKENS
    await proxy.settled()
    metrics = (await proxy.client.get("/metrics")).text
    assert f'warmroute_resumes_total{{result="resumed"}} {len(asked)}.0' in metrics
