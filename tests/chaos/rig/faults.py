"""The faults by name. A fault at a moment sends a good answer up to that moment, then misbehaves."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from enum import StrEnum

from tests.chaos.rig.engine import Fault, Talk
from tests.chaos.rig.wire import LAST_CHUNK, Answer, chunk, head, whole


class Moment(StrEnum):
    """Progress of an answer before the fault."""

    BEFORE_HEADERS = "before headers"
    BEFORE_FIRST_BYTE = "before first byte"
    MID_STREAM = "mid-stream"
    AT_END = "at the end"
    """All of the body is sent, but not the end of its framing: the terminating chunk."""


Act = Callable[[Talk], Awaitable[None]]


def sent_before(answer: Answer, moment: Moment) -> list[bytes]:
    """The parts of an answer that are sent before the moment."""
    return {
        Moment.BEFORE_HEADERS: [],
        Moment.BEFORE_FIRST_BYTE: [answer.head],
        Moment.MID_STREAM: [answer.head, *answer.parts[: max(1, len(answer.parts) // 2)]],
        Moment.AT_END: [answer.head, *answer.parts],
    }[moment]


def at(moment: Moment, act: Act) -> Fault:
    """Run ``act`` once a good answer has reached ``moment``."""

    async def fault(talk: Talk) -> None:
        answer = talk.answer("chunked" if moment is Moment.AT_END else "")
        for part in sent_before(answer, moment):
            await talk.send(part)
            await asyncio.sleep(0.002)
        await act(talk)

    return fault


def rest(answer: Answer, moment: Moment) -> bytes:
    """The parts that ``sent_before`` leaves out."""
    return answer.bytes[len(b"".join(sent_before(answer, moment))) :]


def trickle(moment: Moment) -> Fault:
    """Slow but alive: one byte at a time from the moment on."""

    async def fault(talk: Talk) -> None:
        answer = talk.answer()
        for part in sent_before(answer, moment):
            await talk.send(part)
        for byte in rest(answer, moment):
            await talk.send(bytes((byte,)))

    return fault


async def hang(talk: Talk) -> None:
    """No further byte, connection open."""
    await talk.hang()


async def close(talk: Talk) -> None:
    """FIN."""
    await talk.close()


async def rst(talk: Talk) -> None:
    """RST."""
    await talk.reset()


async def garbage(talk: Talk) -> None:
    """Bytes that are neither HTTP nor a chunk, then FIN."""
    await talk.send(b"\x16\x03\x01\x00\xff\x00\r\n\r\n<<<not http>>>\r\n\r\n")
    await talk.close()


async def ends(talk: Talk) -> None:
    """A well-formed end of the chunks."""
    await talk.send(LAST_CHUNK)


async def dies(talk: Talk) -> None:
    """The process dies and nothing listens on the port."""
    await asyncio.sleep(0.03)  # as in ``Talk.reset``
    talk.engine.die()
    talk.open = False


async def huge_chunk_size(talk: Talk) -> None:
    """A chunk size past 64 bits."""
    await talk.send(b"f" * 40 + b"\r\n")
    await talk.hang()


async def negative_chunk_size(talk: Talk) -> None:
    """A chunk size with a sign."""
    await talk.send(b"-5\r\nhello\r\n")
    await talk.hang()


async def unterminated_chunk(talk: Talk) -> None:
    """More data in a chunk than its size."""
    await talk.send(b"3\r\nhello\r\n")
    await talk.hang()


async def restart(talk: Talk) -> None:
    """The process dies and another one listens on the port."""
    await talk.reset()
    engine = talk.engine
    engine.engine_id, engine.started_unix_s = "another life", engine.started_unix_s + 1


def answers(status: str, *lines: str, body: bytes = b'{"error":{"message":"as reported","type":"stub"}}') -> Fault:
    """A well-formed answer with another status."""

    async def fault(talk: Talk) -> None:
        await talk.send(whole(status, body, *lines))

    return fault


def bodiless(status: str) -> Fault:
    """A status that has no body by definition."""

    async def fault(talk: Talk) -> None:
        await talk.send(head(status))

    return fault


def with_head(edit: Callable[[bytes], bytes]) -> Fault:
    """A good answer with an edited head."""

    async def fault(talk: Talk) -> None:
        answer = talk.answer()
        answer.head = edit(answer.head)
        await talk.send(answer.bytes)

    return fault


def also(*lines: str) -> Fault:
    """A good answer with additional header lines."""
    extra = "".join(f"{line}\r\n" for line in lines).encode("latin-1")
    return with_head(lambda was: was[:-2] + extra + b"\r\n")


def preceded_by(status: str, *lines: str) -> Fault:
    """An interim answer first."""
    return with_head(lambda was: head(status, *lines) + was)


def framed(framing: str) -> Fault:
    """A good answer with another framing; closes the connection if the framing requires it."""

    async def fault(talk: Talk) -> None:
        await talk.send(talk.answer(framing).bytes)
        if framing == "close":
            await talk.close()

    return fault


async def closed_early(talk: Talk) -> None:
    """Half an HTTP/1.0 answer, which closing the connection ends."""
    answer = talk.answer("close")
    for part in (answer.head, *answer.parts[:3]):
        await talk.send(part)
    await talk.close()


def wrong_length(by: int) -> Fault:
    """``Content-Length`` off by this many bytes; too large a value ends in FIN."""

    async def fault(talk: Talk) -> None:
        answer = talk.answer("length")
        name, size = answer.head.rstrip().rsplit(b" ", 1)
        await talk.send(b"%b %d\r\n\r\n" % (name, int(size) + by) + b"".join(answer.parts))
        if by > 0:
            await talk.close()

    return fault


async def last_byte_missing(talk: Talk) -> None:
    """All but the last byte of the body, then FIN."""
    await talk.send(talk.answer("length").bytes[:-1])
    await talk.close()


async def says_close(talk: Talk) -> None:
    """``Connection: close``, followed by a close."""
    answer = talk.answer()
    await talk.send(answer.head[:-2] + b"connection: close\r\n\r\n" + b"".join(answer.parts) + answer.end)
    await talk.close()


async def endless_headers(talk: Talk) -> None:
    """Endless header lines."""
    await talk.send(b"HTTP/1.1 200 OK\r\n")
    for number in itertools.count():
        await talk.send(b"x-%d: " % number + b"a" * 4000 + b"\r\n")


async def drip_headers(talk: Talk) -> None:
    """Endless header lines, sent slowly."""
    await talk.send(b"HTTP/1.1 200 OK\r\n")
    for number in itertools.count():
        await talk.send(b"x-%d: a\r\n" % number)
        await asyncio.sleep(0.02)


async def two_answers(talk: Talk) -> None:
    """A good answer, and an unsolicited second one."""
    forged = whole("200 OK", b'{"id":"forged","choices":[],"usage":null}')
    await talk.send(talk.answer().bytes + forged)


async def half_an_event(talk: Talk) -> None:
    """Three and a half events, then RST."""
    answer = talk.answer()
    for part in (answer.head, *answer.parts[:3]):
        await talk.send(part)
    await talk.send(chunk(b'data: {"id": "x", "choi'))
    await talk.reset()


def raw_stream(pieces: list[bytes], *, pause_s: float = 0.0, end: bool = True) -> Fault:
    """A stream of exactly these pieces, one chunk each."""

    async def fault(talk: Talk) -> None:
        await talk.send(head("200 OK", "content-type: text/event-stream", "transfer-encoding: chunked"))
        for piece in pieces:
            await talk.send(chunk(piece))
            await asyncio.sleep(pause_s)
        if end:
            await talk.send(b"0\r\n\r\n")
        else:
            await talk.close()

    return fault
