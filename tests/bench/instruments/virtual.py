"""Simulated engines in virtual time, as the instruments see engines: exact times on any machine, without waiting."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from bench.instruments.engine import EngineReport, Generated, InstrumentError, OnTokens, Prefilled
from sim.core.content import token_bytes
from sim.core.engine import Engine
from sim.core.sequence import KvTransfer, Request
from sim.core.types import EngineConfig, TokenEvent
from sim.hardware import HardwareProfile, load_profile
from sim.virtual import VirtualFleet

T = TypeVar("T")
BLOCK = 64


class _VirtualSelector(selectors.DefaultSelector):
    """Instead of waiting, lets the fleet run until its next event or the loop's next timer."""

    def __init__(self, fleet: VirtualFleet, deliver: Callable[[str, TokenEvent], None]) -> None:
        super().__init__()
        self._fleet = fleet
        self._deliver = deliver

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        fleet = self._fleet
        until_s = math.inf if timeout is None else fleet.now_s + timeout
        next_s = fleet.next_s()
        if math.isinf(min(until_s, next_s)):
            raise RuntimeError("nothing will ever happen: a task waits for an event that no engine will send")
        # Steps that begin at the horizon are not run together: every token is an event of its own.
        for name, event in fleet.run(min(until_s, next_s)):
            self._deliver(name, event)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock is the fleet's."""

    def __init__(self, fleet: VirtualFleet, deliver: Callable[[str, TokenEvent], None]) -> None:
        self._fleet = fleet
        super().__init__(_VirtualSelector(fleet, deliver))

    def time(self) -> float:
        return self._fleet.now_s


class _Open:
    """A request in flight."""

    def __init__(self, sent_s: float, on_tokens: OnTokens | None) -> None:
        self.sent_s = sent_s
        self.first_s = 0.0
        self.on_tokens = on_tokens
        self.ended: asyncio.Future[TokenEvent] = asyncio.get_running_loop().create_future()


class VirtualEngine:
    """One simulated engine (`bench.instruments.engine.MeasuredEngine`)."""

    def __init__(self, lab: VirtualLab, name: str) -> None:
        self.name = name
        self._lab = lab

    def now_s(self) -> float:
        return self._lab.fleet.now_s

    async def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        transfer: Mapping[str, Any] | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Generated:
        request = self._request(prompt, max_tokens, None if transfer is None else KvTransfer(**transfer))
        opened = _Open(self.now_s(), on_tokens)
        event = await self._lab.send(self.name, request, opened)
        if event.finish_reason == "error":
            raise InstrumentError(f"{self.name}: the pull failed")
        return Generated(
            sent_s=opened.sent_s,
            first_s=opened.first_s,
            finished_s=event.time_s,
            prompt_tokens=len(prompt),
            cached_tokens=event.cached_tokens,
            text=str(request.output_offset),
        )

    async def prefill(self, prompt: Sequence[int]) -> Prefilled:
        request = self._request(prompt, 1, None)
        request = request._replace(kv_transfer=KvTransfer(do_remote_decode=True, transfer_id=request.request_id))
        opened = _Open(self.now_s(), None)
        event = await self._lab.send(self.name, request, opened)
        params = {
            "do_remote_prefill": True,
            "transfer_id": request.request_id,
            "remote_engine_id": self._engine.config.engine_id,
            "remote_bootstrap_addr": self.name,
        }
        return Prefilled(opened.sent_s, event.time_s, params)

    async def report(self) -> EngineReport:
        engine = self._engine
        return EngineReport(
            running=len(engine.scheduler.running),
            waiting=engine.waiting,
            pool_tokens=engine.config.num_blocks * engine.config.block_tokens,
            external_tokens=engine.counters.external_tokens,
        )

    @property
    def _engine(self) -> Engine:
        return self._lab.fleet.engines[self.name]

    def _request(self, prompt: Sequence[int], max_tokens: int, transfer: KvTransfer | None) -> Request:
        return Request.from_tokens(
            self._lab.next_id(), token_bytes(prompt), BLOCK, max_tokens=max_tokens, kv_transfer=transfer
        )


class VirtualLab:
    """Engines ``a``, ``b``, ... of one hardware profile, and a loop in their time."""

    def __init__(
        self, profile: HardwareProfile | str, engines: int = 1, transport: str | None = None, role: str = "kv_both"
    ) -> None:
        self.profile = profile if isinstance(profile, HardwareProfile) else load_profile(profile)
        seconds = self.profile.transport(transport).drawn("0")
        names = [chr(ord("a") + number) for number in range(engines)]
        self.fleet = VirtualFleet(
            {
                name: Engine(
                    EngineConfig(
                        num_blocks=self.profile.kv.pool_tokens // BLOCK,
                        block_tokens=BLOCK,
                        max_num_batched_tokens=self.profile.max_num_batched_tokens,
                        max_num_seqs=self.profile.max_num_seqs,
                        max_model_len=self.profile.max_model_len,
                        role=role,
                        engine_id=name,
                        kv_bytes_per_token=self.profile.kv.bytes_per_token,
                    ),
                    self.profile.timing,
                    seconds,
                )
                for name in names
            }
        )
        self.engines = [VirtualEngine(self, name) for name in names]
        self._open: dict[str, _Open] = {}
        self._count = 0

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in virtual time."""
        loop = VirtualLoop(self.fleet, self._deliver)
        try:
            return loop.run_until_complete(work)
        finally:
            loop.close()

    def next_id(self) -> str:
        self._count += 1
        return f"r{self._count}"

    async def send(self, engine: str, request: Request, opened: _Open) -> TokenEvent:
        self._open[request.request_id] = opened
        try:
            self.fleet.submit(engine, request)
            return await opened.ended
        except ValueError as error:
            raise InstrumentError(f"{engine}: {error}") from error
        finally:
            if not opened.ended.done() or opened.ended.cancelled():
                self.fleet.abort(engine, request.request_id)
            del self._open[request.request_id]

    def _deliver(self, _: str, event: TokenEvent) -> None:
        opened = self._open.get(event.request_id)
        if opened is None:
            return
        if event.first:
            opened.first_s = event.time_s
        if event.tokens and opened.on_tokens is not None:
            opened.on_tokens(event.tokens, event.time_s)
        if event.finish_reason is not None and not opened.ended.done():
            opened.ended.set_result(event)
