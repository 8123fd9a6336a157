"""All candidates of one baseline, compared over one order of requests and corrected together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from replayer.compare.arms import ArmRuns
from replayer.compare.comparison import CompareOptions, Comparison
from replayer.compare.conditions import ComparisonError
from replayer.compare.effects import EffectEstimate, effect_of, estimate, judge
from replayer.compare.metrics import Evaluator, Metric, Values, metrics_of
from replayer.compare.noise_floor import FloorRow, RunNoise, assumed_noise, between_runs, floor_row
from replayer.compare.pairing import Pairing, align, pair
from replayer.compare.statistics.bootstrap import BoolArray, SessionBootstrap
from replayer.compare.statistics.tests import Effect
from replayer.compare.window import choose_window, in_class
from replayer.records.classes import PlannedClass
from replayer.records.counted import counted

_FEW = 4
"""Below so many degrees of freedom, a note states that the noise between runs is poorly known."""


@dataclass(frozen=True, eq=False)
class _Pair:
    """One candidate's requests and uncorrected effects."""

    label: str
    runs: list[int]
    pairing: Pairing
    kept: BoolArray
    effects: list[Effect]
    estimates: list[EffectEstimate | str]


class Family:
    """The runs of all arms, with one set of resamples.

    Args:
        arms: the baseline, then the candidates.
        same: groups of replicates that are in no arm.
        options: how to compare.
        notes: warnings about the conditions, repeated in every comparison.
        fine_print: further notes of every comparison.

    Raises:
        ComparisonError: no request in the window is of the class that is asked for.
    """

    def __init__(
        self,
        arms: Sequence[ArmRuns],
        same: Sequence[ArmRuns],
        options: CompareOptions,
        notes: Sequence[str],
        fine_print: Sequence[str] = (),
    ) -> None:
        self._options, self._notes, self._fine_print = options, notes, fine_print
        groups = [*arms, *same]
        ends = np.cumsum([len(group.runs) for group in groups])
        positions = [list(range(end - len(group.runs), end)) for group, end in zip(groups, ends, strict=True)]
        self._labels = [arm.label for arm in arms]
        self._arms, self._same = positions[: len(arms)], positions[len(arms) :]
        self._alike = _alike(arms)
        self._blocks = _same_repeats(arms) and not same
        self._requests, self._columns = align([one.run for group in groups for one in group.runs], clock=options.clock)
        self._window, self._inside = choose_window(
            self._requests.planned_s,
            self._requests.input_tokens,
            self._requests.session_of,
            skip_first_s=options.skip_first_s,
            skip_last_s=options.skip_last_s,
        )
        self._of_class = in_class(self._requests.classes, options.only_class)
        if options.only_class is not None:
            _refuse_empty(options.only_class, self._requests.classes, self._inside, self._of_class)
        self._metrics = metrics_of(options.slo, sessions=options.only_class is None)
        self._evaluator = Evaluator(
            self._requests,
            self._columns,
            SessionBootstrap(
                self._requests.session_of, self._requests.sessions, resamples=options.resamples, seed=options.seed
            ),
            options.slo,
        )

    def comparisons(self) -> list[Comparison]:
        """Every candidate against the baseline.

        Raises:
            ComparisonError: a candidate shares no request with the baseline.
        """
        noise = {metric.name: self._noise(metric) for metric in self._metrics}
        floor = self._floor()
        pairs = [self._pair(label, runs, noise) for label, runs in zip(self._labels[1:], self._arms[1:], strict=True)]
        judged = judge(self._metrics, [one.effects for one in pairs], [one.estimates for one in pairs])
        tests = sum(not effect.note for effects in judged for effect in effects)
        return [
            self._comparison(replace(one, effects=effects), tests, floor, noise)
            for one, effects in zip(pairs, judged, strict=True)
        ]

    def _pair(self, label: str, runs: list[int], noise: dict[str, RunNoise | None]) -> _Pair:
        before, options = self._arms[0], self._options
        pairing, kept = pair(
            self._requests,
            [self._columns[run] for run in before],
            [self._columns[run] for run in runs],
            self._inside,
            self._of_class,
        )
        if not pairing.keys:
            raise ComparisonError(
                f"'{self._labels[0]}' and '{label}' share no request (session_id, turn, chat_id)"
                + (f" of class {options.only_class}" if options.only_class else "")
                + (
                    " in the part of the plan that is compared; --keep-all compares all of it"
                    if pairing.skipped
                    else ""
                )
                + ": check that all runs replay the same trace."
            )
        # Seeded again for each candidate: an arm's result does not depend on the arms beside it.
        generator = np.random.default_rng([options.seed, 1])
        effects, estimates = [], []
        for metric in self._metrics:
            together = self._evaluator.values(metric, [*before, *runs], kept)
            sides = together.part(0, len(before)), together.part(len(before), len(before) + len(runs))
            found = estimate(*sides, noise[metric.name], generator)
            effects.append(effect_of(metric, *sides, found))
            estimates.append(found)
        return _Pair(label, runs, pairing, kept, effects, estimates)

    def _values(self, metric: Metric, runs: list[int]) -> Values:
        """One arm's values on the requests that all its own runs have."""
        present = np.logical_and.reduce([self._inside, self._of_class, *(self._columns[run].present for run in runs)])
        return self._evaluator.values(metric, runs, present)

    def _noise(self, metric: Metric) -> RunNoise | None:
        if self._blocks:
            found = between_runs([self._values(metric, runs) for runs in self._arms], blocks=True)
            if found is not None and found.blocked:
                return found
        found = between_runs(self._groups(metric), blocks=False)
        if found is None and metric.logarithmic and self._options.assumed_floor > 0:
            return assumed_noise(self._options.assumed_floor)
        return found

    def _groups(self, metric: Metric) -> list[Values]:
        groups = [[run for arm in alike for run in self._arms[arm]] for alike in self._alike]
        return [self._values(metric, runs) for runs in (*groups, *self._same) if len(runs) > 1]

    def _floor(self) -> list[FloorRow]:
        rows = [floor_row(metric, self._groups(metric)) for metric in self._metrics]
        return [row for row in rows if row is not None]

    def _comparison(
        self, one: _Pair, tests: int, floor: list[FloorRow], noise: dict[str, RunNoise | None]
    ) -> Comparison:
        before, options = self._arms[0], self._options
        known = [found for found in noise.values() if found is not None]
        return Comparison(
            baseline_label=self._labels[0],
            candidate_label=one.label,
            pairing=one.pairing,
            sessions=len(np.unique(self._requests.session_of[one.kept])),
            effects=one.effects,
            resamples=options.resamples,
            seed=options.seed,
            clock=options.clock,
            skip_first_s=max(0.0, self._window.first_s),
            window=self._window,
            runs=(len(before), len(one.runs)),
            family=tests,
            noise_floor=floor,
            goodput_per_s=self._goodput(one),
            warnings=list(self._notes),
            assumed_noise=options.assumed_floor,
            only_class=options.only_class,
            notes=[
                *self._notes,
                *self._fine_print,
                *([_about_class(options.only_class, one.pairing)] if options.only_class else []),
                *_left_over(one.pairing, (self._labels[0], one.label)),
                *self._sessions_left_out(one),
                *([left_out] if (left_out := self._window.describe()) else []),
                *_about_noise(options.assumed_floor, known, (len(before), len(one.runs))),
            ],
        )

    def _sessions_left_out(self, one: _Pair) -> list[str]:
        """Notes on compared sessions that are not completed in every run of an arm."""
        if self._options.only_class is not None:
            return []
        first = one.kept & self._requests.first_of_session
        notes = []
        for name, runs in ((self._labels[0], self._arms[0]), (one.label, one.runs)):
            completed = np.logical_and.reduce([np.isfinite(self._columns[run].session_s) for run in runs])
            if count := int((first & ~completed).sum()):
                notes.append(
                    f"{count} of {int(first.sum())} sessions of '{name}' have a failed turn or are not known to be "
                    "whole; session times leave them out of both arms"
                )
        return notes

    def _goodput(self, one: _Pair) -> dict[str, tuple[float, float]]:
        """Requests per second that met the objectives: over the time from the first of the compared requests'
        schedule to the last one's end, each run for itself, then the mean of the runs."""
        rates: dict[str, tuple[float, float]] = {}
        for metric in self._metrics:
            if not metric.column.startswith("goodput"):
                continue
            sides = []
            for runs in (self._arms[0], one.runs):
                per_run = []
                for run in runs:
                    columns = self._columns[run]
                    span_s = np.nanmax(columns.finished_s[one.kept], initial=-np.inf) - np.min(
                        columns.scheduled_s[one.kept]
                    )
                    met = float(self._evaluator.met(run, metric.column)[one.kept].sum())
                    per_run.append(met / span_s if span_s > 0 else np.nan)
                sides.append(float(np.mean(per_run)))
            rates[metric.name] = (sides[0], sides[1])
        return rates


def _alike(arms: Sequence[ArmRuns]) -> list[list[int]]:
    """Positions of the arms, those of one configuration together."""
    groups: dict[str, list[int]] = {}
    for position, arm in enumerate(arms):
        groups.setdefault(arm.configuration or f"\0{position}", []).append(position)
    return list(groups.values())


def _same_repeats(arms: Sequence[ArmRuns]) -> bool:
    """True if the runs of all arms correspond one to one by the name of their repeat, in the same order."""
    repeats = [[one.repeat for one in arm.runs] for arm in arms]
    return all(repeats[0]) and len(set(repeats[0])) == len(repeats[0]) and all(r == repeats[0] for r in repeats)


def _refuse_empty(
    only: PlannedClass, classes: Sequence[PlannedClass | None], inside: BoolArray, of_class: BoolArray
) -> None:
    """Raise ComparisonError if the compared part of the plan has no request of the class."""
    if (inside & of_class).any():
        return
    others = [f"{int((inside & in_class(classes, each)).sum()):,} {each}" for each in PlannedClass if each is not only]
    left_out = int(of_class.sum())
    remedy = (
        f"the plan has {left_out:,} in what is left out at its start and end: --keep-all compares that"
        if left_out
        else "give another class"
    )
    raise ComparisonError(
        f"no request in the compared part of the plan is of class {only} ({only.tokens}), but {' and '.join(others)}; "
        f"{remedy}."
    )


def _about_class(only: PlannedClass, pairing: Pairing) -> str:
    requests = len(pairing.keys)
    return (
        f"only requests of class {only} are compared ({only.tokens}): {requests:,} of "
        f"{counted(requests + pairing.other_classes, 'paired request')} in the compared part of the plan; cold start "
        "and drain are those of all classes, and times of whole sessions are left out"
    )


def _left_over(pairing: Pairing, names: tuple[str, str]) -> list[str]:
    notes = []
    for name, unmatched, failed in (
        (names[0], pairing.unmatched_baseline, pairing.failed_baseline),
        (names[1], pairing.unmatched_candidate, pairing.failed_candidate),
    ):
        if unmatched:
            notes.append(f"{counted(unmatched, 'request')} of '{name}' left out, not in the other run")
        if failed:
            notes.append(f"{counted(failed, 'paired request')} failed in '{name}', left out of the times of both arms")
    return notes


def _about_noise(assumed_floor: float, noise: Sequence[RunNoise], runs: tuple[int, int]) -> list[str]:
    known = [found for found in noise if not found.assumed]
    if not known:
        assumption = "no arm was repeated, so the noise between runs is not known"
        if assumed_floor > 0:
            assumption += (
                f": two runs are assumed to differ by up to {assumed_floor:.0%} in their times (--assumed-noise) and "
                "not at all in APC and rates"
            )
        else:
            assumption += " and assumed to be zero"
        return [f"{assumption}. Repeat the arms, or give replicates with --aa"]
    freedom = known[0].degrees_of_freedom
    if freedom < _FEW:
        return [
            f"the noise between runs is known from {freedom} degree{'s' if freedom > 1 else ''} of freedom only "
            f"({runs[0]} and {runs[1]} runs): intervals are wide; more repeats narrow them"
        ]
    return []
