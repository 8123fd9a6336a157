"""Event loop lag: distinguishes an engine's timeout from a shortage of CPU in this process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

TICK_S = 0.05
_WINDOW_S = 10.0


class LoopLag:
    """Periodic timer that adds up its own delays.

    On a starved machine an engine's answer may be in the socket when the timer that waits for it fires. All engines
    would then look dead at once, which would stop service exactly when it is slow.
    """

    def __init__(self) -> None:
        self._late: deque[tuple[float, float]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._clock: Callable[[], float] | None = None
        self._due_s = 0.0

    def open(self) -> None:
        """Start the timer; needs a running event loop."""
        loop = asyncio.get_running_loop()
        self._clock = loop.time
        self._due_s = loop.time() + TICK_S
        self._timer = loop.call_at(self._due_s, self._tick, loop)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def late_s(self, within_s: float) -> float:
        """Seconds of delay of the event loop within the last ``within_s`` seconds (at most 10)."""
        if self._clock is None:
            return 0.0
        now_s = self._clock()
        late_s = sum(late_s for at_s, late_s in self._late if at_s >= now_s - within_s)
        return late_s + max(0.0, now_s - self._due_s)

    def explains(self, bound_s: float) -> bool:
        """True if a timeout of ``bound_s`` may be caused by this process: the loop was late for half of that time."""
        return self.late_s(bound_s) > min(bound_s, _WINDOW_S) / 2

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        now_s = loop.time()
        if now_s - self._due_s > TICK_S:
            self._late.append((now_s, now_s - self._due_s))
        while self._late and self._late[0][0] < now_s - _WINDOW_S:
            self._late.popleft()
        self._due_s = now_s + TICK_S
        self._timer = loop.call_at(self._due_s, self._tick, loop)
