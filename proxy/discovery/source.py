"""Interface of a source of instances."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import NamedTuple, Protocol

from proxy.settings import InstanceSettings, TakenAddresses


class DiscoveryError(Exception):
    """A reading that failed: the reason and, where known, the remedy; its readers put the source's `origin` first."""


class Wanted(NamedTuple):
    """The complete set of instances that a source wants in the fleet."""

    instances: tuple[InstanceSettings, ...] = ()
    """Names and URLs are distinct."""
    problems: tuple[str, ...] = ()
    """Reasons for which entries were left out."""


class InstanceSource(Protocol):
    """Origin of a changing set of instances."""

    @property
    def origin(self) -> str:
        """Description for logs, such as ``file fleet.yaml``."""

    def sets(self) -> AsyncGenerator[Wanted, None]:
        """Yield the complete set now, and again after each change; equal sets may be repeated.

        Every wait inside is bounded by the source's settings. After an error the generator is abandoned and a new one
        starts from the complete set; the caller pauses in between.

        Raises:
            DiscoveryError: a reading failed.
        """


def next_pause(pause_s: float, first_s: float, longest_s: float, *, steady: bool) -> float:
    """The pause before the next attempt, in seconds: short after a steady one, else twice the one before.

    Args:
        pause_s: the pause before the attempt that has just ended; 0: there was none.
        first_s: the pause after a steady attempt, and the first of all.
        longest_s: bound on pauses.
        steady: the attempt succeeded, for longer than it takes to fail.
    """
    return min(longest_s, first_s if steady or not pause_s else 2 * pause_s)


def distinct(instances: list[InstanceSettings], problems: list[str]) -> Wanted:
    """A set of all their ranks, without entries whose name or URL an earlier one has; each left out is a problem."""
    kept: list[InstanceSettings] = []
    taken = TakenAddresses()
    for each in (rank for instance in instances for rank in instance.ranks()):
        if taken.holder(each) is not None:
            problems = [*problems, f"{each.name} ({each.url}): its name or URL occurs twice"]
            continue
        taken.add(each)
        kept.append(each)
    return Wanted(tuple(kept), tuple(problems))


async def polled(
    read: Callable[[], Awaitable[Wanted]], interval_s: float, timeout_s: float
) -> AsyncGenerator[Wanted, None]:
    """Readings of a source without notifications.

    Args:
        read: one reading; raises DiscoveryError.
        interval_s: pause between two readings, in seconds.
        timeout_s: bound on one reading, in seconds.

    Raises:
        DiscoveryError: a reading failed, or had no result in time.
    """
    while True:
        try:
            async with asyncio.timeout(timeout_s):
                wanted = await read()
        except TimeoutError as error:
            raise DiscoveryError(f"no result within {timeout_s:g} s (discovery.timeout_s)") from error
        yield wanted
        await asyncio.sleep(interval_s)
