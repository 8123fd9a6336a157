"""Two runs of one trace, request by request: what changed, how surely, and one sentence about it.

Rules
- A request is paired by (session_id, turn, chat_id); a key that occurs several times is paired in order of occurrence.
- Nothing is excluded by default: no warm-up is cut, no outlier removed. ``skip_first_s`` removes, from both arms, every
  pair that either arm scheduled in its first seconds.
- Times are compared over pairs that succeeded in both arms; how many did not is part of the result, and the success
  rate is compared over all pairs.
- APC is cached prompt tokens over prompt tokens. An engine that says nothing about a request's cached tokens counts as
  zero for it, provided it said something for others (vLLM up to 0.18 omits zero).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from replayer.records import RequestRecord, Run
from replayer.statistics import (
    ALPHA,
    MIN_TAIL_REQUESTS,
    Effect,
    FloatArray,
    SessionBootstrap,
    Verdict,
    effect_of,
    holm,
)

QUANTILES = (0.5, 0.9, 0.99)
CLOCKS = ("sent", "scheduled")
"""Where TTFT and E2E start: when the client sent the request, or when the plan wanted it sent."""
MIN_RESAMPLES = 1000
"""With fewer, the smallest p-value a bootstrap can give does not survive the correction over eleven metrics."""
_MUST_AGREE = ("trace_sha256", "time_scale", "think_scale", "clock_scale", "max_inflight_sessions", "request_limit")
_WORTH_TELLING = ("seed", "model", "warmroute_version")

Key = tuple[str, int, int, int]


class ComparisonError(ValueError):
    """Runs that must not be compared; the message says why and what to do."""


@dataclass(frozen=True)
class Pairing:
    """Requests present in both runs, in the baseline's order, and what was left over."""

    keys: list[Key]
    baseline: list[RequestRecord]
    candidate: list[RequestRecord]
    unmatched_baseline: int
    unmatched_candidate: int
    skipped: int
    """Pairs removed by ``skip_first_s``."""

    @property
    def failed_baseline(self) -> int:
        """Paired requests that failed in the baseline."""
        return sum(not record.ok for record in self.baseline)

    @property
    def failed_candidate(self) -> int:
        """Paired requests that failed in the candidate."""
        return sum(not record.ok for record in self.candidate)

    @property
    def both_ok(self) -> int:
        """Pairs that succeeded in both: what the times are compared over."""
        return sum(a.ok and b.ok for a, b in zip(self.baseline, self.candidate, strict=True))


@dataclass(frozen=True)
class Comparison:
    """One candidate against the baseline."""

    baseline_label: str
    candidate_label: str
    pairing: Pairing
    sessions: int
    effects: list[Effect]
    resamples: int
    seed: int
    clock: str
    skip_first_s: float
    notes: list[str] = field(default_factory=list)
    """What a reader must know: conditions that differ, unmatched or failed requests."""

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        return verdict_sentence(self)

    def as_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "baseline": self.baseline_label,
            "candidate": self.candidate_label,
            "verdict": self.sentence,
            "pairs": len(self.pairing.keys),
            "pairs_ok_in_both": self.pairing.both_ok,
            "sessions": self.sessions,
            "failed": {"baseline": self.pairing.failed_baseline, "candidate": self.pairing.failed_candidate},
            "unmatched": {"baseline": self.pairing.unmatched_baseline, "candidate": self.pairing.unmatched_candidate},
            "skip_first_s": self.skip_first_s,
            "skipped": self.pairing.skipped,
            "clock": self.clock,
            "resamples": self.resamples,
            "seed": self.seed,
            "correction": "holm",
            "alpha": ALPHA,
            "effects": [effect.as_json() for effect in self.effects],
            "notes": self.notes,
        }


def keyed(run: Run) -> dict[Key, RequestRecord]:
    """Records by (session_id, turn, chat_id, occurrence)."""
    seen: dict[tuple[str, int, int], int] = {}
    result: dict[Key, RequestRecord] = {}
    for record in run.records:
        key = (record.session_id, record.turn, record.chat_id)
        occurrence = seen.get(key, 0)
        seen[key] = occurrence + 1
        result[(*key, occurrence)] = record
    return result


def pair(baseline: Run, candidate: Run, *, skip_first_s: float = 0.0) -> Pairing:
    """Match the requests of two runs."""
    left, right = keyed(baseline), keyed(candidate)
    shared = [key for key in left if key in right]
    kept = [key for key in shared if min(left[key].scheduled_s, right[key].scheduled_s) >= skip_first_s]
    return Pairing(
        keys=kept,
        baseline=[left[key] for key in kept],
        candidate=[right[key] for key in kept],
        unmatched_baseline=len(left) - len(shared),
        unmatched_candidate=len(right) - len(shared),
        skipped=len(shared) - len(kept),
    )


def silence_as_zero(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """The records with unknown cached tokens as 0, provided the engines told them for some request; see the rules."""
    if all(record.cached_tokens is None for record in records):
        return list(records)
    return [
        msgspec.structs.replace(record, cached_tokens=0) if record.ok and record.cached_tokens is None else record
        for record in records
    ]


def unlike(baseline: Run, candidate: Run) -> list[str]:
    """Why the two runs must not be compared; empty when they may be."""
    reasons = []
    for name in _MUST_AGREE:
        before, after = getattr(baseline.header, name), getattr(candidate.header, name)
        if before != after:
            reasons.append(f"{name} differs ({before} against {after})")
    for run, side in ((baseline, "baseline"), (candidate, "candidate")):
        if run.end is None:
            reasons.append(f"the {side} run '{run.header.label}' is not complete (its last line is missing)")
    return reasons


def compare(
    baseline: Run,
    candidate: Run,
    *,
    resamples: int = 2000,
    seed: int = 0,
    force: bool = False,
    skip_first_s: float = 0.0,
    clock: str = "sent",
    labels: tuple[str, str] | None = None,
) -> Comparison:
    """Compare two runs, paired by request, with 95 % intervals by bootstrap over sessions.

    Args:
        baseline: the run compared with.
        candidate: the run compared.
        resamples: bootstrap resamples, at least `MIN_RESAMPLES`.
        seed: seed of the resamples.
        force: compare runs of unlike conditions all the same; the differences become notes.
        skip_first_s: engine seconds at the start of the run to leave out of both arms.
        clock: "sent" or "scheduled", where TTFT and E2E start.
        labels: names to use instead of the runs' own.

    Raises:
        ComparisonError: conditions differ and ``force`` is False, no request is in both runs, or an option is wrong.
    """
    if clock not in CLOCKS:
        raise ComparisonError(f"clock must be one of {', '.join(CLOCKS)}, not '{clock}'")
    if resamples < MIN_RESAMPLES:
        raise ComparisonError(f"{resamples} resamples cannot show any difference; use at least {MIN_RESAMPLES}")
    names = labels or (baseline.header.label or "baseline", candidate.header.label or "candidate")
    notes = unlike(baseline, candidate)
    if notes and not force:
        raise ComparisonError(
            f"'{names[0]}' and '{names[1]}' are not runs of the same experiment: {'; '.join(notes)}. "
            "Replay both under the same conditions, or pass --force to compare all the same."
        )
    for name in _WORTH_TELLING:
        before, after = getattr(baseline.header, name), getattr(candidate.header, name)
        if before != after:
            notes.append(f"{name} differs ({before} against {after})")
    pairing = pair(baseline, candidate, skip_first_s=skip_first_s)
    if not pairing.keys:
        raise ComparisonError(
            f"'{names[0]}' and '{names[1]}' share no request (session_id, turn, chat_id)"
            + (f" after the first {skip_first_s:g} s" if pairing.skipped else "")
            + ": check that both replay the same trace."
        )
    notes += _left_over(pairing, names)
    sessions, session_of = np.unique([key[0] for key in pairing.keys], return_inverse=True)
    bootstrap = SessionBootstrap(session_of.astype(np.int64), len(sessions), resamples=resamples, seed=seed)
    effects = _correct(_effects(pairing, bootstrap, clock))
    return Comparison(names[0], names[1], pairing, len(sessions), effects, resamples, seed, clock, skip_first_s, notes)


def _left_over(pairing: Pairing, names: tuple[str, str]) -> list[str]:
    notes = []
    for name, unmatched, failed in (
        (names[0], pairing.unmatched_baseline, pairing.failed_baseline),
        (names[1], pairing.unmatched_candidate, pairing.failed_candidate),
    ):
        if unmatched:
            notes.append(f"{unmatched} requests of '{name}' are not in the other run and were left out")
        if failed:
            notes.append(f"{failed} paired requests failed in '{name}'; their times are left out of both arms")
    if pairing.skipped:
        notes.append(f"{pairing.skipped} pairs scheduled in the first seconds were left out as asked")
    return notes


def _column(records: list[RequestRecord], value: Callable[[RequestRecord], float | int | None]) -> FloatArray:
    return np.array([np.nan if (found := value(record)) is None else found for record in records], dtype=np.float64)


def _effects(pairing: Pairing, bootstrap: SessionBootstrap, clock: str) -> list[Effect]:
    ok_before = np.array([record.ok for record in pairing.baseline])
    ok_after = np.array([record.ok for record in pairing.candidate])
    suffix = "_scheduled_s" if clock == "scheduled" else "_s"
    effects: list[Effect] = []
    for name, attribute in (("TTFT", "ttft" + suffix), ("TPOT", "tpot_s"), ("E2E", "e2e" + suffix)):
        before, after = (
            _column(side, lambda record, attribute=attribute: getattr(record, attribute))  # type: ignore[misc]
            for side in (pairing.baseline, pairing.candidate)
        )
        keep = ok_before & ok_after & np.isfinite(before) & np.isfinite(after)
        effects += _quantile_effects(name, before, after, keep, bootstrap)
    effects.append(_cached_share(pairing, ok_before & ok_after, bootstrap))
    everything = np.ones(len(ok_before), dtype=np.bool_)
    effects.append(
        _ratio_effect(
            "success rate",
            (ok_before.astype(float), ok_after.astype(float)),
            (everything.astype(float), everything.astype(float)),
            everything,
            bootstrap,
        )
    )
    return effects


def _quantile_effects(
    name: str, before: FloatArray, after: FloatArray, keep: NDArray[np.bool_], bootstrap: SessionBootstrap
) -> list[Effect]:
    levels = np.array(QUANTILES)
    requests, sessions = int(keep.sum()), len(np.unique(bootstrap.session_of[keep]))
    resampled = (bootstrap.quantiles(before, keep, levels), bootstrap.quantiles(after, keep, levels))
    effects = []
    for column, level in enumerate(QUANTILES):
        beyond = round(requests * (1 - level), 6)
        note = "" if beyond >= MIN_TAIL_REQUESTS else f"only {beyond:g} of {requests} requests lie beyond it"
        points = tuple(float(np.quantile(side[keep], level)) if requests else np.nan for side in (before, after))
        effects.append(
            effect_of(
                f"{name} p{level * 100:g}",
                (points[0], points[1]),
                (resampled[0][:, column], resampled[1][:, column]),
                requests=requests,
                sessions=sessions,
                note=note if requests else "no request has a value in both runs",
            )
        )
    return effects


def _cached_share(pairing: Pairing, both_ok: NDArray[np.bool_], bootstrap: SessionBootstrap) -> Effect:
    before, after = silence_as_zero(pairing.baseline), silence_as_zero(pairing.candidate)
    cached_a, cached_b = (_column(side, lambda record: record.cached_tokens) for side in (before, after))
    prompt_a, prompt_b = (_column(side, lambda record: record.prompt_tokens) for side in (before, after))
    keep = both_ok & np.isfinite(cached_a) & np.isfinite(cached_b) & np.isfinite(prompt_a) & np.isfinite(prompt_b)
    note = "" if keep.any() else "an engine did not report cached tokens"
    return _ratio_effect("APC", (cached_a, cached_b), (prompt_a, prompt_b), keep, bootstrap, note=note)


def _ratio_effect(
    name: str,
    numerators: tuple[FloatArray, FloatArray],
    denominators: tuple[FloatArray, FloatArray],
    keep: NDArray[np.bool_],
    bootstrap: SessionBootstrap,
    note: str = "",
) -> Effect:
    points, resampled = [], []
    with np.errstate(divide="ignore", invalid="ignore"):
        for top, bottom in zip(numerators, denominators, strict=True):
            points.append(float(np.sum(top[keep]) / np.sum(bottom[keep])))
            resampled.append(bootstrap.sums(top, keep) / bootstrap.sums(bottom, keep))
    return effect_of(
        name,
        (points[0], points[1]),
        (resampled[0], resampled[1]),
        requests=int(keep.sum()),
        sessions=len(np.unique(bootstrap.session_of[keep])),
        lower_is_better=False,
        unit="ratio",
        note=note,
    )


def _correct(effects: list[Effect]) -> list[Effect]:
    adjusted = holm(np.array([effect.p_value for effect in effects]))
    corrected = []
    for effect, p_adjusted in zip(effects, adjusted, strict=True):
        verdict = effect.verdict
        if verdict is Verdict.NOT_DISTINGUISHABLE and p_adjusted < ALPHA:
            verdict = Verdict.BETTER if (effect.change < 0) == effect.lower_is_better else Verdict.WORSE
        corrected.append(replace(effect, p_adjusted=float(p_adjusted), verdict=verdict))
    return corrected


def verdict_sentence(comparison: Comparison) -> str:
    """One sentence: what is better and worse by how much, what cannot be told apart, what was not judged."""
    groups: dict[Verdict, list[str]] = {verdict: [] for verdict in Verdict}
    for effect in comparison.effects:
        told = effect.verdict in (Verdict.BETTER, Verdict.WORSE)
        groups[effect.verdict].append(f"{effect.metric} ({_extent(effect)})" if told else effect.metric)
    parts = []
    if groups[Verdict.BETTER]:
        parts.append(f"better on {', '.join(groups[Verdict.BETTER])}")
    if groups[Verdict.WORSE]:
        parts.append(f"worse on {', '.join(groups[Verdict.WORSE])}")
    if groups[Verdict.NOT_DISTINGUISHABLE]:
        same = "not distinguishable on "
        everything = not parts and not groups[Verdict.NOT_JUDGED]
        parts.append("not distinguishable" if everything else same + ", ".join(groups[Verdict.NOT_DISTINGUISHABLE]))
    if groups[Verdict.NOT_JUDGED]:
        parts.append(f"not judged: {', '.join(groups[Verdict.NOT_JUDGED])}")
    return f"{comparison.candidate_label} against {comparison.baseline_label}: {'; '.join(parts)}."


def _extent(effect: Effect) -> str:
    bounds = sorted((abs(effect.low) * 100, abs(effect.high) * 100))
    low, high = (f"{bound:.0f}" if bound >= 1 else f"{bound:.1f}" for bound in bounds)
    sign = "−" if effect.change < 0 else "+"
    return f"{sign}{low} %" if low == high else f"{sign}{low}–{high} %"
