"""The agents of ``bench.admission_live`` in virtual time: admission rules against fixed caps, over several draws.

``python -m bench.admission_shapes kct_v6.jsonl.gz`` cuts another sample of sessions for every draw and repeats it on
faster and slower engines. The fixed cap to compare with is the best one on average, as nobody knows the best of a draw.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import typer

from policies.admission.base import AdmissionRule
from policies.registry import PolicyParameterError, UnknownPolicyError, make_admission, make_routing
from replayer.records.runs import RequestRecord
from replayer.replay.plan import PlanOptions
from replayer.traces.loading import load_trace
from replayer.traces.trace import Trace, TraceError, TraceRequest
from sim.offline.setup import parsed_params
from sim.offline.simulate import SimOptions, simulate

OWN_IDS = 10_000_000
"""Distance between the block ids of two sessions, so that they share none."""
SESSIONS_PER_INSTANCE = 3.75
CAP_SHARES = (1 / 3, 0.4, 7 / 15, 8 / 15, 2 / 3)
"""Fixed caps that are tried, as shares of the sessions."""
POOL_TOKENS, MODEL_TOKENS, MAX_SEQS = 160_432, 130_000, 32
"""Those of the engines of the live comparison."""
IDLE_GAP_CAP_S = 10.0


class AgentCut(NamedTuple):
    """Sessions that are cut from a longer trace, and their requests."""

    sessions: int = 30
    """One begins each second."""
    turns: int = 7
    min_tokens: int = 15_000
    """Turns with shorter prompts are left out."""
    max_tokens: int = 90_000
    """Turns with longer prompts are left out."""
    think_s: float = 5.0
    """Longest think time, seconds."""
    output_tokens: int = 48
    """Answers are cut to this many tokens."""
    seed: int = 1
    """Seed of the choice."""


def short_sessions(whole: Trace, cut: AgentCut) -> tuple[list[dict[str, Any]], int]:
    """Rows of a trace of short sessions with long contexts that share nothing, and how many there were to choose from.

    A session is a run of turns of one of the trace's.
    """
    windows = []
    for session in whole.sessions().values():
        fitting = [each for each in session if cut.min_tokens <= each.input_length <= cut.max_tokens]
        windows += [fitting[at : at + cut.turns] for at in range(0, len(fitting) - cut.turns + 1, cut.turns)]
    random.Random(cut.seed).shuffle(windows)
    chosen = [(OWN_IDS * (number + 1), window) for number, window in enumerate(windows[: cut.sessions])]
    return session_rows(chosen, cut.think_s, cut.output_tokens, call_s=1.0), len(windows)


def session_rows(
    sessions: Sequence[tuple[int, Sequence[TraceRequest]]], think_s: float, output_tokens: int, *, call_s: float
) -> list[dict[str, Any]]:
    """Rows of a trace in which one session begins each second.

    Args:
        sessions: turns of each session, and the number that is added to its block ids: other numbers, nothing shared.
        think_s: longest think time, seconds.
        output_tokens: answers are cut to this many tokens.
        call_s: time of one call in the trace; a replay waits for the answer instead.
    """
    rows: list[dict[str, Any]] = []
    for number, (first_id, session) in enumerate(sessions):
        at_s, before = float(number), -1
        for turn, each in enumerate(session):
            wait_s = min(max(each.think_time_s or 0.0, 0.5), think_s) if turn else 0.0
            at_s += wait_s + call_s if turn else 0.0
            rows.append(
                {
                    "chat_id": len(rows),
                    "parent_chat_id": before,
                    "timestamp": round(at_s, 3),
                    "input_length": each.input_length,
                    "output_length": min(each.output_length, output_tokens),
                    "type": "coder",
                    "turn": turn + 1,
                    "hash_ids": [first_id + block for block in each.hash_ids],
                    "session_id": f"s{number:03d}",
                    "think_time": wait_s,
                    "api_time": call_s,
                }
            )
            before = rows[-1]["chat_id"]
    rows.sort(key=lambda row: row["timestamp"])
    return rows


def write_rows(rows: Sequence[dict[str, Any]], output: Path) -> None:
    """Write a trace."""
    output.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


class DrawFigures(NamedTuple):
    """One simulated run."""

    e2e_s: float
    """Mean, from when a turn was due."""
    completion_s: float
    """Mean of a session, from its first turn being due to its last one's end."""
    hit_rate: float


def figures_of(records: Sequence[RequestRecord]) -> DrawFigures:
    """Means of a run without failures."""
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for each in records:
        assert each.e2e_scheduled_s is not None
        ended_s = each.scheduled_s + each.e2e_scheduled_s
        first[each.session_id] = min(first.get(each.session_id, each.scheduled_s), each.scheduled_s)
        last[each.session_id] = max(last.get(each.session_id, 0.0), ended_s)
    return DrawFigures(
        float(np.mean([each.e2e_scheduled_s or 0.0 for each in records])),
        float(np.mean([last[session] - since_s for session, since_s in first.items()])),
        sum(each.cached_tokens or 0 for each in records) / sum(each.prompt_tokens or 0 for each in records),
    )


class AgentFleet(NamedTuple):
    """A fleet of the live comparison, and the draws of its sessions."""

    instances: int
    traces: Sequence[Trace]
    slowdowns: Sequence[float]

    def runs(self, rule: AdmissionRule) -> list[DrawFigures]:
        """Every draw at every speed."""
        return [
            figures_of(
                simulate(
                    trace,
                    SimOptions(
                        instances=self.instances,
                        pool_tokens=POOL_TOKENS,
                        max_model_len=MODEL_TOKENS,
                        max_num_seqs=MAX_SEQS,
                        plan=PlanOptions(idle_gap_cap_s=IDLE_GAP_CAP_S),
                        slowdown=slowdown,
                    ),
                    make_routing("warm"),
                    admission=rule,
                ).run.records
            )
            for trace in self.traces
            for slowdown in self.slowdowns
        ]


def rows_of(instances: int, runs: dict[str, list[DrawFigures]]) -> Iterator[str]:
    """A Markdown row per rule, but of the caps only the best on average, which the others are compared with."""
    caps = {label: found for label, found in runs.items() if label.startswith("session_cap")}
    best = min(caps, key=lambda label: float(np.mean([each.e2e_s for each in caps[label]])))
    for label, found in runs.items():
        if label in caps and label != best:
            continue
        ratios = [each.e2e_s / base.e2e_s for each, base in zip(found, caps[best], strict=True)]
        e2e_s, completion_s, hits = (float(each) for each in np.mean(found, axis=0))
        completion = completion_s / float(np.mean([base.completion_s for base in caps[best]]))
        yield (
            f"| {instances} | `{label}` | {len(found)} | {e2e_s:.2f} | {np.mean(ratios):.2f} "
            f"({min(ratios):.2f}–{max(ratios):.2f}) | {completion_s:.0f} | {completion:.2f} | {hits:.2f} |"
        )


def main(
    trace: Annotated[Path, typer.Argument(help="Trace with long sessions, such as kct_v6.")],
    instances: Annotated[list[int] | None, typer.Option(help="Default: 4 and 8. Repeatable.")] = None,
    rule: Annotated[
        list[str] | None, typer.Option(help="RULE or RULE,KEY=VALUE. Default: never_hold, working_set. Repeatable.")
    ] = None,
    draws: Annotated[int, typer.Option(min=1, help="Samples of sessions.")] = 6,
    first_draw: Annotated[int, typer.Option(help="Seed of the first sample.")] = 1,
    slowdown: Annotated[
        list[float] | None, typer.Option(help="Factor on step times. Default: 1, 1.5 and 2.2. Repeatable.")
    ] = None,
) -> None:
    """Compare admission rules with the best fixed cap on the agents of the live comparison."""
    try:
        whole = load_trace(trace)
        rules = {text: _rule_of(text) for text in rule or ["never_hold", "working_set"]}
    except (TraceError, UnknownPolicyError, PolicyParameterError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(
        "| instances | rule | runs | mean E2E s | against the best cap: mean, range | session completion s "
        "| against the best cap | hit rate |"
    )
    typer.echo("| ---: | --- | ---: | ---: | --- | ---: | ---: | ---: |")
    for fleet in instances or [4, 8]:
        sessions = round(SESSIONS_PER_INSTANCE * fleet)
        with tempfile.TemporaryDirectory() as folder:
            traces = [_drawn(whole, AgentCut(sessions, seed=first_draw + draw), Path(folder)) for draw in range(draws)]
        shape = AgentFleet(fleet, traces, slowdown or [1.0, 1.5, 2.2])
        caps = {
            f"session_cap,sessions={cap}": _cap(cap) for cap in dict.fromkeys(round(s * sessions) for s in CAP_SHARES)
        }
        for line in rows_of(fleet, {label: shape.runs(each) for label, each in {**caps, **rules}.items()}):
            typer.echo(line)


def _drawn(whole: Trace, cut: AgentCut, folder: Path) -> Trace:
    path = folder / f"draw-{cut.seed}.jsonl"
    write_rows(short_sessions(whole, cut)[0], path)
    return load_trace(path)


def _rule_of(text: str) -> AdmissionRule:
    name, *params = text.split(",")
    return make_admission(name, parsed_params(params))


def _cap(sessions: int) -> AdmissionRule:
    return make_admission("session_cap", {"sessions": sessions})


if __name__ == "__main__":
    typer.run(main)
