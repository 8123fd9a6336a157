"""SIGTERM and SIGHUP end a replay in order, as Ctrl-C does: its file is closed, and the command names `--resume`."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable

from replayer.records.runs import Run


async def until_signal(replay: Awaitable[Run]) -> Run:
    """Await a replay, which the first SIGTERM or SIGHUP cancels; a signal that is ignored (nohup) stays so.

    In another thread than the main one, where no signal arrives, it is only awaited.
    The handlers belong to the event loop: an exception that a handler raised could end in a protocol's callback, as the
    error of one request.

    Raises:
        SystemExit: one of them came; the exit code is 128 + the signal's number.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    received: list[int] = []

    def stop(signum: int) -> None:
        received.append(signum)
        if task is not None and len(received) == 1:
            task.cancel()

    main = threading.current_thread() is threading.main_thread()
    for each in (signal.SIGTERM, signal.SIGHUP) if main else ():
        if signal.getsignal(each) != signal.SIG_IGN:
            loop.add_signal_handler(each, stop, each)
    try:
        return await replay
    except asyncio.CancelledError:
        if received:
            raise SystemExit(128 + received[0]) from None
        raise
