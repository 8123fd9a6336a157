"""Control traffic: abandoned queries, endless answers, late answers."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import httpx
import pytest

from proxy.engines.control import Control


@contextlib.asynccontextmanager
async def engine() -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if b"/hang" in head:
                    await reader.read()
                    break
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n")
                if b"/half" in head:
                    writer.write(b"h")
                    await reader.read()
                    break
                writer.write(b"hi")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@pytest.fixture
async def control() -> AsyncIterator[Control]:
    control = Control(0.5)
    yield control
    await control.aclose()


async def test_questions_that_were_given_up_do_not_use_the_connections_up() -> None:
    async def given_up(path: str) -> None:
        """Ask an engine of its own by connections of its own."""
        draw = random.Random(1)
        async with engine() as url, contextlib.aclosing(Control(0.5)) as control:
            for number in range(120):
                asking = [asyncio.create_task(control.get(url + path)) for _ in range(4)]
                await asyncio.sleep(0.01 * draw.random())  # while it connects, while it waits
                for task in asking:
                    task.cancel()
                await asyncio.gather(*asking, return_exceptions=True)
                if number % 20 == 0:
                    await asyncio.sleep(0.6)
            await asyncio.sleep(0.6)
            assert (await control.get(f"{url}/ok")).content == b"hi", path

    async with asyncio.TaskGroup() as group:
        for path in ("/hang", "/half", "/ok"):
            group.create_task(given_up(path))


@pytest.mark.parametrize("path", ["/hang", "/half"])
async def test_an_answer_that_does_not_come_or_end_is_a_timeout(control: Control, path: str) -> None:
    async with engine() as url:
        with pytest.raises(httpx.TimeoutException):
            await control.get(url + path)


async def test_a_refused_connection_is_an_error(control: Control) -> None:
    async with engine() as url:
        pass
    with pytest.raises(httpx.ConnectError):
        await control.get(url)
