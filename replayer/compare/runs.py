"""Comparison of runs of one trace, request by request: changes, intervals, verdicts.

Rules
- Requests are matched by (session_id, turn, chat_id); see `replayer.compare.pairing`.
- The start and the end of the plan are left out of every arm by rule; see `replayer.compare.window`.
- Times are compared over requests that succeeded in every run of both arms; how many did not is part of the result,
  and the success rate and goodput are compared over all matched requests.
- APC is cached prompt tokens over prompt tokens. A request without reported cached tokens counts as zero, provided its
  engine reported them for others (vLLM up to 0.18 omits zero).
- A run on a fleet that was not fresh is refused; see `replayer.compare.freshness`.
- A difference smaller than the noise floor is never called one; see `replayer.compare.noise_floor`.
"""

from __future__ import annotations

from collections.abc import Sequence

from replayer.compare.arms import ArmRun, ArmRuns, unique
from replayer.compare.assumptions import ASSUMED_FLOOR
from replayer.compare.comparison import CompareOptions, Comparison
from replayer.compare.conditions import ComparisonError, recorded_warnings, refuse_or_note, refuse_without_classes
from replayer.compare.family import Family
from replayer.compare.goodput import Slo
from replayer.compare.pairing import CLOCKS, silence_as_zero
from replayer.records.classes import PlannedClass
from replayer.records.runs import Run

__all__ = ["CompareOptions", "Comparison", "ComparisonError", "compare", "compare_arms", "silence_as_zero"]

MIN_RESAMPLES = 1000
"""Fewer leave the standard error itself too uncertain (2 % at 1,000)."""


def compare(
    baseline: Run,
    candidate: Run,
    *,
    resamples: int = 2000,
    seed: int = 0,
    force: bool = False,
    skip_first_s: float | None = 0.0,
    skip_last_s: float | None = 0.0,
    clock: str = "sent",
    labels: tuple[str, str] | None = None,
    slo: Slo | None = None,
    assumed_floor: float = ASSUMED_FLOOR,
    only_class: PlannedClass | None = None,
) -> Comparison:
    """Compare two runs, paired by request, with 95 % intervals by bootstrap over sessions.

    The arguments are those of `CompareOptions`; ``labels`` are names to use instead of the runs' own.

    Raises:
        ComparisonError: conditions differ and ``force`` is False, no request is in both runs, or an option is wrong.
    """
    names = labels or (baseline.header.label or "baseline", candidate.header.label or "candidate")
    options = CompareOptions(
        resamples=resamples,
        seed=seed,
        force=force,
        skip_first_s=skip_first_s,
        skip_last_s=skip_last_s,
        clock=clock,
        slo=slo or Slo(),
        assumed_floor=assumed_floor,
        only_class=only_class,
    )
    arms = [ArmRuns(name, [ArmRun(run)]) for name, run in zip(names, (baseline, candidate), strict=True)]
    [found] = compare_arms(unique(arms), options)
    return found


def compare_arms(
    arms: Sequence[ArmRuns], options: CompareOptions | None = None, *, same: Sequence[ArmRuns] = ()
) -> list[Comparison]:
    """Compare arms with the first of them; every arm may have several runs.

    Args:
        arms: the baseline, then at least one candidate.
        options: see `CompareOptions`.
        same: groups of replicates that are in no arm (A/A runs), used for the noise floor only.

    Returns:
        One comparison for each candidate; all of them are one family for the correction.

    Raises:
        ComparisonError: conditions differ or a fleet was warm and ``force`` is False, arms share no request, no request
            is of the class that is asked for, or an option is wrong.
    """
    options = options or CompareOptions()
    _check(arms, options)
    notes = refuse_or_note([*arms, *same], options.trace, force=options.force)
    if options.only_class is not None:
        refuse_without_classes([*arms, *same])
    short, full = recorded_warnings([*arms, *same])
    return Family(arms, same, options, [*notes, *short], full).comparisons()


def _check(arms: Sequence[ArmRuns], options: CompareOptions) -> None:
    if len(arms) < 2:
        raise ComparisonError("a comparison needs two arms: a baseline and a candidate")
    if len({arm.label for arm in arms}) < len(arms):
        raise ComparisonError("two arms have the same name; name them with --arm NAME=RUN.jsonl[,RUN.jsonl...]")
    if options.clock not in CLOCKS:
        raise ComparisonError(f"clock must be one of {', '.join(CLOCKS)}, not '{options.clock}'")
    if options.resamples < MIN_RESAMPLES:
        raise ComparisonError(f"{options.resamples} resamples cannot show any difference; use at least {MIN_RESAMPLES}")
    if options.assumed_floor < 0:
        raise ComparisonError("the assumed noise floor must not be below 0; 0 assumes that runs repeat exactly")
    try:
        options.slo.check()
    except ValueError as error:
        raise ComparisonError(str(error)) from error
