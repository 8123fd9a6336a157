"""Hostile clients of one slice, in a process of their own, so that their work does not delay polite ones'.

``python -m bench.soak.hostile ORDER``: attacks for a time, then prints the counts as JSON.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter

import msgspec

from bench.soak.attacks import KINDS, LONGER_PATIENCE_S, Attack
from bench.soak.wire import PATIENCE_S, AnsweredError, Wire

SILENT = "no answer"
LEFT = "left"
ENDED = "still open at the end"

HostileCounts = dict[str, dict[str, int]]
"""Ends by kind: a status, ``closed``, ``left`` on purpose, ``no answer`` in time."""


class HostileOrder(msgspec.Struct, frozen=True):
    """Work of the hostile clients in one slice."""

    port: int
    seconds: float
    per_s: float
    """Attacks begun per second."""
    workers: int
    """Most attacks at a time; one more is left out."""
    body_bytes: int
    """The proxy's limit on bodies."""
    seed: str


class HostileClients:
    """A bounded pool of hostile clients."""

    def __init__(self, order: HostileOrder) -> None:
        self._order = order
        self._draw = random.Random(order.seed)
        self._free = asyncio.Semaphore(order.workers)
        self.counts: dict[str, Counter[str]] = {attack.__name__: Counter() for attack in KINDS}

    async def run(self) -> None:
        """Attack at random moments until the time is over; what is open then is cut."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._order.seconds
        attacks: set[asyncio.Task[None]] = set()
        try:
            while (now_s := loop.time()) < end_s:
                await asyncio.sleep(min(self._draw.expovariate(self._order.per_s), end_s - now_s))
                attack = self._draw.choices(list(KINDS), list(KINDS.values()))[0]
                if not self._free.locked():
                    await self._free.acquire()
                    task = asyncio.create_task(self._attack(attack, random.Random(self._draw.random())))
                    attacks.add(task)
                    task.add_done_callback(attacks.discard)
        finally:
            for task in attacks:
                task.cancel()
            await asyncio.gather(*attacks, return_exceptions=True)

    async def _attack(self, attack: Attack, draw: random.Random) -> None:
        end = ENDED
        try:
            end = await self._ended(attack, draw)
        finally:
            self.counts[attack.__name__][end] += 1
            self._free.release()

    async def _ended(self, attack: Attack, draw: random.Random) -> str:
        try:
            async with (
                asyncio.timeout(LONGER_PATIENCE_S.get(attack, PATIENCE_S)),
                Wire(self._order.port, self._order.body_bytes) as wire,
            ):
                try:
                    if await attack(wire, draw):
                        return LEFT
                except AnsweredError:
                    pass
                return await wire.status()
        except TimeoutError:
            return SILENT
        except (ConnectionError, asyncio.LimitOverrunError, ValueError):
            return "closed"


async def hostile_slice(order: HostileOrder) -> HostileCounts:
    """Run one slice in a process of its own; the counts.

    Raises:
        RuntimeError: the process ended with an error.
    """
    argument = msgspec.json.encode(order).decode()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.soak.hostile", argument, stdout=asyncio.subprocess.PIPE
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise RuntimeError(f"the hostile clients ended with {process.returncode}")
    return msgspec.json.decode(output, type=HostileCounts)


def main() -> None:
    """Run the order of the command line."""
    clients = HostileClients(msgspec.json.decode(sys.argv[1].encode(), type=HostileOrder))
    asyncio.run(clients.run())
    sys.stdout.buffer.write(msgspec.json.encode(clients.counts))


if __name__ == "__main__":
    main()
