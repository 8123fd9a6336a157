"""The table of an offloading experiment, made from its kept records only."""

from __future__ import annotations

import gzip
import tempfile
from collections import Counter
from collections.abc import Sequence
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from launch.arm import BREAKDOWN_FILE, RUN_FILE
from replayer.compare.arms import ArmRun, ArmRuns, unique
from replayer.compare.runs import CompareOptions, Comparison, compare_arms
from replayer.compare.statistics.tests import Verdict
from replayer.records.runs import Run, read_run
from replayer.records.summary import Quantiles, summarise

ARM_FILE = "arm.json"
METRICS = ("TTFT p50", "TTFT p90", "TPOT p50", "TPOT p90", "E2E p50", "E2E p90")
"""The effects shown, by their names in `replayer.compare`."""
RESAMPLES = 4000


class ArmNote(msgspec.Struct, kw_only=True):
    """Description of an arm, kept beside its records (``arm.json``)."""

    label: str
    planner: str
    load: float
    policy: str
    fleet: str
    instances: int
    hardware: str
    skip_first_s: float
    started_unix_s: float
    transport: str
    warnings: list[str] = msgspec.field(default_factory=list)


class KeptArm(msgspec.Struct, kw_only=True):
    """An arm as read back."""

    repeat: str
    """Name of the folder that holds the arms of one repeat."""
    note: ArmNote
    run: Run
    rows: list[dict[str, Any]]


def read_arms(folder: Path) -> list[KeptArm]:
    """All arms kept in a folder, or in its sub-folders (one for each repeat), in the order they ran.

    Raises:
        FileNotFoundError: the folder has no arm.
    """
    arms = []
    for note_path in sorted([*folder.glob(f"*/{ARM_FILE}"), *folder.glob(f"*/*/{ARM_FILE}")]):
        packed = note_path.parent
        with tempfile.TemporaryDirectory() as scratch:
            plain = Path(scratch) / RUN_FILE
            plain.write_bytes(gzip.decompress((packed / f"{RUN_FILE}.gz").read_bytes()))
            run = read_run(plain)
        lines = gzip.decompress((packed / f"{BREAKDOWN_FILE}.gz").read_bytes()).splitlines()
        arms.append(
            KeptArm(
                repeat=packed.parent.name,
                note=msgspec.json.decode(note_path.read_bytes(), type=ArmNote),
                run=run,
                rows=[msgspec.json.decode(line) for line in lines],
            )
        )
    if not arms:
        raise FileNotFoundError(f"no arm in {folder}: expected sub-folders with {ARM_FILE}")
    return sorted(arms, key=lambda arm: arm.note.started_unix_s)


def markdown(folder: Path) -> str:
    """Tables by load: measurements of each arm, and differences from the baseline, paired by request."""
    arms = read_arms(folder)
    planners = [arm.note.planner for arm in arms]
    baseline_name = "never" if "never" in planners else planners[0]
    parts = []
    for load in sorted({arm.note.load for arm in arms}):
        at_load = [arm for arm in arms if arm.note.load == load]
        at_load.sort(key=lambda arm: (arm.note.planner != baseline_name, arm.note.started_unix_s))
        parts.append(_load_section(load, at_load, baseline_name))
    return "\n\n".join(parts)


def _load_section(load: float, arms: Sequence[KeptArm], baseline_name: str) -> str:
    note, offered = arms[0].note, arms[0].run.header.offered
    lines = [
        f"**{load:g} x the trace's speed**: {offered.get('requests')} requests of {offered.get('sessions')} sessions, "
        f"policy `{note.policy}`, {note.instances} instances ({note.hardware}), KV over {note.transport}; "
        f"the first {note.skip_first_s:g} s left out of the comparison.",
        "",
        "| planner | repeat | ok | TTFT p50 / p90, s | TPOT p50 / p90, ms | E2E p50 / p90, s | APC | offloaded "
        "| fell back |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
        *(_measured(arm) for arm in arms),
    ]
    differences = _differences(arms, baseline_name)
    if differences:
        lines += [
            "",
            f"| against `{baseline_name}` | requests | " + " | ".join(METRICS) + " |",
            "| --- | ---: |" + " ---: |" * len(METRICS),
            *differences,
        ]
    predicted = [line for arm in arms if (line := _predictions(arm))]
    return "\n".join([*lines, *(["", *predicted] if predicted else [])])


def _differences(arms: Sequence[KeptArm], baseline_name: str) -> list[str]:
    """Each arm against the baseline of its own repeat, all repeats of a planner together, and baseline on baseline."""
    baselines = {arm.repeat: arm for arm in arms if arm.note.planner == baseline_name}
    lines = []
    for name in dict.fromkeys(arm.note.planner for arm in arms if arm.note.planner != baseline_name):
        pairs = [(baselines[arm.repeat], arm) for arm in arms if arm.note.planner == name and arm.repeat in baselines]
        many = len(pairs) > 1
        for baseline, arm in pairs:
            lines.append(_difference([(baseline, arm)], f"`{name}`" + (f", {arm.repeat}" if many else "")))
        if many:
            lines.append(_difference(pairs, f"`{name}`, all repeats"))
    first, *others = baselines.values()
    lines += [
        _difference([(first, each)], f"`{baseline_name}`, {each.repeat} against {first.repeat}") for each in others
    ]
    return lines


def compared(pairs: Sequence[tuple[KeptArm, KeptArm]]) -> Comparison:
    """Arms against their baselines, paired by request; several repeats are runs of the same two arms."""
    options = CompareOptions(resamples=RESAMPLES, skip_first_s=pairs[0][0].note.skip_first_s)
    labels = [each.run.header.label or side for each, side in zip(pairs[0], ("baseline", "candidate"), strict=True)]
    arms = [
        ArmRuns(label, [ArmRun(pair[side].run, repeat=pair[side].repeat) for pair in pairs])
        for side, label in enumerate(labels)
    ]
    [found] = compare_arms(unique(arms), options)
    return found


def _pair(quantiles: Quantiles, digits: int, unit: float = 1.0) -> str:
    values = (quantiles.p50, quantiles.p90)
    return " / ".join("–" if value is None else f"{unit * value:.{digits}f}" for value in values)


def _measured(arm: KeptArm) -> str:
    summary = summarise(arm.run)
    total = summary.total
    apc = "–" if summary.apc is None else f"{summary.apc:.3f}"
    fell_back = Counter(
        row["offload_reason"] for row in arm.rows if (row.get("offload_reason") or "").startswith("fell_back")
    )
    parts = ", ".join(f"{count} {reason.removeprefix('fell_back_')}" for reason, count in sorted(fell_back.items()))
    return (
        f"| `{arm.note.planner}` | {arm.repeat} | {summary.ok}/{summary.requests} "
        f"| {_pair(total.ttft_s, 3)} | {_pair(total.tpot_s, 1, 1e3)} | {_pair(total.e2e_s, 2)} "
        f"| {apc} | {summary.offloaded} | {parts or '0'} |"
    )


def _difference(pairs: Sequence[tuple[KeptArm, KeptArm]], title: str) -> str:
    comparison = compared(pairs)
    effects = {effect.metric: effect for effect in comparison.effects}
    cells = []
    for name in METRICS:
        effect = effects[name]
        mark = {Verdict.BETTER: " **better**", Verdict.WORSE: " **worse**"}.get(effect.verdict, "")
        cells.append(f"{100 * effect.change:+.0f} % [{100 * effect.low:+.0f}, {100 * effect.high:+.0f}]{mark}")
    return f"| {title} | {len(comparison.pairing.keys)} | " + " | ".join(cells) + " |"


def _predictions(arm: KeptArm) -> str:
    """Accuracy of the cost models' predictions for the legs of this arm's hand-offs."""
    parts = []
    for leg in ("prefill", "transfer"):
        legs = [row["legs"][leg] for row in arm.rows if leg in row.get("legs", {})]
        ratios = [each["actual_s"] / each["predicted_s"] for each in legs if each["predicted_s"] > 0]
        if ratios:
            off = exp(median(abs(log(ratio)) for ratio in ratios))
            took = median(each["actual_s"] for each in legs)
            parts.append(f"{leg} leg median {took:.2f} s, predicted within a factor of {off:.2f} in half the cases")
    return f"- `{arm.note.planner}`, {arm.repeat}: {'; '.join(parts)}." if parts else ""
