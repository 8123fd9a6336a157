"""The proxy's counters and histograms compared with the client library's, and rows kept as lines."""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from policies.row import RequestOutcome, Row
from policies.types import CandidateScore, Decision, OffloadPlan, OffloadReason, Reason, RequestClass
from proxy.breakdown import Breakdown
from proxy.metrics.tallies import Spread, Tally

BOUNDS = (0.1, 1, 2.5, 10)
LABELS = st.tuples(st.sampled_from(["a", 'b "quoted"']), st.sampled_from(list(RequestOutcome)[:3]))


def exposed(registry: CollectorRegistry) -> list[str]:
    return sorted(line for line in generate_latest(registry).decode().splitlines() if "_created" not in line)


@given(
    counted=st.lists(st.tuples(LABELS, st.integers(0, 10**6))),
    observed=st.lists(st.tuples(LABELS, st.sampled_from([0.0, 0.1, 0.11, 1.0, 2.5, 9.9, 10.0, 11.0]))),
    forgotten=st.sampled_from([None, "a"]),
)
def test_what_is_exposed_is_what_the_client_library_would_expose(
    counted: list[tuple[tuple[str, RequestOutcome], int]],
    observed: list[tuple[tuple[str, RequestOutcome], float]],
    forgotten: str | None,
) -> None:
    own, library = CollectorRegistry(), CollectorRegistry()
    tally = Tally(own, "tokens", "Some", ["instance", "outcome"])
    spread = Spread(own, "took_seconds", "Time", ["instance", "outcome"], BOUNDS)
    bare = Spread(own, "bare_seconds", "Time", [], BOUNDS)
    counter = Counter("tokens", "Some", ["instance", "outcome"], registry=library)
    histogram = Histogram("took_seconds", "Time", ["instance", "outcome"], registry=library, buckets=BOUNDS)
    unlabelled = Histogram("bare_seconds", "Time", registry=library, buckets=BOUNDS)
    for (instance, outcome), amount in counted:
        tally.values[instance, outcome] += amount
        counter.labels(instance, outcome.value).inc(amount)
    for (instance, outcome), value in observed:
        spread.observe((instance, outcome), value)
        histogram.labels(instance, outcome.value).observe(value)
        bare.observe((), value)
        unlabelled.observe(value)
    if forgotten is not None:
        for own_metric, theirs in ((tally, counter), (spread, histogram)):
            own_metric.forget("instance", forgotten)
            theirs.remove_by_labels({"instance": forgotten})
        bare.forget("instance", forgotten)
    assert exposed(own) == exposed(library)


def row(request_id: str, session_id: str | None = None, **fields: object) -> Row:
    made = Row(request_id, "/v1/completions", 1.5, session_id)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_rows_are_found_by_fields_as_they_were_given_and_the_oldest_go_first(tmp_path: Path) -> None:
    breakdown = Breakdown(3, tmp_path / "rows.jsonl")
    for number, session in enumerate(["old", 'quo"te é', None, 'quo"te é']):
        breakdown.close_row(breakdown.open_row(row(f"r{number}", session, outcome=RequestOutcome.OK)))
    assert [found["request_id"] for found in breakdown.select(10)] == ["r1", "r2", "r3"]
    assert [found["request_id"] for found in breakdown.select(10, session_id='quo"te é', outcome="ok")] == ["r1", "r3"]
    assert [found["request_id"] for found in breakdown.select(1, session_id='quo"te é')] == ["r3"]
    # A word of one field does not match another field.
    assert list(breakdown.select(10, session_id="r1")) == []
    breakdown.close()
    lines = (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["request_id"] for line in lines] == ["r0", "r1", "r2", "r3"]


def test_a_row_that_cannot_be_encoded_is_kept_in_plain_form() -> None:
    inputs = MappingProxyType({"load": 2.0})  # as from a third-party policy
    decision = Decision(
        "r0",
        "inst-0",
        None,
        RequestClass.WARM,
        Reason.LOWEST_SCORE,
        OffloadPlan(None, OffloadReason.PLANNER_NEVER),
        (CandidateScore("inst-0", 1.0, inputs),),
        "theirs",
        10,
        0,
    )
    breakdown = Breakdown(10)
    breakdown.close_row(breakdown.open_row(row("r0", decision=decision, error="a path with \udcff in it")))
    (found,) = breakdown.select(1)
    assert found["scores"] == [
        {"instance": "inst-0", "score": 1.0, "inputs": {"load": 2.0}, "skipped": False, "cached_tokens": None}
    ]
    assert (found["class"], found["reason"], found["error"]) == ("WARM", "lowest_score", "a path with ? in it")
