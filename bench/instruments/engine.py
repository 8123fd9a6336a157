"""All that an instrument sees of an engine: generate tokens, prefill for another engine, report its state.

Times are readings of one clock (``MeasuredEngine.now_s``), in seconds. The tests implement `MeasuredEngine` in virtual
time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

OnTokens = Callable[[int, float], None]
"""(tokens, time) of one event with output."""

SETTLE_TIMEOUT_S = 60.0
_POLL_S = 0.05


class InstrumentError(Exception):
    """A measurement that cannot be made or has failed; the message says why, and the remedy."""


class BusyFleetError(InstrumentError):
    """Engines that run or hold requests of somebody else."""


class Generated(msgspec.Struct, kw_only=True):
    """One finished answer."""

    sent_s: float
    first_s: float
    """Time of the first token."""
    finished_s: float
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens that the engine did not compute; None: not reported."""
    text: str = ""

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.first_s - self.sent_s


class Prefilled(NamedTuple):
    """A P leg that has ended."""

    sent_s: float
    finished_s: float
    decode_params: Mapping[str, Any]
    """``kv_transfer_params`` of the D leg."""


class EngineReport(msgspec.Struct, kw_only=True):
    """State and counters that an engine reports of itself; None: it does not report the value."""

    running: int = 0
    waiting: int = 0
    pool_tokens: int | None = None
    external_tokens: float | None = None
    """Prompt tokens so far whose KV came from another engine."""
    queue_s: float | None = None
    """Sum over all requests so far of the time in its queue."""
    prefill_s: float | None = None
    """The same of the time in prefill."""


class MeasuredEngine(Protocol):
    """One engine under measurement."""

    name: str

    def now_s(self) -> float:
        """The clock of every time in this module."""
        ...

    async def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        transfer: Mapping[str, Any] | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Generated:
        """Generate exactly ``max_tokens`` tokens; cancelling it ends the request on the engine.

        Args:
            prompt: token ids.
            max_tokens: at least 1.
            transfer: ``kv_transfer_params``, for the D leg of a hand-off.
            on_tokens: called for each event as it arrives.

        Raises:
            InstrumentError: the engine refused it, failed, or was late.
        """
        ...

    async def prefill(self, prompt: Sequence[int]) -> Prefilled:
        """The P leg of a hand-off.

        Raises:
            InstrumentError: the engine has no connector, refused it, failed, or was late.
        """
        ...

    async def report(self) -> EngineReport:
        """The engine's state now.

        Raises:
            InstrumentError: it does not answer.
        """
        ...


async def refuse_busy(engines: Iterable[MeasuredEngine]) -> None:
    """Check that no engine has a request.

    Raises:
        BusyFleetError: one has.
        InstrumentError: one does not answer.
    """
    busy = []
    for engine in engines:
        report = await engine.report()
        if report.running or report.waiting:
            busy.append(f"{engine.name}: {report.running} running, {report.waiting} waiting")
    if busy:
        raise BusyFleetError(
            f"the fleet is busy ({'; '.join(busy)}): measured times would be those of the other load. Stop it, or wait."
        )


async def until_idle(engines: Iterable[MeasuredEngine]) -> None:
    """Wait until the engines have ended what the last measurement left: streams that were cut.

    Raises:
        BusyFleetError: one is still busy after ``SETTLE_TIMEOUT_S``.
    """
    chosen = list(engines)
    try:
        async with asyncio.timeout(SETTLE_TIMEOUT_S):
            while True:
                try:
                    await refuse_busy(chosen)
                    return
                except BusyFleetError:
                    await asyncio.sleep(_POLL_S)
    except TimeoutError:
        await refuse_busy(chosen)
