"""Pulls that were given up, kept open until it is safe to close them.

Closing a D leg that D still has queued ends vLLM 0.18.1's engine core, and all it was doing with it: its scheduler is
told of KV received for a request it no longer knows. After the first byte, or once the pull has begun, closing is an
ordinary abort. The proxy cannot see which of the two it is, so it waits for the first byte, within a bound.
"""

from __future__ import annotations

import asyncio
import logging

from policies.holds import Hold
from proxy.engines.upstream import Answer
from proxy.errors import AttemptFailedError
from proxy.handoff.leaks import LeakWatch

log = logging.getLogger("warmroute.abandoned")

Pulling = asyncio.Future[tuple[Answer, bytes]]


class AbandonedPulls:
    """Owns D legs nobody waits for any more; each ends by its first byte, its failure or the bound."""

    def __init__(self, leaks: LeakWatch, bound_s: float) -> None:
        self._leaks = leaks
        self._bound_s = bound_s
        self._waiting: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def apply(self, bound_s: float) -> None:
        """Take over another bound, for pulls that are given up from now on."""
        self._bound_s = bound_s

    def adopt(self, decode: str, pulling: Pulling, hold: Hold) -> None:
        """Take over a D leg that was given up; ``hold`` is the room it takes on D meanwhile."""
        task = asyncio.create_task(self._see_off(decode, pulling, hold), name=f"abandoned-pull-{decode}")
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def close(self, grace_s: float) -> None:
        """Wait for what is left, at most ``grace_s``, then cut it."""
        if not self._waiting:
            return
        _, late = await asyncio.wait(self._waiting, timeout=grace_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def _see_off(self, decode: str, pulling: Pulling, hold: Hold) -> None:
        try:
            async with asyncio.timeout(self._bound_s):
                answer, _ = await pulling
            answer.close()
        except AttemptFailedError as error:
            log.debug("a pull on %s that was given up has failed: %s", decode, error)
            if error.timed_out:
                # The leg's own bound ends with this one, or a moment earlier.
                self._leaks.abandoned(decode)
        except TimeoutError:
            # It never got its KV: such a request keeps its blocks on D.
            self._leaks.abandoned(decode)
        finally:
            hold.release()
            pulling.cancel()
            await asyncio.gather(pulling, return_exceptions=True)
