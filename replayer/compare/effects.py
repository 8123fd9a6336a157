"""One metric's change between two arms: the two-level bootstrap, its interval, its test, and all tests' correction.

Level 1 draws sessions, the same for every run; level 2 draws runs: for each arm as many residuals as it has runs, from
the pooled residuals of all runs about their arms' means. The two levels are crossed (every run replays every session),
so the session bootstrap already shows the part of the difference between runs that is chance within sessions; drawing
whole runs as they are would count it twice. The residuals are therefore scaled so that their variance is what is left
(rescaled residuals: Carpenter, Goldstein & Rasbash, "A novel bootstrap procedure for assessing the relationship between
class size and achievement", 2003; Davison & Hinkley 1997, section 3.8, for the wrong variance of the plain scheme).

The interval is Student's t on the standard deviation of that bootstrap, with Satterthwaite's degrees of freedom: few
runs leave few of them. `docs/compare.md` has the measured coverage, also of the percentile and BCa intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from replayer.compare.metrics import Metric, Values
from replayer.compare.noise_floor import RunNoise, design_floor
from replayer.compare.statistics.bootstrap import FloatArray
from replayer.compare.statistics.power import smallest_detectable
from replayer.compare.statistics.tests import ALPHA, Effect, Verdict, holm, satterthwaite, t_quantile, two_sided_p
from replayer.records.counted import counted

MIN_SESSIONS = 10
"""Below this many sessions a cluster bootstrap's intervals are far too narrow; nothing is judged."""
_MIN_SHARE_OF_RESAMPLES = 0.9


@dataclass(frozen=True, slots=True)
class EffectEstimate:
    """A difference between two arms on a metric's working scale."""

    difference: float
    standard_error: float
    degrees_of_freedom: float
    floor: float
    """Differences below it are never called one; 0 where nothing is known or assumed."""


def two_level_draws(
    sessions: FloatArray, noise: RunNoise | None, runs: tuple[int, int], generator: np.random.Generator
) -> FloatArray:
    """Resampled differences with the run-to-run variation in them.

    Args:
        sessions: shape (B,), the difference in every resample of sessions.
        noise: between replicates; None: unknown.
        runs: how many runs the baseline and the candidate have.
        generator: seeded.

    Returns:
        Shape (B,).
    """
    if noise is None or noise.excess == 0:
        return sessions
    scaled = noise.residuals * np.sqrt(noise.excess / np.mean(noise.residuals**2))
    drawn = sessions.copy()
    for count, sign in zip(runs, (-1, 1), strict=True):
        picked = generator.integers(len(scaled), size=(len(sessions), count))
        drawn += sign * scaled[picked].mean(axis=1)
    return drawn


def estimate(
    baseline: Values,
    candidate: Values,
    noise: RunNoise | None,
    generator: np.random.Generator,
) -> EffectEstimate | str:
    """The difference of two arms, or the reason why it cannot be judged.

    Args:
        baseline: of the arm's runs, on the pair's requests.
        candidate: likewise.
        noise: between replicates; None: unknown, then it is not in the result.
        generator: seeded, for the draws of runs.
    """
    if baseline.sessions < MIN_SESSIONS:
        return f"only {counted(baseline.sessions, 'session')}; at least {MIN_SESSIONS} are needed"
    with np.errstate(invalid="ignore"):
        difference = float(candidate.points.mean() - baseline.points.mean())
    if not np.isfinite(difference):
        return "a value is zero or unknown"
    with np.errstate(invalid="ignore"):
        sessions = candidate.resampled.mean(axis=0) - baseline.resampled.mean(axis=0)
    sessions = sessions[np.isfinite(sessions)]
    if sessions.size < _MIN_SHARE_OF_RESAMPLES * baseline.resampled.shape[1]:
        return "too few requests: many resamples hold none"
    runs = (len(baseline.points), len(candidate.points))
    standard_error = float(np.std(two_level_draws(sessions, noise, runs, generator)))
    share = 1 / runs[0] + 1 / runs[1]
    by_session = float(np.var(sessions))
    by_run = max(noise.variance, noise.session_part) * share if noise else 0.0
    other = max(0.0, by_session - (noise.session_part * share if noise else 0.0))
    freedom = satterthwaite(
        [(other, max(1.0, baseline.effective_sessions - 1)), (by_run, noise.degrees_of_freedom if noise else 1.0)]
    )
    floor = design_floor(noise, *runs) if noise else 0.0
    return EffectEstimate(difference, standard_error, freedom, floor)


def effect_of(metric: Metric, baseline: Values, candidate: Values, found: EffectEstimate | str) -> Effect:
    """The effect before correction; `judge` completes it.

    Args:
        metric: which.
        baseline: of the arm's runs, on the pair's requests.
        candidate: likewise.
        found: from `estimate`.
    """
    before, after = (float(side.points.mean()) for side in (baseline, candidate))
    if metric.logarithmic:
        before, after = float(np.exp(before)), float(np.exp(after))
    change = (after - before) / before if before > 0 and np.isfinite(after) else np.nan
    note = baseline.note or candidate.note or (found if isinstance(found, str) else "")
    if not note and not np.isfinite(change):
        note = "the baseline's value is zero or unknown"
    effect = Effect(
        metric=metric.name,
        baseline=before,
        candidate=after,
        change=change,
        low=np.nan,
        high=np.nan,
        p_value=np.nan,
        p_adjusted=np.nan,
        verdict=Verdict.NOT_JUDGED if note else Verdict.NOT_DISTINGUISHABLE,
        requests=baseline.requests,
        sessions=baseline.sessions,
        lower_is_better=metric.lower_is_better,
        unit=metric.unit,
        note=note,
    )
    if note or isinstance(found, str):
        return effect
    reach = t_quantile(1 - ALPHA / 2, found.degrees_of_freedom) * found.standard_error
    return replace(
        effect,
        low=as_change(metric, found.difference - reach, before),
        high=as_change(metric, found.difference + reach, before),
        p_value=two_sided_p(found.difference, found.standard_error, found.degrees_of_freedom),
        standard_error=found.standard_error,
        degrees_of_freedom=found.degrees_of_freedom,
        noise_floor=as_change(metric, found.floor, before) if found.floor > 0 else np.nan,
    )


def as_change(metric: Metric, difference: float, baseline: float) -> float:
    """A difference on the working scale as a share of the baseline's value."""
    return float(np.expm1(difference)) if metric.logarithmic else difference / baseline


def judge(
    metrics: Sequence[Metric], family: Sequence[Sequence[Effect]], estimates: Sequence[Sequence[EffectEstimate | str]]
) -> list[list[Effect]]:
    """Correct by Holm over everything judged, and reach the verdicts.

    Args:
        metrics: of each comparison's effects, in order.
        family: the effects of every comparison that is read together: all metrics of all candidates.
        estimates: theirs.
    """
    flat = [effect for effects in family for effect in effects]
    adjusted = iter(holm(np.array([effect.p_value for effect in flat])))
    tests = sum(not effect.note for effect in flat)
    judged = []
    for effects, found in zip(family, estimates, strict=True):
        rows = []
        for metric, effect, one in zip(metrics, effects, found, strict=True):
            p_adjusted = float(next(adjusted))
            if effect.note or isinstance(one, str):
                rows.append(effect)
                continue
            smallest = smallest_detectable(one.standard_error, one.degrees_of_freedom, tests=tests, floor=one.floor)
            passed = p_adjusted < ALPHA
            below = passed and abs(one.difference) < one.floor
            verdict = effect.verdict
            if passed and not below:
                verdict = Verdict.BETTER if (one.difference < 0) == effect.lower_is_better else Verdict.WORSE
            rows.append(
                replace(
                    effect,
                    p_adjusted=p_adjusted,
                    verdict=verdict,
                    below_floor=below,
                    smallest_detectable=as_change(metric, smallest, effect.baseline),
                )
            )
        judged.append(rows)
    return judged
