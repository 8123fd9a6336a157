"""The load generator (``python -m bench.data_plane.load.generator``): jobs as JSON lines in, one result per job out.

It is a separate process, so that neither the benchmark nor the router waits for it. Every answer is verified (status,
number of events, ``[DONE]``); errors are counted by message.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from itertools import count, cycle
from time import monotonic, process_time
from typing import Any

import msgspec
import numpy as np
import uvloop

from bench.data_plane.cpu import cpu_s
from bench.data_plane.load import prompts
from bench.data_plane.load.client import CHAT, COMPLETIONS, ClientResult, ConnectionPool, request_head
from bench.data_plane.load.jobs import (
    Aborts,
    AnyJob,
    ClosedLoopJob,
    JobResult,
    LatencySpread,
    LoadJob,
    LoadWorkload,
    Paired,
    Streams,
)

TAIL_S = 0.03
"""Wait after the last answer in seconds: a router's work after the last byte (record, counters) belongs to the
request."""


def body_of(work: LoadWorkload, number: int, tag: str = "") -> tuple[str, bytes, str]:
    """Path, body and session id of request ``number``; sessions come one after the other, turn by turn."""
    if work.kind == "sessions":
        session, turn = divmod(number, prompts.SESSION_TURNS)
        return CHAT, prompts.session_body(work.seed, session, turn, work.events), f"s-{work.seed}-{session}"
    if work.kind == "ids":
        return COMPLETIONS, prompts.ids_body(work.seed, number, work.size_bytes, work.events), ""
    return COMPLETIONS, prompts.text_body(work.seed, number, work.size_bytes, work.events, tag=tag), ""


def spread(values_ms: list[float]) -> LatencySpread | None:
    """Percentiles in milliseconds; None for an empty list."""
    if not values_ms:
        return None
    p50, p99 = np.percentile(values_ms, [50, 99])
    return LatencySpread(p50=float(p50), p99=float(p99), max=float(max(values_ms)), count=len(values_ms))


class JobRunner:
    """One job: its connections, its counts."""

    def __init__(self, job: LoadJob) -> None:
        self._job = job
        self._pool = ConnectionPool()
        self._targets = cycle(job.targets)
        self._errors: Counter[str] = Counter()
        self._good: list[ClientResult] = []
        self._cpu_s = self._load_cpu_s = self._seconds = 0.0

    @asynccontextmanager
    async def _counted(self) -> AsyncIterator[None]:
        """Count CPU and wall-clock time spent inside the context."""
        start_s, load_s, router_s = monotonic(), process_time(), cpu_s(self._job.pids)
        yield
        self._seconds = monotonic() - start_s
        self._load_cpu_s = process_time() - load_s
        await asyncio.sleep(TAIL_S)
        self._cpu_s = cpu_s(self._job.pids) - router_s

    async def _one(self, number: int) -> ClientResult:
        work = self._job.workload
        path, body, session = body_of(work, number)
        return await self._pool.request(next(self._targets), path, body, work.events, self._job.timeout_s, session)

    def _keep(self, outcome: ClientResult) -> None:
        if outcome.error:
            self._errors[outcome.error] += 1
        else:
            self._good.append(outcome)

    def _result(self, **more: Any) -> JobResult:
        self._pool.close()
        return JobResult(
            requests=len(self._good),
            errors=dict(self._errors),
            seconds=self._seconds,
            cpu_s=self._cpu_s,
            load_cpu_s=self._load_cpu_s,
            reconnects=self._pool.reconnects,
            **{
                "events": len(self._good) * self._job.workload.events,
                "ttft_ms": spread([outcome.ttft_ms for outcome in self._good]),
                **more,
            },
        )

    async def closed(self, job: ClosedLoopJob) -> JobResult:
        """Run a closed loop."""
        # A session's turns must follow each other, so it is one unit of work; other requests are units of one.
        unit = prompts.SESSION_TURNS if job.workload.kind == "sessions" else 1
        first = -(-job.first // unit) * unit
        numbers = count(first, unit)

        async def until(more: Callable[[int], bool], keep: Callable[[ClientResult], None]) -> None:
            async def worker() -> None:
                for start in numbers:
                    if not more(start):
                        return
                    for number in range(start, start + unit):
                        keep(await self._one(number))

            async with asyncio.TaskGroup() as group:
                for _ in range(job.concurrency):
                    group.create_task(worker())

        if job.warmup:
            await until(lambda number: number < first + job.warmup, lambda outcome: None)
        start = next(numbers)
        numbers = count(start, unit)
        end = start + job.requests if job.requests else sys.maxsize
        async with self._counted():
            end_s = monotonic() + job.seconds if job.seconds else float("inf")
            await until(lambda number: number < end and monotonic() < end_s, self._keep)
        return self._result()

    async def paired(self, job: Paired) -> JobResult:
        """Alternate between the router and an engine."""
        rng = random.Random(f"pairs {job.workload.seed} {job.first}")
        work = job.workload
        routers, engines = cycle(job.targets), cycle(job.direct)
        through: list[float] = []
        straight: list[float] = []
        for pair in range(-job.warmup, job.pairs):
            number = job.first + job.warmup + pair
            outcomes: dict[bool, ClientResult] = {}
            for routed in rng.sample((True, False), 2):
                path, body, session = body_of(work, number)
                target = next(routers) if routed else next(engines)
                await asyncio.sleep(job.gap_s)
                outcomes[routed] = await self._pool.request(target, path, body, work.events, job.timeout_s, session)
            if pair < 0:
                continue
            for outcome in outcomes.values():
                self._keep(outcome)
            if not any(outcome.error for outcome in outcomes.values()):
                through.append(outcomes[True].ttft_ms)
                straight.append(outcomes[False].ttft_ms)
        added = spread([a - b for a, b in zip(through, straight, strict=True)])
        if added is not None:
            above = spread([each - float(np.median(straight)) for each in through])
            assert above is not None
            added.p99, added.max = above.p99, above.max
        return self._result(ttft_ms=spread(through), direct_ttft_ms=spread(straight), added_ms=added)

    async def streams(self, job: Streams) -> JobResult:
        """Paced streams side by side."""
        work = job.workload
        ready = 0
        connections = [await self._pool.connection(next(self._targets)) for _ in range(job.streams)]
        everyone = asyncio.Event()

        async def one(number: int) -> None:
            nonlocal ready
            connection, target = connections[number], job.targets[number % len(job.targets)]
            path, body, session = body_of(work, job.first + number)
            await asyncio.sleep(0.3 * number / job.streams)
            connection.first_event = asyncio.Event()
            sent_s = connection.send(request_head(target, path, len(body), session), body)
            answered = asyncio.create_task(connection.answered(sent_s, work.events, job.timeout_s))
            started = asyncio.create_task(connection.first_event.wait())
            try:
                await asyncio.wait((answered, started), return_when=asyncio.FIRST_COMPLETED)
                ready += 1
                if ready == job.streams:
                    everyone.set()
                self._keep(await answered)
            finally:
                started.cancel()
                answered.cancel()

        events = 0
        async with asyncio.TaskGroup() as group:
            for number in range(job.streams):
                group.create_task(one(number))
            await everyone.wait()
            await asyncio.sleep(job.settle_s)
            async with self._counted():
                before = sum(connection.events_seen for connection in connections)
                await asyncio.sleep(job.window_s)
                events = sum(connection.events_seen for connection in connections) - before
        return self._result(events=events)

    async def aborts(self, job: Aborts) -> JobResult:
        """Clients that disconnect."""
        rng = random.Random(f"aborts {job.workload.seed} {job.first}")
        waits = [rng.uniform(*job.wait_s) for _ in range(job.requests)]
        left: dict[str, float] = {}
        numbers = iter(range(job.requests))

        async def worker() -> None:
            for number in numbers:
                tag = f"a{job.first + number}"
                path, body, _ = body_of(job.workload, job.first + number, tag)
                target = next(self._targets)
                connection = await self._pool.connection(target)
                connection.first_event = asyncio.Event()
                connection.send(request_head(target, path, len(body)), body)
                try:
                    async with asyncio.timeout(job.timeout_s):
                        if job.after_event:
                            await connection.first_event.wait()
                        await asyncio.sleep(waits[number])
                except TimeoutError:
                    self._errors["no first event"] += 1
                if connection.closed:
                    self._errors["the router closed first"] += 1
                elif connection.first_event_s and not job.after_event:
                    self._errors["the first event came before the client left"] += 1
                else:
                    left[tag] = monotonic()
                connection.close()

        async with self._counted(), asyncio.TaskGroup() as group:
            for _ in range(job.concurrency):
                group.create_task(worker())
        return self._result(left=left)


def run(job: AnyJob) -> Coroutine[Any, Any, JobResult]:
    """Run one job."""
    runner = JobRunner(job)
    if isinstance(job, ClosedLoopJob):
        return runner.closed(job)
    if isinstance(job, Paired):
        return runner.paired(job)
    if isinstance(job, Streams):
        return runner.streams(job)
    return runner.aborts(job)


def main() -> None:
    """Entry point: jobs from standard input until it closes."""
    decoder = msgspec.json.Decoder(AnyJob)
    for line in sys.stdin.buffer:
        result = uvloop.run(run(decoder.decode(line)))
        sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
