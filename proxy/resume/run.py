"""Runs a resume: from the moment an engine's stream broke to the end of the client's stream, or to its error event."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

import msgspec

from policies.session import Routed
from policies.types import NoCandidateError, RequestView
from proxy.breakdown import Outcome, Row
from proxy.engines.upstream import Answer, UpstreamError
from proxy.errors import AttemptFailedError
from proxy.request.parse import Parsed
from proxy.request.stream_filter import StreamFilter
from proxy.request.usage import UsageFilter
from proxy.resume.continuation import Cut, StreamFailedError, StreamSoFar
from proxy.resume.plan import (
    ResumePlan,
    ResumeResult,
    body_to_send,
    continuation_body,
    plan_resume,
    wanted,
    where_to_cut,
)
from proxy.resume.splice import DivergedError, Seam
from proxy.settings import ResumeSettings

_DONE = b"data: [DONE]\n\n"


class Steps(Protocol):
    """What of an exchange a resume needs."""

    def refuse_again(self, tried: set[str]) -> ResumeResult | None:
        """Why no other instance may be asked; None: one may, and is counted as a retry."""
        ...

    async def route_again(self, request: RequestView, tried: set[str]) -> Routed:
        """Decide and count, among the instances not tried. Raises NoCandidateError."""
        ...

    async def open_again(self, routed: Routed, parsed: Parsed, body: bytes) -> tuple[Answer, bytes]:
        """Send and wait for the first byte. Raises AttemptFailedError."""
        ...

    async def relay_again(self, answer: Answer, first: bytes, keep: StreamFilter) -> None:
        """Relay to the engine's end of the stream. Raises UpstreamError."""
        ...

    def broken(self, instance: str, what: str) -> bytes:
        """Record a stream that broke; the event that would tell the client."""
        ...

    def model_tokens(self, model: str) -> int | None:
        """The model's context as its engines tell it."""
        ...


class Resuming:
    """One streamed request that shall outlive its engine. Made before it is sent; costs nothing once refused."""

    def __init__(self, settings: ResumeSettings, row: Row, parsed: Parsed, *, with_usage: bool) -> None:
        """``with_usage``: the proxy itself asks the engine for the usage event."""
        self._settings = settings
        self._row = row
        self._parsed = parsed
        plan = plan_resume(parsed, sampled=settings.sampled)
        self._plan = plan if isinstance(plan, ResumePlan) else None
        self._refused = plan if isinstance(plan, ResumeResult) else None
        self._with_usage = with_usage
        self._keep: StreamFilter = UsageFilter()
        self._so_far = StreamSoFar(keep_ids=self._plan is not None and self._plan.returns_ids)
        self.body = b""
        """The request as engines are sent it; empty: as it would be without a resume."""
        if self._plan is not None:
            self.body = body_to_send(parsed.body, self._plan, with_usage=with_usage)

    @classmethod
    def of(
        cls, settings: ResumeSettings, row: Row, parsed: Parsed, headers: dict[bytes, bytes], *, with_usage: bool
    ) -> Resuming | None:
        """One for this request, unless it is not streamed or not to be resumed."""
        if not parsed.stream or not wanted(settings, headers):
            return None
        return cls(settings, row, parsed, with_usage=with_usage)

    def watch(self, keep: StreamFilter) -> StreamFilter:
        """The filter that sees the stream, before ``keep`` does."""
        self._keep = keep
        return keep if self._plan is None else _Chain(self._so_far, keep)

    def check_end(self) -> None:
        """A stream that its engine ended without the end mark is broken. Raises StreamFailedError."""
        if self._plan is not None and self._so_far.readable and not self._so_far.done:
            raise StreamFailedError("ended without its end mark")

    @property
    def usage_unknown(self) -> bool:
        """Whether the answer was completed without an engine's word on its usage."""
        return self._row.resume == ResumeResult.COMPLETED and not self._so_far.usage_sent

    async def go_on(self, steps: Steps, request: RequestView, broke_on: str, closing: bytes) -> bytes:
        """Continue the answer elsewhere. Returns the last bytes of the client's stream; empty: it has them all.

        Args:
            steps: the exchange.
            request: as policies see it.
            broke_on: the instance whose stream broke.
            closing: the event that tells the client of that, if nothing can be done.
        """
        row = self._row
        tried = {broke_on}
        # The hand-off is over, and what is left of the answer is not heavy.
        request = request._replace(may_offload=False)
        for resumes in range(self._settings.max_resumes + 1):
            ending = self._ending()
            if ending is not None:
                return self._mended(ResumeResult.COMPLETED, ending)
            if resumes == self._settings.max_resumes:
                break
            cut = self._where_to_cut(steps)
            refused = cut if isinstance(cut, ResumeResult) else steps.refuse_again(tried)
            if refused is not None or isinstance(cut, ResumeResult):
                row.resume = refused
                break
            try:
                routed = await steps.route_again(request, tried)
            except NoCandidateError:
                row.resume = ResumeResult.NO_INSTANCE
                break
            instance = routed.decision.decode_on
            tried.add(instance)
            try:
                await self._take_up(steps, routed, cut)
            except AttemptFailedError as error:
                routed.commitment.retract(instance)
                row.attempts.append({"instance": instance, "error": str(error)})
                row.resume = ResumeResult.FAILED
            except DivergedError as error:
                # The engine is well: it only does not say what the first one said.
                row.attempts.append({"instance": instance, "error": f"diverged: {error}"})
                row.resume = ResumeResult.DIVERGED
                break
            except UpstreamError as error:
                closing = steps.broken(instance, str(error))
                row.resume = ResumeResult.EXHAUSTED
            else:
                return self._mended(ResumeResult.RESUMED, b"")
            finally:
                routed.commitment.release()
        return closing

    async def _take_up(self, steps: Steps, routed: Routed, cut: Cut) -> None:
        assert self._plan is not None
        row, instance = self._row, routed.decision.decode_on
        limit = steps.model_tokens(self._parsed.fields.model)
        endpoint, body = continuation_body(self._plan, self._so_far, cut, self.body, limit)
        parsed = msgspec.structs.replace(self._parsed, endpoint=endpoint)
        began_s = time.perf_counter()
        try:
            answer, first = await steps.open_again(routed, parsed, body)
        except asyncio.CancelledError:
            routed.commitment.retract(instance)
            raise
        try:
            if answer.status != 200:
                said = first[:200].decode("utf-8", "replace")
                raise AttemptFailedError(instance, f"answered {answer.status}: {said}")
            row.stages_ms["resume"] = row.stages_ms.get("resume", 0.0) + (time.perf_counter() - began_s) * 1e3
            row.resumed += 1
            routed.commitment.decode.first_token()
            seam = Seam(self._so_far, cut, keep_ids=self._plan.returns_ids)
            await steps.relay_again(answer, first, _Chain(seam, self._keep))
            if not self._so_far.done:
                raise StreamFailedError("ended without its end mark")
        except UpstreamError:
            if not self._so_far.done:
                raise
        finally:
            answer.close()

    def _where_to_cut(self, steps: Steps) -> Cut | ResumeResult:
        if self._plan is None:
            assert self._refused is not None
            return self._refused
        model_tokens = steps.model_tokens(self._parsed.fields.model)
        return where_to_cut(self._plan, self._so_far, self._parsed.body, self._settings.repeat_tokens, model_tokens)

    def _ending(self) -> bytes | None:
        """All that is missing, if it is no more than the usage and the end mark; None: it is more."""
        so_far = self._so_far
        if so_far.done:
            return b""
        if self._plan is None or so_far.finish_reason is None or not so_far.readable:
            return None
        if so_far.usage_sent or not self._parsed.wants_usage:
            return _DONE
        return so_far.usage_event() + _DONE if so_far.exact and so_far.prompt_ids else None

    def _mended(self, result: ResumeResult, ending: bytes) -> bytes:
        row = self._row
        row.resume, row.outcome, row.error = result, Outcome.OK, None
        return ending


class _Chain:
    """Two filters, one after the other."""

    def __init__(self, first: StreamFilter, then: StreamFilter) -> None:
        self._first = first
        self._then = then

    def feed(self, chunk: bytes) -> bytes:
        """See ``StreamFilter.feed``."""
        said = self._first.feed(chunk)
        return self._then.feed(said) if said else said

    def flush(self) -> bytes:
        """See ``StreamFilter.flush``."""
        said = self._first.flush()
        return self._then.feed(said) + self._then.flush()
