"""The clients of a run: each sends one request at a time, sometimes disconnects, and checks every byte of its
answers."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from bench.soak.phases import SliceKind, SliceTally, kind_at
from bench.soak.plan import POLITE_KEY, SoakPlan
from bench.soak.requests import KnownRequest, text_of_choice

REFUSALS = {429, 502, 503, 504}
"""Statuses of failures that a client may retry."""


class WrongAnswerError(Exception):
    """An answer that differs from the expected one."""


@dataclass
class Seen:
    """Results that the clients counted."""

    ends: Counter[str] = field(default_factory=Counter)
    """``ok``, ``left``, ``broken`` (reported by an error event), ``refused`` (reported by a status), wrong ones by
    kind."""
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    finished_ids: set[str] = field(default_factory=set)
    left_ids: set[str] = field(default_factory=set)
    """Requests whose clients disconnected, perhaps before the proxy had the head of the request."""
    phases: dict[SliceKind, SliceTally] = field(default_factory=lambda: {phase: SliceTally() for phase in SliceKind})
    """Of requests whose clients stay."""
    sent: int = 0
    events: int = 0
    answer_bytes: int = 0


class Clients:
    """``plan.streams`` workers that send requests."""

    def __init__(self, url: str, known: list[KnownRequest], plan: SoakPlan) -> None:
        self._url = url
        self._known = known
        self._plan = plan
        self._ending = asyncio.Event()
        self._started_s = 0.0
        self.seen = Seen()

    async def run(self, duration_s: float) -> None:
        """Send for ``duration_s`` seconds, then wait for the requests in flight."""
        timeout = aiohttp.ClientTimeout(total=180)
        connector = aiohttp.TCPConnector(limit=0)
        self._started_s = time.perf_counter()
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session, asyncio.TaskGroup() as group:
            for number in range(self._plan.streams):
                group.create_task(self._worker(session, number))
            await asyncio.sleep(duration_s)
            self._ending.set()

    async def _worker(self, session: aiohttp.ClientSession, number: int) -> None:
        draw = random.Random(f"{self._plan.seed}-{number}")
        sent = 0
        while not self._ending.is_set():
            request_id = f"{self._plan.polite_prefix}{number}-{sent}"
            sent += 1
            self.seen.sent += 1
            leaves = draw.random() < self._plan.leave_share
            known, stream = draw.choice(self._known), draw.random() < self._plan.stream_share
            visit = self._visit(session, known, request_id, stream, None if leaves else self._tally())
            if leaves:
                await self._leave(visit, request_id, draw.uniform(0.0, 1.5))
                continue
            end = await visit
            self.seen.finished_ids.add(request_id)
            self.seen.ends[end] += 1
            if end == "refused":
                await asyncio.sleep(draw.uniform(0.2, 0.6))

    def _tally(self) -> SliceTally | None:
        phase = kind_at(self._plan, time.perf_counter() - self._started_s)
        return None if phase is None else self.seen.phases[phase]

    async def _leave(self, visit: Coroutine[Any, Any, str], request_id: str, after_s: float) -> None:
        task = asyncio.create_task(visit)
        done, _ = await asyncio.wait({task}, timeout=after_s)
        if done:
            self.seen.finished_ids.add(request_id)
            self.seen.ends[task.result()] += 1
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self.seen.left_ids.add(request_id)
        self.seen.ends["left"] += 1

    async def _visit(
        self,
        session: aiohttp.ClientSession,
        known: KnownRequest,
        request_id: str,
        stream: bool,
        tally: SliceTally | None,
    ) -> str:
        headers = {
            "x-request-id": request_id,
            "x-session-id": known.session_id,
            "authorization": f"Bearer {POLITE_KEY}",
        }
        body = {**known.body, "stream": True} if stream else known.body
        tally = tally or SliceTally()
        tally.requests += 1
        sent_s = time.perf_counter()
        try:
            async with session.post(self._url + known.path, json=body, headers=headers) as answer:
                self.seen.statuses[answer.status] += 1
                if answer.headers.get("x-request-id") != request_id:
                    raise WrongAnswerError(f"answered as {answer.headers.get('x-request-id')!r}")
                if answer.status != 200:
                    tally.refused += 1
                    return _refused(answer.status, await answer.read())
                if stream:
                    return await self._read_stream(answer, known.text, tally, sent_s)
                return self._check_whole(await answer.read(), known.text)
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            return self._wrong(request_id, "cut without an error event", repr(error))
        except (WrongAnswerError, msgspec.DecodeError, KeyError, IndexError) as error:
            return self._wrong(request_id, "wrong answer", repr(error))

    def _wrong(self, request_id: str, kind: str, what: str) -> str:
        if len(self.seen.wrong) < 50:
            self.seen.wrong.append(f"{request_id}: {kind}: {what}")
        return kind

    def _check_whole(self, content: bytes, expected: str) -> str:
        self.seen.answer_bytes += len(content)
        answer = msgspec.json.decode(content)
        if text_of_choice(answer["choices"][0]) != expected:
            raise WrongAnswerError(f"text {content[:300]!r}, expected {expected[:200]!r}")
        return "ok"

    async def _read_stream(
        self, answer: aiohttp.ClientResponse, expected: str, tally: SliceTally, sent_s: float
    ) -> str:
        """``ok`` for the whole expected text and [DONE]; ``broken`` for a prefix of it and an error event."""
        held, text, end = b"", "", ""
        first = True
        async for piece in answer.content.iter_any():
            self.seen.answer_bytes += len(piece)
            *events, held = (held + piece).split(b"\n\n")
            if first and events:
                first = False
                tally.ttft_s.append(time.perf_counter() - sent_s)
            for event in events:
                if end:
                    raise WrongAnswerError(f"after its end: {event[:200]!r}")
                self.seen.events += 1
                addition, end = _read_event(event)
                text += addition
                if not expected.startswith(text):
                    raise WrongAnswerError(f"text {text[-200:]!r} of {expected[:400]!r}")
        if held:
            raise WrongAnswerError(f"ends inside an event: {held[:200]!r}")
        if not end:
            raise WrongAnswerError(f"a stream without [DONE] or error event, {len(text)} of {len(expected)} characters")
        if end == "ok" and text != expected:
            raise WrongAnswerError(f"[DONE] after {len(text)} of {len(expected)} characters")
        return end


def _read_event(event: bytes) -> tuple[str, str]:
    """(text of the event, end of the stream: empty for none, ``ok`` or ``broken``)"""
    if not event.startswith(b"data: "):
        raise WrongAnswerError(f"not an event: {event[:200]!r}")
    content = event[6:]
    if content == b"[DONE]":
        return "", "ok"
    decoded = msgspec.json.decode(content)
    if "error" in decoded:
        if set(decoded["error"]) != {"message", "type", "param", "code"}:
            raise WrongAnswerError(f"an error of an unexpected format: {content[:200]!r}")
        return "", "broken"
    if not decoded["choices"]:
        raise WrongAnswerError(f"a usage event that was not requested: {content[:200]!r}")
    return text_of_choice(decoded["choices"][0]), ""


def _refused(status: int, content: bytes) -> str:
    error = msgspec.json.decode(content)["error"]
    if status not in REFUSALS or not error["message"]:
        raise WrongAnswerError(f"status {status}: {content[:300]!r}")
    return "refused"
