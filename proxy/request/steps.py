"""Work in steps: at once for small bodies, with the event loop serving others in between for large ones."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TypeVar

_Result = TypeVar("_Result")

Steps = Generator[None, None, _Result]
"""Work that yields after every few milliseconds and returns its result."""


def at_once(steps: Steps[_Result]) -> _Result:
    """Run all steps without a pause."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: _Result = end.value
            return result


class Lane:
    """Runs the steps of one large body at a time, so that many of them cost the loop no more per turn than one."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self.steps = 0
        """Steps run so far."""

    async def run(self, steps: Steps[_Result]) -> _Result:
        """Run the steps, one per turn of the event loop."""
        async with self._lock:
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    result: _Result = end.value
                    return result
                self.steps += 1
                await asyncio.sleep(0)
