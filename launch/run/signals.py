"""Run a coroutine until it ends or a signal does: SIGINT, SIGTERM and SIGHUP cancel it once, its clean-up runs."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_until_signal(
    main: Coroutine[Any, Any, int],
    on_second: Callable[[], None] = lambda: None,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> int:
    """Exit code of the coroutine, or 128 + the number of the signal that ended it (130 for Ctrl-C).

    Only the first signal cancels. Further ones call ``on_second``, to hurry the clean-up; it is never cut short, since
    that would leave processes behind.
    """
    received: list[int] = []

    async def cancellable() -> int:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def on_signal(signum: int) -> None:
            received.append(signum)
            if len(received) == 1:
                task.cancel()
            else:
                on_second()

        # With SIGHUP ignored (nohup) the process must outlive the terminal.
        wanted = [
            signum for signum in _SIGNALS if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN
        ]
        for signum in wanted:
            loop.add_signal_handler(signum, on_signal, signum)
        try:
            return await main
        finally:
            for signum in wanted:
                loop.remove_signal_handler(signum)

    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(cancellable())
    except (asyncio.CancelledError, KeyboardInterrupt):
        return 128 + (received[0] if received else signal.SIGINT)
