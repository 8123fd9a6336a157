"""A scripted engine for the proxy's tests: it answers like vLLM and misbehaves on demand.

It has no cache or scheduler (the simulated engine does) and counts the requests that reached it.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class StubEngine:
    """One engine on a free loopback port. Set ``mode`` to choose its behaviour."""

    mode: str = "ok"
    model: str = "stub"
    adapters: list[str] = field(default_factory=list)
    max_model_len: int | None = None
    """In its list of models; it refuses nothing for it."""
    checks_model: bool = True
    """Answers 404 to requests for other models than it lists, like vLLM."""
    listings: int = 0
    """Times that its models were listed."""
    tokens: int = 4
    finish_reason: str = "length"
    """Of answers that are not streamed."""
    padding_bytes: int = 0
    token_delay_s: float = 0.0
    streams_end: asyncio.Event | None = None
    """No stream continues after its first event before it is set."""
    prefill_s: float = 0.0
    cached_tokens: int | None = None
    block_tokens: int = 16
    prefix_caching: bool = True
    blocks: int = 10_000
    kv_usage: float = 0.25
    nixl_block_ids: list[int] | None = None
    """Makes it answer P legs like NixlConnector, with these blocks."""
    pull_s: float = 0.0
    pulls_end: asyncio.Event | None = None
    """No pull ends before it is set."""
    query_delay_s: float = 0.0
    health_delay_s: float = 0.0
    metrics_delay_s: float = 0.0
    counters: dict[str, float] = field(default_factory=dict)
    """Further lines of /metrics."""
    seen: list[dict[str, Any]] = field(default_factory=list)
    seen_headers: list[dict[str, str]] = field(default_factory=list)
    raw_bodies: list[bytes] = field(default_factory=list)
    aborted: int = 0
    probes: int = 0
    running: int = 0
    engine_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    started_unix_s: float = field(default_factory=time.time)
    reports_start: bool = True
    """False: as several API servers of vLLM."""
    port: int = 0

    async def start(self) -> StubEngine:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        self._more_routes(app)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/query", self._query)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.2)
        await self._runner.setup()
        await self._listen()
        return self

    def _more_routes(self, app: web.Application) -> None:
        """Routes of engines that serve more."""

    async def _listen(self) -> None:
        self._site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await self._site.start()
        assert self._site._server is not None
        self.port = self._site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def restart(self) -> None:
        """Restart on the same port, indistinguishable from a new process."""
        self.engine_id = uuid.uuid4().hex
        self.started_unix_s += 1
        await self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _health(self, _: web.Request) -> web.Response:
        await asyncio.sleep(self.health_delay_s)
        return web.Response(status=500 if self.mode == "sick" else 200)

    async def _query(self, _: web.Request) -> web.Response:
        await asyncio.sleep(self.query_delay_s)
        return web.json_response({"0": {"engine_id": self.engine_id, "worker_addr": {"0": {"0": "tcp://x"}}}})

    async def _models(self, _: web.Request) -> web.Response:
        if self.mode == "nonsense":
            return web.json_response(["not", "an", "object"])
        self.listings += 1
        if self.mode == "unlisted":
            return web.json_response({"error": "no such path"}, status=404)
        length = {} if self.max_model_len is None else {"max_model_len": self.max_model_len}
        cards = [{"id": self.model, "object": "model", "parent": None, **length}]
        cards += [{"id": name, "object": "model", "parent": self.model} for name in self.adapters]
        return web.json_response({"object": "list", "data": cards})

    async def _metrics(self, _: web.Request) -> web.Response:
        self.probes += 1
        await asyncio.sleep(self.metrics_delay_s)
        labels = f'{{engine="0",model_name="{self.model}"}}'
        config = (
            f'{{block_size="{self.block_tokens}",num_gpu_blocks="{self.blocks}",'
            f'enable_prefix_caching="{self.prefix_caching}"}}'
        )
        return web.Response(
            text=f"vllm:num_requests_running{labels} {self.running}\n"
            f"vllm:num_requests_waiting{labels} 0\n"
            f"vllm:kv_cache_usage_perc{labels} {self.kv_usage}\n"
            f"vllm:cache_config_info{config} 1.0\n"
            + (f"process_start_time_seconds {self.started_unix_s}\n" if self.reports_start else "")
            + "".join(f"{name}{labels} {value}\n" for name, value in self.counters.items())
        )

    def _usage(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = body.get("prompt")
        count = len(prompt) if isinstance(prompt, list) else max(1, len(json.dumps(body.get("messages", prompt))) // 4)
        usage: dict[str, Any] = {"prompt_tokens": count, "completion_tokens": self.tokens, "total_tokens": count}
        if (body.get("kv_transfer_params") or {}).get("do_remote_prefill"):
            usage["prompt_tokens_details"] = {"cached_tokens": count - 1}
        elif self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        return usage

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = json.loads(raw)
        self.raw_bodies.append(raw)
        self.seen.append(body)
        self.seen_headers.append({key.lower(): value for key, value in request.headers.items()})
        self.running += 1
        try:
            return await self._answer(request, body)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if self.checks_model and body["model"] not in {self.model, *self.adapters}:
            error = {"message": f"The model `{body['model']}` does not exist.", "type": "NotFoundError", "code": 404}
            return web.json_response({"error": error}, status=404)
        is_prefill_leg = bool((body.get("kv_transfer_params") or {}).get("do_remote_decode"))
        is_decode_leg = bool((body.get("kv_transfer_params") or {}).get("do_remote_prefill"))
        if self.mode == "error" or (self.mode == "p_error" and is_prefill_leg):
            return web.json_response({"error": {"message": "boom"}}, status=500)
        if self.mode == "page":
            return web.Response(text="<html>sign in</html>", content_type="text/html")
        if self.mode in {"empty", "cut_json"}:
            return web.Response(
                body=b'{"id": "cmpl-1", "choi' * (self.mode == "cut_json"), content_type="application/json"
            )
        if self.mode == "refuse_input" or (self.mode == "p_refuse" and is_prefill_leg):
            return web.json_response({"error": {"message": "too long", "type": "BadRequestError"}}, status=400)
        if (
            self.mode == "hang"
            or (self.mode == "p_hang" and is_prefill_leg)
            or (self.mode == "pull_hang" and is_decode_leg)
        ):
            await asyncio.sleep(3600)
        if self.mode == "reset":
            assert request.transport is not None
            request.transport.abort()
            await asyncio.sleep(0.05)
        await asyncio.sleep(self.pull_s if is_decode_leg else self.prefill_s)
        if is_decode_leg and self.pulls_end is not None:
            await self.pulls_end.wait()
        if not body.get("stream"):
            return web.json_response(
                {
                    "id": "x",
                    "object": "text_completion",
                    "model": self.model,
                    "usage": self._usage(body),
                    "choices": [
                        {
                            "index": 0,
                            "text": "w " * self.tokens,
                            "finish_reason": self.finish_reason,
                            "message": {"role": "assistant", "content": "w"},
                        }
                    ],
                    "kv_transfer_params": self._answered_params() if is_prefill_leg else None,
                }
            )
        return await self._stream(request, body)

    def _answered_params(self) -> dict[str, Any] | None:
        if self.nixl_block_ids is None:
            return None
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_block_ids": self.nixl_block_ids,
            "remote_host": "127.0.0.1",
            "remote_port": 20_000 + self.port % 1_000,
            "tp_size": 1,
        }

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        if self.mode == "empty_stream":
            assert request.transport is not None
            request.transport.abort()
            return response
        asked = bool((body.get("stream_options") or {}).get("include_usage"))
        for number in range(self.tokens):
            if number == 2 and self.mode == "break_stream":
                assert request.transport is not None
                request.transport.abort()
                return response
            if number == 2 and self.mode == "stall_stream":
                await asyncio.sleep(3600)
            await response.write(self.event(number, usage_asked=asked))
            await asyncio.sleep(self.token_delay_s)
            if self.streams_end is not None:
                await self.streams_end.wait()
        if asked:
            await response.write(b"data: " + json.dumps(self.usage_event(body)).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def event(self, number: int, *, usage_asked: bool = False) -> bytes:
        chunk = {
            "id": "x",
            "object": "text_completion",
            "model": self.model,
            "choices": [
                {
                    "index": 0,
                    "text": f"w{number} " + "x" * self.padding_bytes,
                    "delta": {"content": f"w{number} "},
                    "finish_reason": None,
                }
            ],
        }
        end = b',"usage":null}' if usage_asked else b"}"
        return b"data: " + json.dumps(chunk).encode()[:-1] + end + b"\n\n"

    def usage_event(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"id": "x", "object": "text_completion", "model": self.model, "choices": [], "usage": self._usage(body)}
