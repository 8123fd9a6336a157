"""A worker's own endpoints on its Unix socket, where the others ask it. The folder of the socket is its guard."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator
from urllib.parse import urlsplit

from proxy.access.guard import Application, Receive, Scope, Send
from proxy.admin_listener import served
from proxy.clients.bounds import ClientBounds
from proxy.core import Core
from proxy.gather.families import encode_families, encode_part, families_of
from proxy.gather.gather import METRICS
from proxy.gather.peers import ADMIN_KEY, READ_S, Peers
from proxy.gather.place import Place
from proxy.sharing.frames import Listed, Question, Shown

log = logging.getLogger("warmroute.workers")

_REPLAY_S = 60.0


class Inner:
    """ASGI application of the socket: endpoints, with the admin key that another worker has checked, and metrics."""

    def __init__(self, app: Application, core: Core, place: Place) -> None:
        self._app = app
        self._core = core
        self._place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry point."""
        if scope["type"] == "http":
            if scope["path"] == METRICS:
                await self._metrics(send)
                return
            key = dict(scope["headers"]).get(ADMIN_KEY.encode())
            scope.setdefault("state", {})["admin_key"] = None if key is None else key.decode("latin-1")
        await self._app(scope, receive, send)

    async def _metrics(self, send: Send) -> None:
        core = self._core
        found = list(families_of(core.metrics.collect(core.router, core.instances, core.events, time.monotonic())))
        # Before they are shown: whatever was, stays counted after the end of this process.
        self._place.line.send(Shown(encode_families(each for each in found if each.adds_up)))
        body = encode_part(os.getpid(), found)
        headers = [(b"content-type", b"application/msgpack"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def listed(app: Application, core: Core, place: Place, peers: Peers) -> AsyncIterator[None]:
    """Answer the other workers in the context, with the changes that they have already.

    Raises:
        OSError: the socket cannot be bound.
        LineError: the parent is gone.
    """
    path = place.socket(place.number)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    async with served(Inner(app, core, place), ClientBounds(core.settings), listener):
        async with place.changing():
            with _repeating(core):
                await _catch_up(place, peers)
            place.line.send(Listed())
            await place.roster()  # the parent has read it
        yield


@contextlib.contextmanager
def _repeating(core: Core) -> Iterator[None]:
    """Removals in the context are earlier ones, which end no drain mark that was given since."""
    drains = None if core.sharing is None else core.sharing.drains
    if drains is None:
        yield
        return
    drains.repeating = True
    try:
        yield
    finally:
        drains.repeating = False


async def _catch_up(place: Place, peers: Peers) -> None:
    """Apply what was changed over HTTP since the parent started."""
    for change in (await place.line.ask(Question.CHANGES)).changes:
        headers = {"content-type": "application/json"}
        if change.admin_key is not None:
            headers[ADMIN_KEY] = change.admin_key
        target = change.target
        if change.method == "DELETE":
            target += ("&" if "?" in target else "?") + "wait=false"
        answer = await peers.ask_one(place.number, change.method, target, headers, change.body, _REPLAY_S + READ_S)
        shown = urlsplit(change.target).path
        if answer is None or not answer.ok:
            # Such as an instance that was added, and removed again later.
            status = "no answer" if answer is None else str(answer.status)
            log.info("%s %s, as changed earlier: %s", change.method, shown, status)
        else:
            log.info("%s %s applied, as changed earlier", change.method, shown)
