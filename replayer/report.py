"""One self-contained HTML page about one or more runs: tables, verdicts, figures and the conditions they hold under."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from replayer import figures
from replayer.compare import Comparison, ComparisonError, compare, silence_as_zero
from replayer.records import RequestRecord, Run
from replayer.statistics import FloatArray
from replayer.summary import Summary, quantiles, summarise

Row = dict[str, Any]


class BreakdownError(ValueError):
    """A breakdown file that cannot be read; the message names file and line."""


@dataclass(frozen=True)
class Arm:
    """One run in a report, with the proxy's breakdown rows where they were collected."""

    label: str
    run: Run
    breakdown: list[Row] | None = None
    warnings: list[str] = field(default_factory=list)
    """Reasons to distrust the arm's figures, shown at the top of the page."""


@dataclass(frozen=True)
class ArmSummary:
    """An arm in figures: the run's own summary, and where its requests went."""

    label: str
    summary: Summary
    """Over all requests; unknown cached tokens count as in `replayer.compare`."""
    requests_by_instance: dict[str, int]
    new_tokens_by_instance: dict[str, int]
    reasons: dict[str, int]

    def imbalance(self, loads: dict[str, int], instances: int) -> float:
        """Largest instance's load over the mean over ``instances``; 1 is even."""
        total = sum(loads.values())
        return max(loads.values()) * instances / total if total else float("nan")


def read_breakdown(path: str | Path) -> list[Row]:
    """Rows of the proxy's ``/breakdown?format=jsonl``.

    Raises:
        BreakdownError: a line is not a JSON object.
        OSError: the file cannot be read.
    """
    rows: list[Row] = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        if line.strip():
            try:
                rows.append(msgspec.json.decode(line, type=Row))
            except msgspec.MsgspecError as error:
                raise BreakdownError(f"{path}:{number}: not a breakdown row ({error})") from error
    return rows


def unique_labels(runs: Sequence[Run]) -> list[str]:
    """The runs' labels; a label used before gets a number, an empty one becomes "run"."""
    seen: Counter[str] = Counter()
    labels = []
    for run in runs:
        label = run.header.label or "run"
        seen[label] += 1
        labels.append(label if seen[label] == 1 else f"{label} ({seen[label]})")
    return labels


def values_of(records: Iterable[RequestRecord], attribute: str) -> FloatArray:
    """The known values of one attribute among the successful requests, as floats."""
    found = [getattr(record, attribute) for record in records if record.ok]
    return np.array([value for value in found if value is not None], dtype=np.float64)


def summarise_arm(label: str, run: Run) -> ArmSummary:
    """An arm's figures over all of its requests (the paired figures are the comparison's)."""
    run = run._replace(records=silence_as_zero(run.records))
    by_instance: Counter[str] = Counter()
    new_tokens: Counter[str] = Counter()
    for record in run.records:
        if record.ok and record.instance is not None:
            by_instance[record.instance] += 1
            new_tokens[record.instance] += record.new_tokens or 0
    return ArmSummary(
        label=label,
        summary=summarise(run),
        requests_by_instance=dict(by_instance),
        new_tokens_by_instance=dict(new_tokens),
        reasons=dict(Counter(record.reason or "not told" for record in run.records).most_common()),
    )


def compare_all(arms: Sequence[Arm], **options: Any) -> tuple[list[Comparison], list[str]]:
    """Every arm against the first: the comparisons, and why the others could not be made."""
    comparisons, refusals = [], []
    for arm in arms[1:]:
        try:
            comparisons.append(compare(arms[0].run, arm.run, labels=(arms[0].label, arm.label), **options))
        except ComparisonError as error:
            refusals.append(str(error))
    return comparisons, refusals


def against_leader(arms: Sequence[Arm], **options: Any) -> list[Comparison]:
    """The arms after the first against the one of them with the lowest E2E p50: who is really ahead.

    Empty with fewer than two such arms, or when they cannot be compared.
    """
    timed = [
        (arm, median)
        for arm in arms[1:]
        if (median := summarise_arm(arm.label, arm.run).summary.total.e2e_s.p50) is not None
    ]
    if len(timed) < 2:
        return []
    leader, _ = min(timed, key=lambda pair: pair[1])
    comparisons, _ = compare_all([leader, *(arm for arm, _ in timed if arm is not leader)], **options)
    return comparisons


def render(
    arms: Sequence[Arm],
    comparisons: Sequence[Comparison],
    *,
    title: str = "Replay report",
    remarks: Sequence[str] = (),
    among_the_best: Sequence[Comparison] = (),
) -> str:
    """The page as HTML text. Labels and every other text from the files are escaped.

    Args:
        arms: the runs, baseline first.
        comparisons: what `compare_all` or `compare` found.
        title: heading of the page.
        remarks: sentences shown above the tables, for example why a comparison was refused.
        among_the_best: the arms against the leader (`against_leader`); only their verdicts are shown.
    """
    summaries = [summarise_arm(arm.label, arm.run) for arm in arms]
    instances = sorted({name for summary in summaries for name in summary.requests_by_instance}, key=figures.natural)
    environment = Environment(
        loader=PackageLoader("replayer"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters.update(seconds=format_seconds, percent=format_percent, number=_number)
    return environment.get_template("report.html.j2").render(
        title=title,
        arms=arms,
        summaries=summaries,
        comparisons=comparisons,
        among_the_best=among_the_best,
        remarks=list(remarks),
        warnings=[(arm.label, warning) for arm in arms for warning in arm.warnings],
        instances=instances,
        reasons=sorted({reason for summary in summaries for reason in summary.reasons}),
        breakdowns=[(arm.label, _breakdown(arm.breakdown)) for arm in arms if arm.breakdown],
        conditions=_conditions(arms),
        drawings=[Markup(drawing) for drawing in _drawings(arms, summaries) if drawing],
        session=_session_shown(arms),
    )


def write_report(path: str | Path, html: str) -> Path:
    """Write the page, creating its folder; returns the path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(html, encoding="utf-8")
    return path


def _breakdown(rows: list[Row]) -> Row:
    stages: dict[str, list[float]] = {}
    for row in rows:
        for stage, value in (row.get("stages_ms") or {}).items():
            if isinstance(value, int | float):
                stages.setdefault(stage, []).append(float(value))
    return {
        "rows": len(rows),
        "outcomes": Counter(str(row.get("outcome")) for row in rows).most_common(),
        "offload": Counter(str(row.get("offload_reason")) for row in rows).most_common(),
        "retried": sum(bool(row.get("attempts")) for row in rows),
        "stages": [(stage, quantiles(values)) for stage, values in stages.items()],
    }


def _conditions(arms: Sequence[Arm]) -> list[tuple[str, list[str]]]:
    """Name and value of each condition: one value when all arms agree, one for each arm otherwise."""
    flat: list[dict[str, str]] = []
    for arm in arms:
        header = msgspec.to_builtins(arm.run.header)
        values = {name: value for name, value in header.items() if not isinstance(value, dict) and name != "kind"}
        for group in ("offered", "options"):
            values |= {f"{group}.{name}": value for name, value in header.get(group, {}).items()}
        flat.append({name: _text(value) for name, value in values.items()})
    names = list(dict.fromkeys(name for values in flat for name in values))
    rows = []
    for name in names:
        column = [values.get(name, "–") for values in flat]
        rows.append((name, column[:1] if len(set(column)) == 1 else column))
    return rows


def _session_shown(arms: Sequence[Arm]) -> str | None:
    """The session to draw: most turns among those that succeeded throughout in every arm; ties go to the first id."""
    turns: Counter[str] = Counter()
    failed: set[str] = set()
    for arm in arms:
        for record in arm.run.records:
            turns[record.session_id] += 1
            if not record.ok:
                failed.add(record.session_id)
    candidates = {session: count for session, count in turns.items() if session not in failed} or dict(turns)
    return min(candidates, key=lambda session: (-candidates[session], session), default=None)


def _spans(run: Run, session: str | None) -> list[figures.Span]:
    records = [
        record
        for record in run.records
        if record.session_id == session and record.sent_s is not None and record.finished_s is not None
    ]
    start = min((record.sent_s or 0.0 for record in records), default=0.0)
    return [
        figures.Span(
            turn=record.turn,
            sent_s=(record.sent_s or 0.0) - start,
            first_token_s=(record.first_token_s or record.finished_s or 0.0) - start,
            finished_s=(record.finished_s or 0.0) - start,
            instance=record.instance or "",
        )
        for record in records
    ]


def _by_turn(run: Run) -> dict[int, float]:
    turns: dict[int, list[float]] = {}
    for record in run.records:
        if record.ok and record.ttft_s is not None:
            turns.setdefault(record.turn, []).append(record.ttft_s)
    return {turn: float(np.median(values)) for turn, values in turns.items() if len(values) >= 3}


def _drawings(arms: Sequence[Arm], summaries: Sequence[ArmSummary]) -> list[str]:
    def series(attribute: str) -> dict[str, FloatArray]:
        return {arm.label: values_of(arm.run.records, attribute) for arm in arms}

    return [
        figures.cdfs(series("ttft_s"), title="TTFT", unit="s"),
        figures.cdfs(series("e2e_s"), title="E2E", unit="s"),
        figures.cdfs(series("tpot_s"), title="TPOT", unit="s"),
        figures.per_turn({arm.label: _by_turn(arm.run) for arm in arms}, title="median TTFT", unit="s"),
        figures.instance_load({s.label: _floats(s.requests_by_instance) for s in summaries}, title="share of requests"),
        figures.instance_load(
            {s.label: _floats(s.new_tokens_by_instance) for s in summaries}, title="share of new tokens"
        ),
        figures.timeline({arm.label: _spans(arm.run, _session_shown(arms)) for arm in arms}),
    ]


def _floats(loads: dict[str, int]) -> dict[str, float]:
    return {name: float(load) for name, load in loads.items()}


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}" if abs(value) < 1e6 else f"{value:.3f}"
    return "–" if value is None or value == "" else str(value)


def format_seconds(value: float | None) -> str:
    """Seconds for reading: milliseconds below a tenth, a dash when unknown."""
    if value is None or not np.isfinite(value):
        return "–"
    return f"{value * 1000:.1f} ms" if abs(value) < 0.1 else f"{value:.3f} s"


def format_percent(value: float | None, digits: int = 1) -> str:
    """A ratio as a percentage, a dash when unknown."""
    return "–" if value is None or not np.isfinite(value) else f"{value * 100:.{digits}f} %"


def _number(value: float | None, digits: int = 0) -> str:
    return "–" if value is None or not np.isfinite(value) else f"{value:,.{digits}f}"
