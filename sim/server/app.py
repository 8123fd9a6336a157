"""The engine's two ASGI applications: the OpenAI API with metrics and health, and the KV bootstrap server."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from sim.core.content import token_ids
from sim.server.answers import Api, OpenAiApi, models
from sim.server.asgi import ClientGone, Receive, Scope, Send, answer, read_body, until_disconnect
from sim.server.faults import Faults
from sim.server.generation import GenerationHandler, fail
from sim.server.messages import MessagesApi, count_tokens
from sim.server.metrics import EngineMetrics
from sim.server.parsing import ApiError, parse_tokenize
from sim.server.pulls import PullQuestion, serve_pull
from sim.server.ranks import EngineRank, EngineRanks
from sim.server.responses import ResponsesApi
from sim.server.settings import ServerSettings, bracketed
from sim.server.similarity import detokenize, embeddings, rerank, score

_VERSION = msgspec.json.encode({"version": "0.18.1", "simulator": "warmroute"})

_RESPONSE = re.compile(r"\A/v1/responses/[^/]+")

_NOT_IMPLEMENTED = (
    *("/pooling", "/classify", "/v1/chat/completions/render", "/v1/completions/render"),
    *("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech"),
    *("/v1/images/generations", "/v1/images/edits"),
)
"""Paths of vLLM and its relatives that are refused by name."""

Route = Callable[[Scope, Receive, Send], Awaitable[None]]


class EngineRoutes:
    """Paths, each with one method; everything else is 404 or 405. ``{response_id}`` stands for one part of a path."""

    def __init__(self, routes: dict[tuple[str, str], Route]) -> None:
        self._routes = routes
        self._paths = {path for _, path in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request."""
        path = _RESPONSE.sub("/v1/responses/{response_id}", scope["path"])
        route = self._routes.get((scope["method"], path))
        if route is None:
            known = path in self._paths
            error = ApiError(405, "Method Not Allowed") if known else ApiError(404, "Not Found", "NotFoundError")
            await answer(send, error.status, error.body)
            return
        try:
            await route(scope, receive, send)
        except ApiError as error:
            await answer(send, error.status, error.body)
        except ClientGone:
            return


class EngineApp:
    """The application on the engine's port."""

    def __init__(self, settings: ServerSettings, ranks: EngineRanks, metrics: EngineMetrics, faults: Faults) -> None:
        self._settings = settings
        self._ranks = ranks
        self._metrics = metrics
        self._faults = faults
        self._generation = [GenerationHandler(settings, rank.driver, faults) for rank in ranks.all]
        self._chat_api, self._completions_api = OpenAiApi(chat=True), OpenAiApi(chat=False)
        self._messages_api, self._responses_api = MessagesApi(), ResponsesApi()
        self._models = models(settings.model, settings.config.max_model_len, time.time())

    def routes(self) -> EngineRoutes:
        """All of them."""
        return EngineRoutes(
            {
                ("POST", "/v1/completions"): self._completions,
                ("POST", "/v1/chat/completions"): self._chat,
                ("POST", "/v1/messages"): self._messages,
                ("POST", "/v1/messages/count_tokens"): self._count_tokens,
                ("POST", "/v1/responses"): self._responses,
                ("GET", "/v1/responses/{response_id}"): self._read_response,
                ("POST", "/v1/responses/{response_id}/cancel"): self._cancel_response,
                ("GET", "/v1/models"): self._list_models,
                ("GET", "/health"): self._health,
                ("GET", "/version"): self._version,
                ("GET", "/metrics"): self._expose_metrics,
                ("POST", "/tokenize"): self._tokenize,
                ("POST", "/detokenize"): self._from_body(detokenize),
                ("POST", "/v1/embeddings"): self._from_body(embeddings),
                **{("POST", path): self._from_body(score) for path in ("/score", "/v1/score")},
                **{("POST", path): self._from_body(rerank) for path in ("/rerank", "/v1/rerank", "/v2/rerank")},
                **{("POST", path): _refuse for path in _NOT_IMPLEMENTED},
                ("POST", "/reset_prefix_cache"): self._reset_prefix_cache,
                ("POST", "/sim/faults"): self._set_faults,
                ("GET", "/sim/faults"): self._show_faults,
                ("GET", "/sim/state"): self._state,
            }
        )

    async def _completions(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._generate(scope, receive, send, self._completions_api)

    async def _chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._generate(scope, receive, send, self._chat_api)

    async def _messages(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._generate(scope, receive, send, self._messages_api)

    async def _generate(self, scope: Scope, receive: Receive, send: Send, api: Api) -> None:
        try:
            rank = self._ranks.chosen(scope)
        except ApiError as error:
            await read_body(receive)
            await answer(send, error.status, api.error(error))
            return
        await self._generation[rank.number].handle(scope, receive, send, api)

    async def _count_tokens(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await answer(send, 200, count_tokens(await read_body(receive), self._settings))
        except ApiError as error:
            await answer(send, error.status, self._messages_api.error(error))

    async def _responses(self, scope: Scope, receive: Receive, send: Send) -> None:
        # vLLM 0.18.1 reads the header of the rank on the other paths only.
        generation = self._generation[self._ranks.least_loaded().number]
        await generation.handle(scope, receive, send, self._responses_api)

    async def _read_response(self, scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, 200, self._responses_api.read(scope["path"].split("/")[3]))

    async def _cancel_response(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._responses_api.cancel(scope["path"].split("/")[3])

    async def _list_models(self, scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, 200, self._models)

    async def _health(self, scope: Scope, receive: Receive, send: Send) -> None:
        fault = self._faults.for_health()
        if fault is None:
            await answer(send, 200, b"")
            return
        await read_body(receive)
        gone = asyncio.ensure_future(until_disconnect(receive))
        try:
            await fail(fault, receive, send, gone)
        finally:
            gone.cancel()

    async def _version(self, scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, 200, _VERSION)

    async def _expose_metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, 200, self._metrics.expose(), EngineMetrics.content_type.encode())

    async def _tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        tokens = token_ids(parse_tokenize(await read_body(receive)))
        limit = self._settings.config.max_model_len
        body = {"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": None}
        await answer(send, 200, msgspec.json.encode(body))

    def _from_body(self, answered: Callable[[bytes, ServerSettings], bytes]) -> Route:
        """Route whose answer is a function of the body."""

        async def route(scope: Scope, receive: Receive, send: Send) -> None:
            await answer(send, 200, answered(await read_body(receive), self._settings))

        return route

    async def _reset_prefix_cache(self, scope: Scope, receive: Receive, send: Send) -> None:
        done = [rank.engine.reset_prefix_cache() for rank in self._ranks.all]
        await answer(send, 200, msgspec.json.encode({"reset": all(done)}))

    async def _set_faults(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            fault = self._faults.set(await read_body(receive))
        except msgspec.MsgspecError as error:
            raise ApiError(400, f"not a fault: {error}") from error
        await answer(send, 200, msgspec.json.encode(fault))

    async def _show_faults(self, scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, 200, msgspec.json.encode(self._faults.current))

    async def _state(self, scope: Scope, receive: Receive, send: Send) -> None:
        states = [_state_of(rank) for rank in self._ranks.all]
        body = states[0] if len(states) == 1 else {"ranks": states}
        await answer(send, 200, msgspec.json.encode(body))


def _state_of(rank: EngineRank) -> dict[str, Any]:
    engine, clock = rank.engine, rank.driver.clock
    return {
        **engine.state()._asdict(),
        "live_requests": engine.live_requests,
        "engine_id": engine.config.engine_id,
        "now_s": clock.now(),
        "time_scale": clock.time_scale,
        "prefix_queries": engine.counters.prefix_queries,
        "prefix_hits": engine.counters.prefix_hits,
        "preemptions": engine.counters.preemptions,
        "finished": engine.counters.finished,
    }


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse a path that vLLM has, by its name."""
    await read_body(receive)
    raise ApiError(501, f"the simulated engine does not implement POST {scope['path']}", "NotImplementedError")


class BootstrapApp:
    """The application on the bootstrap port: the engine's identity, and P's side of a pull."""

    def __init__(self, settings: ServerSettings, ranks: EngineRanks) -> None:
        self._drivers = {rank.engine.config.engine_id: rank.driver for rank in ranks.all}
        self._first = ranks.all[0].driver
        worker_addr = {"0": {"0": f"tcp://{bracketed(settings.host)}:0"}}
        entries = {
            str(rank.number): {"engine_id": rank.engine.config.engine_id, "worker_addr": worker_addr}
            for rank in ranks.all
        }
        self._query = msgspec.json.encode(entries)

    def routes(self) -> EngineRoutes:
        """All of them."""
        return EngineRoutes({("GET", "/query"): self._answer_query, ("POST", "/sim/pull"): self._pull})

    async def _answer_query(self, scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, 200, self._query)

    async def _pull(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            question = msgspec.json.decode(await read_body(receive), type=PullQuestion)
        except msgspec.MsgspecError as error:
            raise ApiError(400, f"not a pull: {error}") from error
        # Any rank answers for an engine id that none of them has.
        reply = await serve_pull(self._drivers.get(question.engine_id, self._first), question)
        await answer(send, 200, msgspec.json.encode(reply))
