"""One run: empty the engines' caches, start the router, replay the trace, read the engines' counters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import httpx

from bench.routers.engines import WARM_UP_OUTPUT, EngineSet, EngineSetError, ServedModel
from bench.routers.launches import PeerEnvironment, RouterLaunchError, launch_of
from bench.routers.plan import RoutersRun
from bench.routers.process import RunningRouter, running_router
from bench.routers.records import RequestFigures, RouterRecord, RoutersConditions
from replayer.records.runs import RequestRecord, read_run
from replayer.replay.plan import PlanOptions, make_plan
from replayer.replay.prompts import PromptBuilder
from replayer.replay.replay import ReplayOptions, replay_trace
from replayer.traces.trace import Trace

LOGS = "logs"
_RUN_FILE = "run.jsonl"
_EVENTS_S = 30.0
_CLEAR_AGAIN_S = 3.0
"""A router that subscribed after the event waits for the next one."""
_POLL_S = 0.1


class BudgetSpentError(Exception):
    """The machine time ended during a run; nothing of it is kept."""


class RoutersSetup(NamedTuple):
    """Trace, engines and settings that all runs of a comparison have in common."""

    trace: Trace
    base: dict[str, Any]
    """Settings of a warmroute proxy, with the engines as ``instances``."""
    others: Mapping[str, dict[str, Any]]
    """Name of a further set of engines -> settings of a proxy in front of it."""
    conditions: RoutersConditions
    peers: PeerEnvironment
    timeout_s: float
    """Of one request, engine seconds."""
    limit_s: float
    """Longest replay, wall seconds; what has not ended then is cut off."""
    hardware: str
    output: Path

    @property
    def engines(self) -> list[str]:
        """URLs of the engines."""
        return [str(each["url"]).rstrip("/") for each in self.base["instances"]]

    @property
    def hands_over(self) -> bool:
        """True if engines can give their KV to others."""
        return any(each.get("role", "none") != "none" for each in self.base["instances"])

    def on(self, name: str) -> RoutersSetup:
        """The same with the named set of engines; an empty name: with its own."""
        return self._replace(base=self.others[name]) if name else self

    def plan_options(self, load: float) -> PlanOptions:
        """Times and limits of the plan at a load."""
        conditions = self.conditions
        return PlanOptions(
            time_scale=load,
            think_scale=conditions.think_speed,
            request_limit=conditions.request_limit,
            idle_gap_cap_s=conditions.idle_gap_cap_s,
        )

    def span_s(self, load: float) -> float:
        """Wall seconds of the plan if every call took as long as in the trace."""
        return make_plan(self.trace, self.plan_options(load)).offered.span_s / self.conditions.engine_speed

    def replay_options(self, run: RoutersRun, endpoint: str, model: str) -> ReplayOptions:
        """The replay of one run."""
        conditions = self.conditions
        mode: Literal["tokens", "text"] = "text" if run.prompt_mode == "text" else "tokens"
        return ReplayOptions(
            endpoint=endpoint,
            model=model,
            label=run.arm.label,
            plan=self.plan_options(run.load),
            clock_scale=conditions.engine_speed,
            timeout_s=self.timeout_s,
            seed=conditions.seed,
            prompt_mode=mode,
            token_low=conditions.token_low,
            token_high=conditions.token_high,
        )


async def preflight(setup: RoutersSetup) -> tuple[ServedModel, str]:
    """The engines' model, and a sentence on the prompts, once the longest one is known to fit and was computed once.

    Raises:
        EngineSetError: engines do not answer or differ, or a prompt does not fit their context.
    """
    conditions, trace = setup.conditions, setup.trace
    longest = max(trace.requests, key=lambda each: each.input_length)
    async with httpx.AsyncClient(trust_env=False) as http:
        engines = EngineSet(setup.engines, http)
        served = await engines.served()
        tokens: int | None = longest.input_length
        if conditions.prompt_mode == "text":
            builder = PromptBuilder(
                trace.block_tokens, seed=conditions.seed, low=conditions.token_low, high=conditions.token_high
            )
            tokens = await engines.prompt_tokens(served.name, builder.text(longest))
        if tokens is None:
            return served, "longest prompt: unknown, the engines have no /tokenize"
        room = None if served.max_tokens is None else served.max_tokens - max(longest.output_length, WARM_UP_OUTPUT)
        if room is not None and tokens > room:
            raise EngineSetError(
                f"the longest prompt has {tokens} tokens on the engines, which take {room}: "
                f"--length-scale {conditions.length_scale * room / tokens:.2f} would fit"
            )
        await engines.warm_up(served.name, tokens)
    ratio = tokens / longest.input_length
    return served, f"longest prompt: {tokens} tokens on the engines, {ratio:.2f} for each of the trace's"


async def measured(run: RoutersRun, setup: RoutersSetup, served: ServedModel, budget_s: float | None) -> RouterRecord:
    """Make one run.

    Args:
        run: which.
        setup: what it has in common with the others.
        served: the engines' model.
        budget_s: wall seconds that are left for it; None: no limit.

    Raises:
        BudgetSpentError: it did not end in time.
        EngineSetError: the engines' caches cannot be emptied, or an engine does not answer.
        RouterLaunchError: the router cannot be started, ended early, or answered nothing.
    """
    try:
        async with asyncio.timeout(budget_s):
            with TemporaryDirectory(prefix="routers-") as folder:
                return await _measured(run, setup, served, Path(folder))
    except TimeoutError:
        raise BudgetSpentError(f"{run.name} had not ended after {budget_s or 0:.0f} s") from None


async def _measured(run: RoutersRun, setup: RoutersSetup, served: ServedModel, folder: Path) -> RouterRecord:
    began_s = time.monotonic()
    logs = setup.output / LOGS
    logs.mkdir(parents=True, exist_ok=True)
    async with httpx.AsyncClient(trust_env=False) as http:
        engines = EngineSet(setup.engines, http)
        proofs = await engines.emptied(served.name)
        launch = launch_of(run.arm, setup.base, folder, setup.peers, served.name)
        with running_router(launch, logs / f"{run.name}.log") as router:
            await router.until_ready(http, len(engines.urls), served.name)
            await _events_followed(router, engines, http, served.name)
            before, cpu_s = await engines.counters(), router.cpu_s()
            await _replayed(run, setup, folder / _RUN_FILE, launch.url, served.name)
            router.check_running()
            cpu_s = router.cpu_s() - cpu_s
            evidence = await router.evidence(http)
        await engines.until_idle(served.name)
        after = await engines.counters()
    found = read_run(folder / _RUN_FILE)
    _refuse_silence(found.records)
    return RouterRecord(
        label=run.arm.label,
        repeat=run.repeat,
        load=run.load,
        conditions=setup.conditions,
        router=f"{launch.note}, on the engines {run.arm.engines}" if run.arm.engines else launch.note,
        command=launch.command,
        hardware=setup.hardware,
        engine_versions=served.versions,
        pool_tokens=served.pool_tokens,
        planned=int(found.header.offered.get("requests", len(found.records))),
        total_s=round(time.monotonic() - began_s, 2),
        router_cpu_s=round(cpu_s, 3),
        proofs=proofs,
        counters=[now.since(then) for now, then in zip(after, before, strict=True)],
        evidence=evidence,
        header=found.header,
        requests=[RequestFigures.of(each) for each in found.records],
    )


async def _events_followed(router: RunningRouter, engines: EngineSet, http: httpx.AsyncClient, model: str) -> None:
    """Start every router that follows KV events from caches that are empty by those events too."""
    deadline_s = time.monotonic() + _EVENTS_S
    while True:
        await engines.clear(model)
        again_s = time.monotonic() + _CLEAR_AGAIN_S
        while late := await router.untrusted_events(http):
            if time.monotonic() > again_s:
                break
            await asyncio.sleep(_POLL_S)
        else:
            return
        if time.monotonic() > deadline_s:
            raise RouterLaunchError(
                f"KV events are not trusted after {_EVENTS_S:g} s ({', '.join(late)}): check events_url in --config, "
                "or leave it out"
            )


async def _replayed(run: RoutersRun, setup: RoutersSetup, path: Path, endpoint: str, model: str) -> None:
    """Replay until the end of the trace or the limit of a run; requests in flight are cut off then."""
    cut = asyncio.timeout(setup.limit_s)
    try:
        async with cut:
            await replay_trace(setup.trace, path, setup.replay_options(run, endpoint, model))
    except TimeoutError:
        if not cut.expired():
            raise


def _refuse_silence(records: list[RequestRecord]) -> None:
    if not any(record.ok for record in records):
        reason = next((record.error for record in records if record.error), "nothing was sent")
        raise RouterLaunchError(f"no request succeeded: {reason}")
