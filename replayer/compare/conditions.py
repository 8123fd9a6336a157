"""Runs that must not be compared: other conditions, a run cut off, a fleet that was not fresh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from math import isclose
from pathlib import Path

import msgspec

from replayer.compare.arms import ArmRun, ArmRuns
from replayer.compare.freshness import FRESH_FILE, engines_of, stale_reasons
from replayer.records.counted import counted
from replayer.records.runs import RequestRecord, Run
from replayer.traces.trace import Trace

_MUST_AGREE = {
    "trace_sha256": "",
    "time_scale": "--arrival-speed ",
    "think_scale": "--think-speed ",
    "clock_scale": "--engine-speed ",
    "max_inflight_sessions": "",
    "request_limit": "",
}
"""Fields of the header, with the option where that has another name."""
_MUST_AGREE_OPTIONS = ("idle_gap_cap_s", "block_tokens", "prompt_mode")
_PLANNED = ("requests", "sessions", "span_s", "prompt_tokens_per_s", "output_tokens_per_s", "ideal_apc")
"""Figures of the offered load that differ wherever the plan does, as when the trace was loaded with other options."""
_WORTH_TELLING = ("model", "warmroute_version")
_WORTH_TELLING_OPTIONS = (
    "instances",
    "prefill_instances",
    "kv_capacity_tokens",
    "max_num_seqs",
    "scheduling_policy",
    "long_prefill_token_threshold",
    "max_num_batched_tokens",
    "max_model_len",
    "transport",
    "slowdown",
    "speeds",
    "arrival_jitter_s",
    "speed_sigma",
    "max_hold_s",
    "timeout_s",
)
"""Of the fleet and the client: runs that differ in them compare more than policies."""

_SILENT_REQUESTS = 10
"""So many requests of one instance without a single hit are more likely unreported hits than none."""


class ComparisonError(ValueError):
    """Runs that must not be compared; the message has reason and remedy."""


def refuse_or_note(arms: Sequence[ArmRuns], trace: Trace | None, *, force: bool) -> list[str]:
    """Check all runs against the first one and for freshness.

    Args:
        arms: the baseline, candidates, and A/A groups.
        trace: the replayed trace, where it is available.
        force: do not refuse.

    Returns:
        Warnings for the reader, with the reasons against comparing when ``force`` overrides them.

    Raises:
        ComparisonError: there are reasons against it and ``force`` is False.
    """
    leader = arms[0].runs[0].run
    if trace is not None and leader.header.trace_sha256 and trace.sha256 != leader.header.trace_sha256:
        raise ComparisonError(
            f"{trace.name} is not the trace that was replayed (SHA-256 {trace.sha256[:12]}, the runs say "
            f"{leader.header.trace_sha256[:12]}); give the file that was"
        )
    named = _names(arms)
    unlike = list(chain.from_iterable(_unlike(leader, one.run, named[0][0], name) for name, one in named))
    if unlike and not force:
        raise ComparisonError(
            f"{_listed(named)} are not runs of the same experiment: {'; '.join(unlike)}. "
            "Replay all under the same conditions, or pass --force to compare anyway."
        )
    repeated = list(chain.from_iterable(_repeated(arm) for arm in arms))
    if repeated and not force:
        raise ComparisonError(
            f"{'; '.join(repeated)}. They would count as runs without any noise between them: give --arm one of "
            "them, simulate with --arrival-jitter-s or --speed-sigma and another --seed for each repeat, or pass "
            "--force to compare anyway."
        )
    resumed = [
        f"{name} was resumed after {counted(one.run.resumed_after, 'request')}, so that its engines' caches and load "
        "are not those of an unbroken run"
        for name, one in named
        if one.run.resumed_after
    ]
    if resumed and not force:
        raise ComparisonError(f"{'; '.join(resumed)}. Replay it again, or pass --force to compare anyway.")
    warm = [*chain.from_iterable(_warm(name, one, trace) for name, one in named), *_reused(named)]
    if warm and not force:
        raise ComparisonError(
            f"{'; '.join(warm)}. A warm arm's figures are not a policy's: restart its engines and replay it, "
            "or pass --force to compare anyway."
        )
    # Arms of an experiment have the fleets that its file gives them.
    declared = all(arm.configuration for arm in arms)
    return [
        *unlike,
        *repeated,
        *resumed,
        *warm,
        *_shared(named),
        *_short(named),
        *_silent(named),
        *_worth_telling(named, () if declared else _WORTH_TELLING_OPTIONS),
    ]


def refuse_without_classes(arms: Sequence[ArmRuns]) -> None:
    """Refuse runs whose records lack the tokens that a request's class by the trace is computed from.

    Raises:
        ComparisonError: there is such a run.
    """
    older = [name for name, one in _names(arms) if any(each.own_prefix_tokens is None for each in one.run.records)]
    if older:
        raise ComparisonError(
            f"a class needs the new tokens of each request by the trace, and records of {', '.join(older)} lack "
            "own_prefix_tokens, as an older version wrote them. Replay or simulate again, or compare with --class all."
        )


def recorded_warnings(arms: Sequence[ArmRuns]) -> tuple[list[str], list[str]]:
    """Warnings about the runs of an experiment: changed files, and those that it recorded itself.

    Returns:
        Short ones for the verdict, which name the runs, and all of them in full.
    """
    named = _names(arms)
    invalid = [(name, one.invalid[0]) for name, one in named if one.invalid]
    others = [name for name, one in named if one.warnings]
    short = [f"{name}: {one.changed}" for name, one in named if one.changed]
    if invalid:
        names = ", ".join(name for name, _ in invalid)
        short.append(
            f"{len(invalid)} of {len(named)} runs have invalid figures by the experiment's own record: {names}. "
            f"{invalid[0][0]}: {invalid[0][1]}"
        )
    if others:
        short.append(f"The experiment recorded {'further ' if invalid else ''}warnings of {', '.join(others)}")
    return short, [f"{name}: {warning}" for name, one in named for warning in (*one.invalid, *one.warnings)]


def _names(arms: Sequence[ArmRuns]) -> list[tuple[str, ArmRun]]:
    named = []
    for arm in arms:
        for number, one in enumerate(arm.runs, 1):
            several = f" (run {one.repeat or number})" if len(arm.runs) > 1 else ""
            named.append((f"'{arm.label}'{several}", one))
    return named


def _listed(named: Sequence[tuple[str, ArmRun]]) -> str:
    names = [name for name, _ in named]
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _unlike(leader: Run, run: Run, leader_name: str, name: str) -> list[str]:
    reasons = []
    for field, option in _MUST_AGREE.items():
        before, after = getattr(leader.header, field), getattr(run.header, field)
        if before != after:
            reasons.append(f"{field} differs ({option}{before} against {after}, in {leader_name} and {name})")
    for option in _MUST_AGREE_OPTIONS:
        before, after = leader.header.options.get(option), run.header.options.get(option)
        # Earlier versions did not record all of them.
        if before is not None and after is not None and before != after:
            reasons.append(f"{option} differs ({before} against {after}, in {leader_name} and {name})")
    if not reasons:
        reasons += _other_plan(leader, run, leader_name, name)
    if run.incomplete:
        reasons.append(f"the run {name} is not complete ({run.incomplete})")
    return reasons


def _other_plan(leader: Run, run: Run, leader_name: str, name: str) -> list[str]:
    """Offered loads that differ although trace and scales agree; runs of a stream have none."""
    before, after = leader.header.offered, run.header.offered
    for figure in _PLANNED:
        one, other = before.get(figure), after.get(figure)
        if one is not None and other is not None and not isclose(one, other, rel_tol=1e-9):
            return [
                f"the offered load differs ({figure} {one:g} against {other:g}, in {leader_name} and {name}), as with "
                "other --sessions, --chain, --time-unit or --block-tokens"
            ]
    return []


def _repeated(arm: ArmRuns) -> list[str]:
    """Replicates with the same times throughout, which show no noise between runs where there may be some."""
    seen: dict[tuple[object, ...], str] = {}
    for number, one in enumerate(arm.runs, 1):
        name = one.repeat or str(number)
        times = tuple((record.request_id, record.sent_s, record.finished_s) for record in one.run.records)
        other = seen.setdefault(times, name)
        if other != name:
            return [
                f"runs {other} and {name} of '{arm.label}' are equal in every time: a simulation without noise was "
                "repeated, or a file was copied"
            ]
    return []


def _shared(named: Sequence[tuple[str, ArmRun]]) -> list[str]:
    """Runs that stand for several arms, as one file or as copies: nothing is learned from comparing a run with itself.

    Runs with other headers are not among them: two policies may decide alike.
    """
    notes = []
    seen: dict[tuple[object, ...], tuple[str, ArmRun]] = {}
    for name, one in named:
        times = ((record.request_id, record.sent_s, record.finished_s) for record in one.run.records)
        other, first = seen.setdefault((msgspec.json.encode(one.run.header), *times), (name, one))
        if first is one:
            continue
        same_file = one.path is not None and first.path is not None and one.path.samefile(first.path)
        how = "are the same file" if same_file else "have the same content"
        notes.append(f"{other} and {name} {how}: a run is compared with itself, which shows no difference")
    return notes


def _warm(name: str, one: ArmRun, trace: Trace | None) -> list[str]:
    directory = one.path.parent if one.path is not None else None
    reasons = stale_reasons(one.run, directory=directory, trace=trace)
    if one.needs_proof and directory is not None and not (directory / FRESH_FILE).exists():
        reasons.append(f"there is no {FRESH_FILE} beside it, so nothing proves that its fleet was fresh")
    return [f"{name} was measured on a warm fleet: {'; '.join(reasons)}"] if reasons else []


def _reused(named: Sequence[tuple[str, ArmRun]]) -> list[str]:
    """Runs whose engines served another run as well; runs in one folder share one proof and are not looked at."""
    reasons = []
    seen: dict[str, tuple[str, Path]] = {}
    for name, one in named:
        if one.path is None:
            continue
        folder = one.path.parent.resolve()
        for engine in sorted(engines_of(folder)):
            other, elsewhere = seen.setdefault(engine, (name, folder))
            if elsewhere != folder:
                reasons.append(f"{name} was measured on a warm fleet: {engine} served {other} as well")
                break
    return reasons


def _short(named: Sequence[tuple[str, ArmRun]]) -> list[str]:
    """Answers that were cut short, as by a smaller model length, count as successful and end early."""
    counts = {name: sum(_is_short(record) for record in one.run.records) for name, one in named}
    if not any(counts.values()):
        return []
    listed = ", ".join(f"{count:,} in {name}" for name, count in counts.items() if count)
    return [f"answers shorter than requested: {listed}; E2E and times of sessions are of less work there"]


def _is_short(record: RequestRecord) -> bool:
    return record.ok and record.completion_tokens is not None and record.completion_tokens < record.output_length


def _silent(named: Sequence[tuple[str, ArmRun]]) -> list[str]:
    """Instances that never reported cached tokens where others did: their requests count as misses."""
    notes = []
    for name, one in named:
        good = [record for record in one.run.records if record.ok]
        unknown = Counter(record.instance or "an instance" for record in good if record.cached_tokens is None)
        silent = sorted(instance for instance, requests in unknown.items() if requests >= _SILENT_REQUESTS)
        if silent and len(good) > unknown.total():
            requests = sum(unknown[instance] for instance in silent)
            notes.append(
                f"{', '.join(silent)} reported no cached tokens in {counted(requests, 'request')} of {name}, which "
                "count as 0 cached (vLLM: --enable-prompt-tokens-details on every engine)"
            )
    return notes


def _worth_telling(named: Sequence[tuple[str, ArmRun]], options: Sequence[str]) -> list[str]:
    notes = []
    for field in (*_WORTH_TELLING, *options):
        values: dict[str, str] = {}
        for name, one in named:
            found = one.run.header.options if field in options else msgspec.structs.asdict(one.run.header)
            if field in found:  # a replay does not record the fleet
                values.setdefault(_value(found[field]), name)
        if len(values) > 1:
            notes.append(f"{field} differs ({', '.join(f'{value} in {name}' for value, name in values.items())})")
    return notes


def _value(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "not set" if value is None else str(value)
