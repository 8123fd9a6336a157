"""How late the event loop is: whether a time-out says something of an engine, or only of this process's want of CPU."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

TICK_S = 0.05
_WINDOW_S = 10.0


class LoopLag:
    """Ticks while it is open and adds up by how much the ticks came late.

    On a starved machine an engine's answer may lie in the socket while the timer that waited for it goes off. Every
    engine then looks dead at once, which would end service just when it is slow.
    """

    def __init__(self) -> None:
        self._late: deque[tuple[float, float]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._clock: Callable[[], float] | None = None
        self._due_s = 0.0

    def open(self) -> None:
        """Begin to tick; needs a running event loop."""
        loop = asyncio.get_running_loop()
        self._clock = loop.time
        self._due_s = loop.time() + TICK_S
        self._timer = loop.call_at(self._due_s, self._tick, loop)

    def close(self) -> None:
        """Stop ticking."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def late_s(self, within_s: float) -> float:
        """Of the last ``within_s`` seconds (10 at most), those in which the loop was not on time."""
        if self._clock is None:
            return 0.0
        now_s = self._clock()
        late_s = sum(late_s for at_s, late_s in self._late if at_s >= now_s - within_s)
        return late_s + max(0.0, now_s - self._due_s)

    def explains(self, bound_s: float) -> bool:
        """Whether a wait that took over ``bound_s`` may be this process's own fault: it was late half of that time."""
        return self.late_s(bound_s) > min(bound_s, _WINDOW_S) / 2

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        now_s = loop.time()
        if now_s - self._due_s > TICK_S:
            self._late.append((now_s, now_s - self._due_s))
        while self._late and self._late[0][0] < now_s - _WINDOW_S:
            self._late.popleft()
        self._due_s = now_s + TICK_S
        self._timer = loop.call_at(self._due_s, self._tick, loop)
