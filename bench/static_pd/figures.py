"""Figures of every arm of ``static-pd``, over its repeats, from the records of the experiment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from launch.experiment.records.state import read_experiment
from policies.types import OffloadReason
from replayer.records.runs import RequestRecord, read_run

GAVE_UP_S = 600.0
"""Time after which the reports' clients counted a request as failed; simulated clients wait."""


class StaticPdArm(msgspec.Struct, frozen=True, kw_only=True):
    """One arm over all repeats; times in seconds, quantiles over all requests that were answered."""

    arm: str
    requests: int
    within_600_s: int
    """Answered within the time that the reports' clients waited."""
    late_tokens: tuple[int, int] | None
    """Shortest and longest prompt among those that took longer."""
    late_without_room: int
    """Those of the late ones that D had no room to receive."""
    ttft_p50_s: float
    ttft_p90_s: float
    tpot_p90_s: float
    e2e_p50_s: float
    e2e_p90_s: float
    hit_rate: float
    handed_off: int
    computed_on_d: int
    """Prompts that D had no room to receive and computed itself."""
    fell_back: int
    """Hand-offs that were given up: D computed the prompt."""


class StaticPdLoad(msgspec.Struct, frozen=True, kw_only=True):
    """All arms at one load."""

    load: str
    trace: str
    repeats: int
    arms: list[StaticPdArm]


class _Row(msgspec.Struct):
    request_id: str
    offload_reason: str | None = None
    prefill_instance: str | None = None


def figures_of(directory: Path) -> StaticPdLoad:
    """Figures of an experiment's directory, whose runs kept their breakdowns.

    Raises:
        ExperimentError: it is no experiment's directory.
        OSError: records are missing.
    """
    state = read_experiment(directory)
    replay = state.config["replay"] if isinstance(state.config.get("replay"), dict) else {}
    speed, sessions = replay.get("time_scale", 1), replay.get("max_inflight_sessions")
    load = f"{speed:g} x, {sessions} sessions" if sessions else f"{speed:g} x"
    paths: dict[str, list[Path]] = {}
    for path in sorted((directory / "arms").glob("*/*/run.jsonl")):
        paths.setdefault(path.parent.parent.name, []).append(path)
    arms = [_arm(name, paths[name]) for name in state.config["arms"]]
    trace = read_run(paths[arms[0].arm][0]).header.trace
    return StaticPdLoad(load=load, trace=trace, repeats=len(paths[arms[0].arm]), arms=arms)


def _arm(name: str, paths: Sequence[Path]) -> StaticPdArm:
    records: list[RequestRecord] = []
    late: list[RequestRecord] = []
    reasons: Counter[str] = Counter()
    handed_off = late_without_room = 0
    for path in paths:
        run = read_run(path).records
        records += run
        slow = {each.request_id: each for each in run if each.e2e_s is None or each.e2e_s > GAVE_UP_S}
        late += slow.values()
        for line in (path.parent / "breakdown.jsonl").read_bytes().splitlines():
            row = msgspec.json.decode(line, type=_Row)
            reasons[row.offload_reason or ""] += 1
            handed_off += row.prefill_instance is not None
            late_without_room += row.request_id in slow and row.offload_reason == OffloadReason.NO_ROOM_ON_D
    good = [each for each in records if each.ok and each.e2e_s is not None and each.ttft_s is not None]
    ttft, e2e = [each.ttft_s or 0.0 for each in good], [each.e2e_s or 0.0 for each in good]
    tpot = [each.tpot_s for each in good if each.tpot_s is not None]
    prompt = sum(each.prompt_tokens or 0 for each in good)
    return StaticPdArm(
        arm=name,
        requests=len(records),
        within_600_s=len(records) - len(late),
        late_tokens=(min(each.input_length for each in late), max(each.input_length for each in late))
        if late
        else None,
        late_without_room=late_without_room,
        ttft_p50_s=_quantile(ttft, 0.5),
        ttft_p90_s=_quantile(ttft, 0.9),
        tpot_p90_s=_quantile(tpot, 0.9),
        e2e_p50_s=_quantile(e2e, 0.5),
        e2e_p90_s=_quantile(e2e, 0.9),
        hit_rate=float(f"{sum(each.cached_tokens or 0 for each in good) / prompt:.4g}"),
        handed_off=handed_off,
        computed_on_d=reasons[OffloadReason.NO_ROOM_ON_D],
        fell_back=sum(count for reason, count in reasons.items() if reason.startswith("fell_back")),
    )


def _quantile(values: Sequence[float], level: float) -> float:
    return float(f"{np.quantile(values, level):.4g}")


def table(loads: Sequence[StaticPdLoad]) -> list[str]:
    """A Markdown table with a row per load and arm."""
    lines = [
        "| load | arm | over 600 s, of these no room on D | TTFT p50 / p90, s | TPOT p90, ms | E2E p50 / p90, s "
        "| hit rate | handed off | no room on D | fell back |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {load.load} | `{arm.arm}` | {arm.requests - arm.within_600_s}, {arm.late_without_room} "
        f"| {arm.ttft_p50_s:.2f} / {arm.ttft_p90_s:.1f} | {1000 * arm.tpot_p90_s:.0f} "
        f"| {arm.e2e_p50_s:.1f} / {arm.e2e_p90_s:.0f} | {arm.hit_rate:.2f} | {arm.handed_off} | {arm.computed_on_d} "
        f"| {arm.fell_back} |"
        for load in loads
        for arm in load.arms
    ]
    return lines
