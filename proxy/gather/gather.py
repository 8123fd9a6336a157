"""ASGI application in front of the admin endpoints: requests about all workers go to all, and one answer comes back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qs

import httpx
import msgspec
from sse_starlette import EventSourceResponse

from proxy.access.guard import Application, Receive, Scope, Send
from proxy.core import Core
from proxy.errors import RequestError
from proxy.gather.families import decode_families, decode_part, exposition, families_of, merged
from proxy.gather.peers import ADMIN_KEY, PROBE_S, READ_S, PeerAnswer, Peers, answered
from proxy.gather.place import Place
from proxy.gather.records import JoinedStreams, PageQuery, resumed
from proxy.gather.restarts import restarts
from proxy.gather.rules import READS, changes_workers, join_of
from proxy.sharing.frames import Changed, ChangeRequest, Question, WorkerStanding
from proxy.sharing.line import LineError

log = logging.getLogger("warmroute.workers")

METRICS = "/workers/metrics"
"""Path of one worker's metric families, on its Unix socket only."""
_PASSED = (b"content-type", b"accept")
_SETTLED_S = 1.0
"""Time after which a change that waits for running requests no longer keeps others waiting."""
_MARGIN_S = 60.0
_AGAIN_S = 0.1
_LONGEST_S = 86_400.0
_JSON = "application/json"
_TEXT = "text/plain; version=0.0.4; charset=utf-8"


class Gather:
    """Answers for all workers; requests that any worker can answer alone pass through.

    Args:
        app: this worker's endpoints.
        core: of this worker.
        place: of this worker.
        peers: clients of all workers, owned by the caller.
    """

    def __init__(self, app: Application, core: Core, place: Place, peers: Peers) -> None:
        self._app = app
        self._core = core
        self._place = place
        self._peers = peers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry point."""
        handler = self._handler(scope) if scope["type"] == "http" else None
        if handler is None:
            await self._app(scope, receive, _naming(send, self._place.number))
            return
        try:
            await handler(scope, receive, send)
        except RequestError as error:
            await _answer(send, error.status, _JSON, error.body())

    def _handler(self, scope: Scope) -> Callable[[Scope, Receive, Send], Any] | None:
        method, path = scope["method"], scope["path"]
        if method == "GET" and path == "/metrics":
            return self._metrics
        if method == "GET" and path == "/breakdown":
            return self._breakdown
        if method in {"GET", "HEAD"} and path == "/ready":
            return self._ready
        if changes_workers(method, path):
            return self._change
        return self._read if join_of(method, path) is not None else None

    async def _read(self, scope: Scope, receive: Receive, send: Send) -> None:
        answers = await self._peers.ask("GET", _target(scope), _headers(scope), b"")
        own = answered(answers, self._place.number)
        if own.status >= 400:
            await _pass_on(send, own)
            return
        usable = [each for each in answers if each.ok]
        body = _joined(scope, usable)
        if scope["path"] == "/stats":
            body["workers"] = [_row(each, usable) for each in await self._roster()]
        elif scope["path"] == "/cache-killers":
            limit = parse_qs(scope["query_string"].decode("latin-1")).get("limit", ["100"])[0]
            body["found"] = body["found"][: int(limit)]
        await _answer(send, own.status, _JSON, msgspec.json.encode(body))

    async def _ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Readiness of the workers that answer a probe in time; one that hangs must not take the others away."""
        roster = await self._roster()
        answers = await self._peers.ask("GET", _target(scope), _headers(scope), b"", others_within_s=PROBE_S)
        body = READS["/ready"]([each.json() for each in answers])
        body["ready"] = body["ready"] and all(_has_served(each) for each in roster)
        if "conditions" in body:
            answering = {each.worker for each in answers}
            silent = [each for each in roster if each.serving and each.worker not in answering]
            now_s = time.time()
            since = {each.worker: round(now_s - self._peers.silent_s(each.worker), 3) for each in silent}
            silence_s = self._core.settings.worker_silence_s
            body["conditions"].append(_condition(roster, since, replaced=bool(silence_s)))
        await _answer(send, 200 if body["ready"] else 503, _JSON, msgspec.json.encode(body))

    async def _metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        give_up_s = time.monotonic() + READ_S
        while time.monotonic() < give_up_s:
            answers = await self._peers.ask("GET", METRICS, {}, b"")
            parts = [decode_part(each.body) for each in answers if each.ok]
            try:
                known = await self._place.line.ask(Question.ENDED)
            except LineError as error:
                raise _unknown(str(error)) from error
            # A process that ends meanwhile is among the ended ones or among the parts: a sum that lacks it, or has it
            # twice, would be read as a restart of all counters.
            if {part.pid for part in parts} == {each.pid for each in known.roster if each.listed}:
                families = merged([*(part.families for part in parts), decode_families(known.ended)])
                of_parent = families_of([restarts(known.roster)])
                await _answer(send, 200, _TEXT, exposition([*families.values(), *of_parent]))
                return
            await asyncio.sleep(_AGAIN_S)
        raise _unknown("a worker does not answer")

    async def _breakdown(self, scope: Scope, receive: Receive, send: Send) -> None:
        query = scope["query_string"]
        if parse_qs(query.decode("latin-1")).get("follow", ["false"])[0].lower() in {
            "1",
            "true",
            "yes",
            "on",
            "t",
            "y",
        }:
            await self._follow(scope, receive, send)
            return
        page = PageQuery(query, self._place.clock_s)
        answers = await self._peers.ask("GET", page.target, _headers(scope), b"")
        own = answered(answers, self._place.number)
        if not own.ok:
            await _pass_on(send, own)
            return
        body, content_type = page.joined([each for each in answers if each.ok])
        disposition = [(b"content-disposition", b"attachment; filename=breakdown.jsonl")] if page.lines else []
        await _answer(send, 200, content_type, body, disposition)

    async def _follow(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {**_headers(scope), **resumed(dict(scope["headers"]))}
        try:
            async with self._peers.stream(self._place.number, _target(scope), headers) as probe:
                # Invalid queries and a full house are answered by this worker alone.
                refused = None if probe.status_code < 400 else (probe.status_code, await probe.aread())
        except httpx.HTTPError as error:
            raise _unknown(f"this worker does not answer itself: {error}") from error
        if refused is not None:
            await _answer(send, refused[0], _JSON, refused[1])
            return
        streams = JoinedStreams(self._peers, _target(scope), headers, lambda: self._core.draining)
        stalled_s = self._core.settings.timeouts.client_stall_s
        await EventSourceResponse(streams.events(), send_timeout=stalled_s, sep="\n")(scope, receive, send)

    async def _change(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Change all workers, one request at a time, and keep the change for workers that start later."""
        method, path, target = scope["method"], scope["path"], _target(scope)
        headers, body = _headers(scope), await _body(receive)
        within_s = self._within_s(scope)
        async with self._place.changing():
            asking = asyncio.create_task(self._peers.ask(method, target, headers, body, within_s), name="change")
            try:
                await asyncio.wait({asking}, timeout=_SETTLED_S if path.startswith("/instances/") else within_s)
                if not asking.done() or any(each.ok for each in asking.result()):
                    self._keep(method, path, target, headers, body)
            except BaseException:
                asking.cancel()
                raise
        try:
            answers = await asking
        finally:
            asking.cancel()
        own = answered(answers, self._place.number)
        failed = next((each for each in answers if not each.ok), None)
        if not own.ok or failed is not None:
            if own.ok and failed is not None:
                log.error("worker %d refused %s %s: %d", failed.worker, method, path, failed.status)
            await _pass_on(send, own if failed is None or not own.ok else failed)
            return
        joined = _joined(scope, answers)
        await _answer(send, own.status, _JSON, msgspec.json.encode(joined))

    def _keep(self, method: str, path: str, target: str, headers: dict[str, str], body: bytes) -> None:
        # Marks are part of the shared state, and settings are read by a worker that starts.
        if path == "/reload" or path.endswith(("/drain", "/undrain")):
            return
        self._place.line.send(Changed(ChangeRequest(method, target, body, headers.get(ADMIN_KEY))))

    def _within_s(self, scope: Scope) -> float:
        """Bound on a change in seconds: some wait for running requests."""
        if not scope["path"].startswith("/instances"):
            return READ_S + _MARGIN_S
        wanted = parse_qs(scope["query_string"].decode("latin-1")).get("grace_s", [""])[0]
        try:
            grace_s = float(wanted)
        except ValueError:
            grace_s = self._core.settings.grace_s
        return min(max(0.0, grace_s), _LONGEST_S) + _MARGIN_S

    async def _roster(self) -> tuple[WorkerStanding, ...]:
        try:
            return await self._place.roster()
        except LineError as error:
            raise _unknown(str(error)) from error


def _unknown(message: str) -> RequestError:
    return RequestError(503, message, kind="service_unavailable", code="workers_unknown")


def _has_served(standing: WorkerStanding) -> bool:
    """True unless it has never been there: one that is restarted leaves the others to serve."""
    return standing.serving or standing.restarts > 0


def _condition(roster: tuple[WorkerStanding, ...], silent: Mapping[int, float], *, replaced: bool) -> dict[str, Any]:
    """Condition ``workers`` of ``GET /ready?verbose``.

    Args:
        roster: every worker, as the parent knows it.
        silent: workers that listen but did not answer, with the Unix time since which they do not.
        replaced: the parent replaces those that stay silent.
    """
    away = [each for each in roster if not each.serving]
    detail = f"{len(roster) - len(away) - len(silent)} of {len(roster)} workers serve"
    detail += "".join(f"; worker {each.worker} {each.last_end or 'is starting'}" for each in away)
    detail += "".join(f"; worker {worker} does not answer" for worker in silent)
    restarts = sum(each.restarts for each in roster)
    if restarts:
        detail += f"; {restarts} restart(s) since the start"
    remedies = ["they are started again; the log has the reason of each end"] if away else []
    if silent:
        remedies.append(
            "one that hangs is replaced after worker_silence_s"
            if replaced
            else "GET /stats has the process of each: one that stays silent is replaced after SIGKILL"
        )
    return {
        "name": "workers",
        "ok": not away and not silent,
        "detail": detail,
        "remedy": "; ".join(remedies) or None,
        "since_unix_s": max((*(each.since_unix_s for each in roster), *silent.values())),
    }


def _row(standing: WorkerStanding, answers: list[PeerAnswer]) -> dict[str, Any]:
    """One worker for ``GET /stats``."""
    own: dict[str, Any] = next((each.json()["requests"] for each in answers if each.worker == standing.worker), {})
    return {
        "worker": standing.worker,
        "pid": standing.pid,
        "serving": standing.serving,
        "restarts": standing.restarts,
        "hung": standing.hung,
        "since_unix_s": standing.since_unix_s,
        "last_end": standing.last_end,
        "started": own.get("started"),
        "in_flight": own.get("in_flight"),
    }


def _joined(scope: Scope, answers: list[PeerAnswer]) -> Any:
    join = join_of(scope["method"], scope["path"])
    values = [each.json() for each in answers]
    return values[0] if join is None else join(values)


def _headers(scope: Scope) -> dict[str, str]:
    """Headers for the workers: what the endpoints read, and the key that was checked."""
    found = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _PASSED}
    key = scope.get("state", {}).get("admin_key")
    return found if key is None else {**found, ADMIN_KEY: str(key)}


def _target(scope: Scope) -> str:
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope["query_string"]
    return (path.partition(b"?")[0] + (b"?" + query if query else b"")).decode("latin-1")


async def _body(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return bytes(body)
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)


def _naming(send: Send, worker: int) -> Send:
    """Add the worker's number to an answer of it alone."""

    async def named(message: Any) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"x-warmroute-worker", b"%d" % worker)]}
        await send(message)

    return named


async def _pass_on(send: Send, answer: PeerAnswer) -> None:
    await _answer(send, answer.status, answer.content_type or _JSON, answer.body)


async def _answer(
    send: Send, status: int, content_type: str, body: bytes, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    named = [(b"content-type", content_type.encode()), (b"content-length", b"%d" % len(body)), *(headers or ())]
    await send({"type": "http.response.start", "status": status, "headers": named})
    await send({"type": "http.response.body", "body": body})
