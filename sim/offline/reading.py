"""A trace read by a separate process, so that decoding it takes no time from the simulation's core."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from replayer.replay.plan import chosen_turns, first_turns
from replayer.traces.loading import LoadOptions, TraceStream, stream, stream_sessions
from replayer.traces.trace import TraceError, TraceRequest

BATCH = 64
"""Requests per message: 300 KB at 33k-token prompts."""
JOIN_S = 5.0


@contextmanager
def read_apart(path: Path, options: LoadOptions, request_limit: int | None = None) -> Iterator[TraceStream]:
    """`replayer.traces.loading.stream` with the reading done by a child process; it ends with the context.

    With a ``request_limit`` the child reads the trace twice, first to find which sessions fit it: where a session ends
    is known only at the end of the file.

    The child is as far ahead as a pipe holds, so memory stays bounded. Notes are those known before the first request.

    Raises:
        TraceError: on entering, and while requests are taken: errors of the reading process.
    """
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(
        target=_read, args=(sending, path, options, request_limit), name="trace-reader", daemon=True
    )
    try:
        child.start()
        sending.close()
        opened = _received(receiving, path)
        if not isinstance(opened, TraceStream):
            raise TraceError(f"{path}: the reading process sent no trace")
        opened.requests = _requests(receiving, path)
        yield opened
    finally:
        receiving.close()
        if child.pid is not None:
            child.terminate()
            child.join(JOIN_S)
            if child.exitcode is None:
                child.kill()
                child.join()
        child.close()


def _requests(receiving: Connection, path: Path) -> Iterator[TraceRequest]:
    while batch := _received(receiving, path):
        assert isinstance(batch, list)
        yield from batch


def _received(receiving: Connection, path: Path) -> object:
    try:
        item: object = pickle.loads(receiving.recv_bytes())
    except EOFError as error:
        raise TraceError(f"{path}: the reading process died; is there enough memory?") from error
    if isinstance(item, TraceError):
        raise item
    if isinstance(item, OSError):
        raise item
    return item


def _read(sending: Connection, path: Path, options: LoadOptions, request_limit: int | None) -> None:
    """Child process: send the stream's header, then its requests in batches, then an empty batch; or the error."""
    try:
        opened = stream(path, options)
        requests, opened.requests = opened.requests, iter(())
        if request_limit is not None:
            chosen, opened.cut_session = chosen_turns(stream_sessions(path, options), request_limit)
            requests = first_turns(requests, chosen)
        _send(sending, opened)
        batch: list[TraceRequest] = []
        for request in requests:
            batch.append(request)
            if len(batch) == BATCH:
                _send(sending, batch)
                batch = []
        if batch:
            _send(sending, batch)
        _send(sending, [])
    except (TraceError, OSError) as error:
        if not isinstance(error, BrokenPipeError):  # else the parent has stopped reading
            _send(sending, error)
    except KeyboardInterrupt:
        pass  # the parent gets the signal too, and ends this process
    finally:
        sending.close()


def _send(sending: Connection, item: object) -> None:
    try:
        sending.send_bytes(pickle.dumps(item, pickle.HIGHEST_PROTOCOL))
    except BrokenPipeError:
        raise SystemExit(0) from None
