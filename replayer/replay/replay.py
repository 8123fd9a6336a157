"""Replay of a trace against an OpenAI endpoint: turns in order, arrivals open loop, one record for each request.

Times are engine seconds: with engines that run ``clock_scale`` times faster than real time, waits are that much shorter
in wall time, and measured times are multiplied by it. With real engines ``clock_scale`` is 1.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import aiohttp
import msgspec

from replayer.records.journal import Journal
from replayer.records.runs import RecordError, RequestRecord, Run, RunHeader, latencies, read_run
from replayer.records.version import installed_version
from replayer.replay.client import CONNECT_TIMEOUT_S, READ_BYTES, ReplayedAnswer, send
from replayer.replay.endpoint import CONTROL_TIMEOUT_S, base_url, check_endpoint, first_model
from replayer.replay.plan import Plan, PlanOptions, SessionPlan, Step, make_plan, offered_dict
from replayer.replay.prompts import BodyTemplate, PromptBuilder
from replayer.traces.numbers import is_positive
from replayer.traces.trace import Trace
from warmroute_tls import NO_FILES, TlsFiles, tls_context

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
"""Characters that no header may have: in session ids of a trace they are sent as in URLs."""
KEEPALIVE_S = 3.0
"""Idle connections are closed before servers close them (uvicorn: 5 s): a request on a closed one would fail."""


class ReplayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a replay. Seconds are engine seconds."""

    endpoint: str = "http://127.0.0.1:9090"
    further_endpoints: tuple[str, ...] = ()
    """Replicas behind no load balancer: requests take turns, ``endpoint`` first."""
    model: str | None = None
    """None: the first that ``/v1/models`` names."""
    label: str = ""
    plan: PlanOptions = PlanOptions()
    clock_scale: float = 1.0
    max_inflight_sessions: int | None = None
    """Most sessions open at once, thinking ones included; None: no limit."""
    timeout_s: float = 3600.0
    """For one request, from sending to its last byte."""
    seed: int = 0
    """Seed of the tokens that hash ids stand for."""
    prompt_mode: Literal["tokens", "text", "chat"] = "tokens"
    token_low: int = 1000
    token_high: int = 100_000
    cache_bytes: int = 256 << 20
    api_key: str | None = None
    tls: TlsFiles = NO_FILES
    """Certificates for endpoints with ``https://``."""

    def check(self) -> None:
        """Check that the values are usable; raises ValueError."""
        for name, value in (("--engine-speed", self.clock_scale), ("--timeout-s", self.timeout_s)):
            if not is_positive(value):
                raise ValueError(f"{name} must be above 0 and finite")
        if self.max_inflight_sessions is not None and self.max_inflight_sessions < 1:
            raise ValueError("--max-inflight-sessions must be at least 1")


class Replay:
    """One replay.

    Args:
        plan: requests to send, with their times.
        builder: builds the prompts.
        options: settings; ``model`` must be set.
        journal: takes the records; requests already in it are not sent again.
        on_record: called after each record.
    """

    def __init__(
        self,
        plan: Plan,
        builder: PromptBuilder,
        options: ReplayOptions,
        journal: Journal,
        on_record: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        self._plan = plan
        self._builder = builder
        self._options = options
        self._journal = journal
        self._on_record = on_record
        self._template = BodyTemplate(model=options.model or "", mode=options.prompt_mode)
        endpoints = (options.endpoint, *options.further_endpoints)
        self._urls = itertools.cycle([base_url(each) + self._template.path for each in endpoints])
        # The clock of a resumed run continues at its last record.
        self._base_s = max((record.finished_s or 0.0 for record in journal.recorded.values()), default=0.0)
        self._start = 0.0

    def _engine_s(self, reading: float) -> float:
        """Engine seconds since the start of the run for a `time.perf_counter` reading."""
        return self._base_s + (reading - self._start) * self._options.clock_scale

    async def _until(self, due_s: float) -> None:
        """Sleep until an engine time."""
        left_s = due_s - self._engine_s(time.perf_counter())
        if left_s > 0:
            await asyncio.sleep(left_s / self._options.clock_scale)

    async def run(self, http: aiohttp.ClientSession) -> None:
        """Send all requests. After a cancellation or an error the journal can be resumed.

        Raises:
            RecordError: a record cannot be written.
        """
        try:
            await self._sessions(http)
        except ExceptionGroup as group:
            unwritten = group.subgroup(RecordError)
            if unwritten is None:
                raise
            raise unwritten.exceptions[0] from group

    async def _sessions(self, http: aiohttp.ClientSession) -> None:
        self._start = time.perf_counter()
        slots = asyncio.Semaphore(self._options.max_inflight_sessions or max(len(self._plan.sessions), 1))
        async with asyncio.TaskGroup() as group:
            for session in self._plan.sessions:
                if all(step.request_id in self._journal.recorded for step in session.steps):
                    continue
                await self._until(session.arrival_s)
                # Slots are taken here, one session after the other, so waiting sessions start in order of arrival.
                await slots.acquire()
                group.create_task(self._session(http, session, slots))

    async def _session(self, http: aiohttp.ClientSession, session: SessionPlan, slots: asyncio.Semaphore) -> None:
        try:
            due_s = session.arrival_s
            ended_s: float | None = None
            for step in session.steps:
                if ended_s is not None:
                    due_s = ended_s + step.wait_s if step.after_end else max(due_s + step.wait_s, ended_s)
                recorded = self._journal.recorded.get(step.request_id)
                if recorded is not None:
                    due_s = recorded.scheduled_s
                    ended_s = recorded.finished_s if recorded.finished_s is not None else due_s
                    continue
                due_s = max(due_s, self._base_s)
                await self._until(due_s)
                ended_s = await self._turn(http, step, due_s)
        finally:
            slots.release()

    async def _turn(self, http: aiohttp.ClientSession, step: Step, due_s: float) -> float:
        """Send one turn and record it; returns when it ended."""
        options = self._options
        headers = {
            "content-type": "application/json",
            "x-request-id": step.request_id,
            "x-session-id": _CONTROL.sub(lambda found: quote(found.group()), step.request.session_id),
        }
        if options.api_key:
            headers["authorization"] = f"Bearer {options.api_key}"
        body = self._template.body(self._builder, step.request)
        answer = await send(http, next(self._urls), body, headers, options.timeout_s / options.clock_scale)
        record = self._record(step, due_s, answer)
        self._journal.add(record)
        if self._on_record is not None:
            self._on_record(record)
        return self._engine_s(answer.finished)

    def _record(self, step: Step, due_s: float, answer: ReplayedAnswer) -> RequestRecord:
        sent_s = self._engine_s(answer.sent)
        finished_s = self._engine_s(answer.finished)
        first_s = None if answer.first_token is None else self._engine_s(answer.first_token)
        times = latencies(
            scheduled_s=due_s,
            sent_s=sent_s,
            first_token_s=first_s,
            last_token_s=None if answer.last_token is None else self._engine_s(answer.last_token),
            finished_s=finished_s,
            completion_tokens=answer.completion_tokens,
        )
        request, headers = step.request, answer.headers
        predicted = headers.get("x-warmroute-predicted-cached-tokens", "")
        return RequestRecord(
            request_id=step.request_id,
            session_id=request.session_id,
            turn=request.turn,
            chat_id=request.chat_id,
            trace_timestamp_s=request.timestamp_s,
            scheduled_s=due_s,
            sent_s=sent_s,
            first_token_s=first_s,
            finished_s=finished_s,
            **times._asdict(),
            input_length=request.input_length,
            output_length=max(request.output_length, 1),
            wait_s=step.wait_s,
            wait_after_end=step.after_end,
            own_prefix_tokens=step.own_prefix_tokens(self._builder.block_tokens),
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
            cached_tokens=answer.cached_tokens,
            ok=answer.ok,
            error=answer.error,
            http_status=answer.http_status,
            instance=headers.get("x-warmroute-instance"),
            prefill_instance=headers.get("x-warmroute-prefill-instance"),
            request_class=headers.get("x-warmroute-class"),
            reason=headers.get("x-warmroute-reason"),
            predicted_cached_tokens=int(predicted) if predicted.isdecimal() else None,
        )


async def replay_trace(
    trace: Trace,
    output: Path,
    options: ReplayOptions,
    *,
    resume: bool = False,
    on_start: Callable[[Plan, int], None] | None = None,
    on_record: Callable[[RequestRecord], None] | None = None,
) -> Run:
    """Replay a trace and write the run file.

    Args:
        trace: trace to replay.
        output: run file (JSONL, format in `replayer.records.runs`).
        options: settings.
        resume: continue the file of an interrupted run.
        on_start: called once with the plan and the number of recorded requests, before anything is sent.
        on_record: called after each record.

    Returns:
        The run as read from the file.

    Raises:
        EndpointError: an endpoint that is no URL, or no model given and the endpoint names none.
        RecordError: the output file cannot be used, or a record cannot be written.
        TraceError, ValueError: unusable settings, or a file of ``tls`` that cannot be used.
    """
    options.check()
    for endpoint in (options.endpoint, *options.further_endpoints):
        check_endpoint(endpoint)
    plan = make_plan(trace, options.plan)
    builder = PromptBuilder(
        trace.block_tokens,
        seed=options.seed,
        low=options.token_low,
        high=options.token_high,
        cache_bytes=options.cache_bytes,
    )
    timeout = aiohttp.ClientTimeout(
        total=options.timeout_s / options.clock_scale + CONTROL_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S
    )
    # Without files the library's own context, which it makes but once.
    tls: ssl.SSLContext | bool = True if options.tls == NO_FILES else tls_context(options.tls)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ssl=tls)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=READ_BYTES) as http:
        if options.model is None:
            model = await first_model(http, options.endpoint, options.api_key, tls=options.tls)
            options = msgspec.structs.replace(options, model=model)
        with Journal(output, _header(trace, plan, options), resume=resume) as journal:
            if on_start is not None:
                on_start(plan, len(journal.recorded))
            await Replay(plan, builder, options, journal, on_record).run(http)
            journal.finish(time.time())
    return read_run(output)


def _header(trace: Trace, plan: Plan, options: ReplayOptions) -> RunHeader:
    scales = options.plan
    return RunHeader(
        label=options.label,
        trace=trace.name,
        trace_sha256=trace.sha256,
        endpoint=options.endpoint,
        model=options.model or "",
        time_scale=scales.time_scale,
        think_scale=scales.time_scale if scales.think_scale is None else scales.think_scale,
        clock_scale=options.clock_scale,
        max_inflight_sessions=options.max_inflight_sessions,
        request_limit=scales.request_limit,
        seed=options.seed,
        started_unix_s=time.time(),
        warmroute_version=installed_version(),
        offered=offered_dict(plan.offered),
        cut_session=plan.cut_session,
        options={
            "idle_gap_cap_s": scales.idle_gap_cap_s,
            "timeout_s": options.timeout_s,
            "prompt_mode": options.prompt_mode,
            "token_low": options.token_low,
            "token_high": options.token_high,
            "block_tokens": trace.block_tokens,
            "trace_notes": trace.notes,
            **({"trace_options": trace.read_with} if trace.read_with else {}),
        },
    )
