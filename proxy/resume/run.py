"""Execution of a resume: from the break of an engine's stream to the end of the client's stream or its error event."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

import msgspec

from policies.row import RequestOutcome, Row
from policies.session import Routed
from policies.types import NoCandidateError, RequestView
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
    choose_cut,
    continuation_body,
    plan_resume,
    resume_enabled,
)
from proxy.resume.splice import DivergedError, Splice
from proxy.settings import ResumeSettings

_DONE = b"data: [DONE]\n\n"


class Steps(Protocol):
    """Operations of an exchange that a resume needs."""

    async def resume_refusal(self, tried: set[str]) -> ResumeResult | None:
        """Reason why no other instance may be used, or None; None is counted as a retry."""
        ...

    async def route_again(self, request: RequestView, tried: set[str]) -> Routed:
        """Route and lease among the instances not in ``tried``. Raises NoCandidateError."""
        ...

    async def open_again(self, routed: Routed, parsed: Parsed, body: bytes) -> tuple[Answer, bytes]:
        """Send and wait for the first byte. Raises AttemptFailedError."""
        ...

    async def relay_again(self, answer: Answer, first: bytes, keep: StreamFilter) -> None:
        """Relay until the engine's stream ends. Raises UpstreamError."""
        ...

    def broken(self, instance: str, what: str) -> bytes:
        """Record a broken stream; returns the error event for the client."""
        ...

    def model_tokens(self, model: str) -> int | None:
        """The model's context length in tokens as its engines report it; None if unknown."""
        ...


class Resuming:
    """One streamed request that may be resumed. Created before it is sent; has no cost if resuming is ruled out."""

    def __init__(self, settings: ResumeSettings, row: Row, parsed: Parsed, *, with_usage: bool) -> None:
        """``with_usage``: the proxy itself requests the usage event from the engine."""
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
        """The request body for engines; empty: the client's body is used unchanged."""
        if self._plan is not None:
            self.body = body_to_send(parsed.body, self._plan, with_usage=with_usage)

    @classmethod
    def of(
        cls, settings: ResumeSettings, row: Row, parsed: Parsed, headers: dict[bytes, bytes], *, with_usage: bool
    ) -> Resuming | None:
        """Create one for a request, or None if it is not streamed or not to be resumed."""
        if not parsed.stream or not resume_enabled(settings, headers):
            return None
        return cls(settings, row, parsed, with_usage=with_usage)

    def watch(self, keep: StreamFilter) -> StreamFilter:
        """A filter that records the stream and then applies ``keep``."""
        self._keep = keep
        return keep if self._plan is None else _Chain(self._so_far, keep)

    def missing_end(self) -> bytes:
        """The rest of a stream that ended with a finish reason but without the end mark, as some engines end it.

        Raises:
            StreamFailedError: it ended without either.
        """
        if self._plan is None or not self._so_far.readable or self._so_far.done:
            return b""
        if self._so_far.finish_reason is None:
            raise StreamFailedError("ended without its end mark")
        ending = self._ending()
        return self._finished(ResumeResult.COMPLETED, ending) if ending else b""

    @property
    def usage_unknown(self) -> bool:
        """True if the answer was completed without a usage report of an engine."""
        return self._row.resume == ResumeResult.COMPLETED and not self._so_far.usage_sent

    async def run(self, steps: Steps, request: RequestView, broke_on: str, closing: bytes) -> bytes:
        """Continue the answer on other instances.

        Args:
            steps: the exchange.
            request: the request's view for policies.
            broke_on: the instance whose stream broke.
            closing: the error event for the client if the answer cannot be resumed.

        Returns:
            The last bytes of the client's stream; empty if nothing is missing.
        """
        row = self._row
        tried = {broke_on}
        # The hand-off is over, and the rest of the answer has no heavy prefill.
        request = request._replace(may_offload=False)
        for resumes in range(self._settings.max_resumes + 1):
            ending = self._ending()
            if ending is not None:
                return self._finished(ResumeResult.COMPLETED, ending)
            if resumes == self._settings.max_resumes:
                break
            cut = self._choose_cut(steps)
            refused = cut if isinstance(cut, ResumeResult) else await steps.resume_refusal(tried)
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
                await self._continue_on(steps, routed, cut)
            except AttemptFailedError as error:
                routed.commitment.retract(instance)
                row.note_failed(instance, str(error))
                row.resume = ResumeResult.FAILED
            except DivergedError as error:
                # The engine is healthy: it only generated a different text.
                row.note_failed(instance, f"diverged: {error}")
                row.resume = ResumeResult.DIVERGED
                break
            except UpstreamError as error:
                closing = steps.broken(instance, str(error))
                row.resume = ResumeResult.EXHAUSTED
            else:
                return self._finished(ResumeResult.RESUMED, b"")
            finally:
                routed.commitment.release(time.monotonic())
        return closing

    async def _continue_on(self, steps: Steps, routed: Routed, cut: Cut) -> None:
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
                text = first[:200].decode("utf-8", "replace")
                raise AttemptFailedError(instance, f"answered {answer.status}: {text}")
            row.stages_ms["resume"] = row.stages_ms.get("resume", 0.0) + (time.perf_counter() - began_s) * 1e3
            row.resumed += 1
            routed.commitment.decode.first_token()
            splice = Splice(self._so_far, cut, keep_ids=self._plan.returns_ids)
            await steps.relay_again(answer, first, _Chain(splice, self._keep))
            if not self._so_far.done:
                raise StreamFailedError("ended without its end mark")
        except UpstreamError:
            if not self._so_far.done:
                raise
        finally:
            answer.close()

    def _choose_cut(self, steps: Steps) -> Cut | ResumeResult:
        if self._plan is None:
            assert self._refused is not None
            return self._refused
        model_tokens = steps.model_tokens(self._parsed.fields.model)
        return choose_cut(self._plan, self._so_far, self._parsed.body, self._settings.repeat_tokens, model_tokens)

    def _ending(self) -> bytes | None:
        """The missing bytes if only the usage and the end mark are missing, else None."""
        so_far = self._so_far
        if so_far.done:
            return b""
        if self._plan is None or so_far.finish_reason is None or not so_far.readable:
            return None
        if so_far.usage_sent or not self._parsed.usage_requested:
            return _DONE
        return so_far.usage_event() + _DONE if so_far.exact and so_far.prompt_ids else None

    def _finished(self, result: ResumeResult, ending: bytes) -> bytes:
        row = self._row
        row.resume, row.outcome, row.error = result, RequestOutcome.OK, None
        return ending


class _Chain:
    """Two filters in sequence."""

    def __init__(self, first: StreamFilter, then: StreamFilter) -> None:
        self._first = first
        self._then = then

    def feed(self, chunk: bytes) -> bytes:
        data = self._first.feed(chunk)
        return self._then.feed(data) if data else data

    def flush(self) -> bytes:
        data = self._first.flush()
        return self._then.feed(data) + self._then.flush()
