"""One cell with one seed, prepared once and simulated with any number of policies."""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np

from bench.tournament.attained import OVERLOAD, attained
from bench.tournament.capacity import MeanWork, pace, saturation, work_of
from bench.tournament.hotset import REFERENCE_LOAD, hot_set_tokens, pool_tokens
from bench.tournament.results import EntrantResult, GridCell, MetricSample, SessionTimes, TraceFacts, sources_digest
from bench.tournament.settings import TournamentError, TournamentSettings, TraceRule
from bench.tournament.timeline import Calls, Timeline, calls_of, timeline
from bench.tournament.traces import find_traces, load_one
from bench.tournament.workload import CellWorkload, build
from policies.admission.base import AdmissionRule
from policies.routing.base import RoutingPolicy
from policies.types import Role
from replayer.compare.statistics.bootstrap import FloatArray, SessionBootstrap
from replayer.records.runs import RequestRecord, Run
from replayer.records.sessions import SessionTally
from replayer.replay.plan import Plan, PlanOptions, make_plan
from replayer.traces.formats.source import file_sha256
from replayer.traces.trace import Trace
from sim.hardware import HardwareProfile, load_profile
from sim.offline.simulate import Noise, SimOptions, SimResult, simulate

FAILED_S = 1e6
"""A request that failed counts as one that took this long."""
_DIGITS = 6
"""Significant digits of kept figures: far finer than differences between policies, and small files."""


class Ground:
    """A trace with its saturation and hot set."""

    def __init__(self, path: Path, rule: TraceRule, settings: TournamentSettings, profile: HardwareProfile) -> None:
        self.path = path
        self.rule = rule
        self._settings = settings
        self._profile = profile
        self._lines: dict[float, Timeline] = {}

    @cached_property
    def trace(self) -> Trace:
        """The trace, read according to its rule."""
        return load_one(self.path, self.rule)

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the file, without reading it as a trace."""
        return file_sha256(self.path)

    @cached_property
    def work(self) -> MeanWork:
        """Its average request."""
        return work_of(self.trace, self._profile)

    @cached_property
    def _calls(self) -> Calls:
        return calls_of(self.trace, self._profile)

    @cached_property
    def saturation(self) -> float:
        """Requests per second and instance."""
        return saturation(self.work, self._profile)

    @cached_property
    def hot_set_tokens(self) -> float:
        """Hot set of one instance in tokens."""
        return hot_set_tokens(self.line(REFERENCE_LOAD), self.saturation)

    def line(self, load: float) -> Timeline:
        """The trace at the pace of a load."""
        if load not in self._lines:
            self._lines[load] = timeline(self._calls, pace(self.work, self._profile, load))
        return self._lines[load]

    def pool(self, factor: float) -> tuple[int, bool]:
        """Tokens of an instance's pool; True if it is larger than requested."""
        return pool_tokens(factor, self.hot_set_tokens, self.line(REFERENCE_LOAD))

    def facts(self, made_of: str) -> TraceFacts:
        """Figures of the trace for the tables."""
        pools = {f"{factor:g}": self.pool(factor) for factor in self._settings.grid.pools}
        return TraceFacts(
            name=self.rule.name,
            made_of=made_of,
            family=self.rule.family,
            file=self.path.name,
            requests=len(self.trace.requests),
            sessions=len(self.line(REFERENCE_LOAD).sessions),
            saturation=_rounded(self.saturation),
            attained=_rounded(attained(self.line(OVERLOAD), self.saturation, self._settings, self._profile)),
            latency_s=_rounded(self.line(REFERENCE_LOAD).latency_s),
            hot_set_tokens=_rounded(self.hot_set_tokens),
            pools={factor: tokens for factor, (tokens, _) in pools.items()},
            floored=[factor for factor, (_, floored) in pools.items() if floored],
        )


class PreparedCell:
    """One cell with one seed: equal requests, pool and noise for every policy."""

    def __init__(
        self,
        cell: GridCell,
        seed: int,
        settings: TournamentSettings,
        workload: CellWorkload,
        plan: Plan,
        options: SimOptions,
        made_of: str,
    ) -> None:
        self.cell = cell
        self.seed = seed
        self.workload = workload
        self.plan = plan
        self.options = options
        self.made_of = made_of
        """Digest of everything but the policy."""
        self._settings = settings
        order = sorted(workload.judged)
        sessions = [workload.trace.requests[chat_id].session_id for chat_id in order]
        names = {name: number for number, name in enumerate(dict.fromkeys(sessions))}
        self._place = {chat_id: number for number, chat_id in enumerate(order)}
        self.sessions = len(names)
        session_of = np.array([names[name] for name in sessions], dtype=np.int64)
        resamples = settings.sizes.resamples
        self._bootstrap = SessionBootstrap(session_of, len(names), resamples=resamples, seed=seed)

    def simulated(self, policy: RoutingPolicy, admission: AdmissionRule | None = None) -> SimResult:
        """The whole result."""
        return simulate(self.workload.trace, self.options, policy, plan=self.plan, admission=admission)

    def run(self, policy: RoutingPolicy, admission: AdmissionRule | None = None) -> Run:
        """Every request's record, warming ones too, in the order in which they ended."""
        return self.simulated(policy, admission).run

    def play(
        self, policy: RoutingPolicy, label: str, digest: str = "", admission: AdmissionRule | None = None
    ) -> EntrantResult:
        """Simulate a policy and keep what the tables need.

        Args:
            policy: The policy.
            label: Its name in the tables.
            digest: Digest of the policy (`Entrant.digest`).
            admission: The admission rule; None: requests are sent at once.
        """
        judged: list[RequestRecord | None] = [None] * len(self._place)
        run = self.run(policy, admission)
        for record in run.records:
            place = self._place.get(record.chat_id)
            if place is not None:
                judged[place] = record
        good = [record for record in judged if record is not None and record.ok]
        ttft = _column([None if record is None or not record.ok else record.ttft_scheduled_s for record in judged])
        e2e = _column([None if record is None or not record.ok else record.e2e_scheduled_s for record in judged])
        tpot = [record.tpot_s for record in good if record.tpot_s is not None]
        prompt = sum(record.prompt_tokens or 0 for record in good)
        return EntrantResult(
            cell=self.cell,
            seed=self.seed,
            label=label,
            made_of=f"{self.made_of}-{digest}",
            requests=self.workload.requests,
            warming=self.workload.warming,
            judged=len(judged),
            sessions=self.sessions,
            failed=len(judged) - len(good),
            ttft_p50_s=_rounded(float(np.quantile(ttft, 0.5))),
            ttft_p90=self._sample(ttft, 0.9),
            e2e_p50=self._sample(e2e, 0.5),
            e2e_p90_s=_rounded(float(np.quantile(e2e, 0.9))),
            tpot_p50_s=_rounded(float(np.quantile(tpot, 0.5))) if tpot else 0.0,
            apc=_rounded(sum(record.cached_tokens or 0 for record in good) / prompt) if prompt else 0.0,
            session_times=self._session_times(run),
        )

    def _session_times(self, run: Run) -> SessionTimes | None:
        tally = SessionTally(run.header.idle_costs)
        for record in run.records:
            if record.session_id in self.workload.whole:
                tally.add(record)
        tally.all_over()
        found = tally.figures()
        took, slowdown = found.completion_s, found.slowdown
        if not found.completed:
            return None
        return SessionTimes(
            sessions=found.sessions,
            completed=found.completed,
            mean_s=_rounded(took.mean or 0.0),
            p50_s=_rounded(took.p50 or 0.0),
            p90_s=_rounded(took.p90 or 0.0),
            slowdown_mean=_rounded(slowdown.mean or 0.0),
            slowdown_p50=_rounded(slowdown.p50 or 0.0),
            slowdown_p90=_rounded(slowdown.p90 or 0.0),
        )

    def _sample(self, values: FloatArray, level: float) -> MetricSample:
        keep = np.ones(values.size, dtype=np.bool_)
        resampled = self._bootstrap.quantiles(values, keep, np.array([level]))[:, 0]
        return MetricSample(
            value=_rounded(float(np.quantile(values, level))), resampled=[_rounded(each) for each in resampled.tolist()]
        )


class Arena:
    """The traces of a folder, and the cells prepared from them."""

    def __init__(self, settings: TournamentSettings, folder: Path) -> None:
        self.settings = settings
        self.profile = load_profile(settings.profile)
        self.grounds = {
            name: Ground(path, rule, settings, self.profile)
            for name, (path, rule) in find_traces(folder, settings.traces).items()
        }
        self._sources = sources_digest()

    def ground(self, trace: str) -> Ground:
        """A trace by name.

        Raises:
            TournamentError: there is no trace of that name.
        """
        if trace not in self.grounds:
            raise TournamentError(f"no trace {trace!r}; known: {', '.join(sorted(self.grounds))}")
        return self.grounds[trace]

    def stage(self, cell: GridCell, seed: int) -> PreparedCell:
        """Prepare a cell.

        Raises:
            TournamentError: the cell has no request to judge.
        """
        ground = self.ground(cell.trace)
        sizes = self.settings.sizes
        rate = cell.load * ground.saturation * cell.fleet
        workload = build(ground.line(cell.load), rate, cell.fleet, seed, sizes, f"{cell}, seed {seed}")
        if not workload.judged:
            raise TournamentError(f"{cell}: no request to judge; raise sizes.requests")
        options = SimOptions(
            instances=cell.fleet,
            profile=self.settings.profile,
            pool_tokens=ground.pool(cell.pool)[0],
            seed=seed,
            role=Role.KV_BOTH if self.settings.transport else Role.NONE,
            transport=self.settings.transport or None,
            scheduling_policy="priority" if self.settings.priority_scheduling else "fcfs",
            plan=PlanOptions(time_scale=1.0, think_scale=1.0, idle_gap_cap_s=None),
            noise=Noise(arrival_jitter_s=sizes.arrival_jitter_s, speed_sigma=sizes.speed_sigma),
            label=str(cell),
        )
        plan = make_plan(workload.trace, options.plan)
        return PreparedCell(cell, seed, self.settings, workload, plan, options, self.made_of(cell.trace, cell, seed))

    def made_of(self, trace: str, *more: object) -> str:
        """Digest of everything but the policy that affects a result on a trace; ``more``: cell and seed, for
        example."""
        ground = self.ground(trace)
        profile = self.profile.model_dump()
        engines = (self.settings.transport,) if self.settings.transport else ()
        engines = (*engines, "priority") if self.settings.priority_scheduling else engines
        parts = msgspec.json.encode((more, ground.sha256, ground.rule.sessions, self.settings.sizes, profile, *engines))
        return f"{hashlib.sha256(parts).hexdigest()[:16]}-{self._sources}"


def _column(values: list[float | None]) -> FloatArray:
    return np.array([FAILED_S if value is None else value for value in values], dtype=np.float64)


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
