"""The tables: arms in order, figures of all repeats, differences from the base with intervals."""

from __future__ import annotations

import msgspec
import pytest

from bench.routers.records import RequestFigures, RouterRecord, RouterRecordError
from bench.routers.table import by_arm, lines_of
from replayer.records.classes import PlannedClass
from tests.bench.routers.constructed import CONDITIONS, replayed, routed


def test_arms_come_in_the_order_of_the_comparison_the_base_first() -> None:
    records = [routed(label, 0, 1.0) for label in ("vllm:cache_aware", "mine", "joint", "warm", "round_robin")]
    assert list(by_arm(records, "joint")) == ["joint", "warm", "round_robin", "vllm:cache_aware", "mine"]


def test_the_table_has_every_arm_and_its_difference_from_the_base() -> None:
    records = [
        routed(label, repeat, seconds * (1 + 0.01 * repeat))
        for repeat in range(2)
        for label, seconds in (("warm", 1.0), ("round_robin", 2.0))
    ]
    lines = list(lines_of(records, "warm"))
    [row] = [line for line in lines if line.startswith("| `round_robin` | 2 |")]
    assert "| 192/192 |" in row
    assert "| 0.600 (0.600, 0.600) |" in row  # by the engines' counters
    assert "| 10.0 | 0 |" in row  # CPU milliseconds a request, hand-overs
    [difference] = [line for line in lines if line.startswith("| `round_robin`") and " % [" in line]
    assert "+100 % [" in difference
    assert "**worse**" in difference
    assert any("`warm`: warm 1.0." in line for line in lines)


def test_what_was_planned_in_the_first_seconds_can_be_left_out_of_figures_and_differences() -> None:
    records = [routed("warm", 0, 1.0), routed("round_robin", 0, 2.0)]
    times_s = [each.record().trace_timestamp_s for each in records[0].requests]
    later = sum(each - min(times_s) >= 30 for each in times_s)
    for record in records:  # failures among those left out are not counted
        record.requests[0] = msgspec.structs.replace(record.requests[0], error="http 500: early")
    lines = list(lines_of(records, "warm", skip_first_s=30.0))
    [row] = [line for line in lines if line.startswith("| `warm` | 1 |")]
    assert f"| {later}/{later} |" in row
    assert "| 10.0 | 0 |" in row  # CPU of all requests
    assert any("after the first 30 s" in line for line in lines)
    assert any(f"Left out of every arm by the plan: {96 - later} requests" in line for line in lines)


def test_one_class_of_requests_can_be_shown_and_compared() -> None:
    def arm(label: str, warm_s: float, heavy_s: float) -> RouterRecord:
        """First turns are HEAVY by the trace, all others WARM; caches differ by arm."""
        records = [
            replayed(number, turn, warm_s if turn > 1 else heavy_s, input_length=25_000 if turn == 1 else 1000 * turn)
            for number in range(24)
            for turn in (1, 2, 3, 4)
        ]
        for record in records:
            record.cached_tokens = 0 if label == "round_robin" else record.cached_tokens
        return routed(label, 0, 1.0, requests=[RequestFigures.of(each) for each in records])

    records = [arm("warm", 1.0, 4.0), arm("round_robin", 2.0, 4.0)]
    shown = {only: list(lines_of(records, "warm", only_class=only)) for only in (PlannedClass.WARM, PlannedClass.HEAVY)}
    for only, requests, seconds, change in (
        (PlannedClass.WARM, 72, "1.00 |", "+100 % ["),
        (PlannedClass.HEAVY, 24, "4.00 |", "+0 % ["),
    ):
        lines = shown[only]
        [heading] = [line for line in lines if line.startswith("**")]
        assert f"Only requests of class {only} ({only.tokens}) are shown and compared; hit rates by counters" in heading
        [row] = [line for line in lines if line.startswith("| `warm` | 1 |")]
        assert f"| {requests}/{requests} |" in row
        assert seconds in row  # mean E2E
        assert "| 0.600 |" in row  # by the engines' counters, of all requests
        [names] = [line for line in lines if line.startswith("| against")]
        assert names.endswith("E2E p90 |")  # without times of sessions
        [difference] = [line for line in lines if line.startswith("| `round_robin`") and " % [" in line]
        assert change in difference
        assert ("**worse**" in difference) is (only is PlannedClass.WARM)
    left_out = [[line for line in lines if line.startswith("Left out of every arm")] for lines in shown.values()]
    assert left_out[0] == left_out[1]
    assert "of all classes" in left_out[0][0]


def test_requests_of_a_class_that_a_cut_run_lacks_are_counted() -> None:
    slow = routed("round_robin", 0, 2.0)
    cut = msgspec.structs.replace(slow, requests=slow.requests[:60])
    lines = list(lines_of([routed("warm", 0, 1.0), cut], "warm", only_class=PlannedClass.WARM))
    assert any(line.startswith("| `round_robin` | 1 | 60/96 |") for line in lines)


def test_a_class_that_no_record_has_is_refused() -> None:
    records = [routed("warm", 0, 1.0), routed("joint", 0, 1.0)]
    with pytest.raises(RouterRecordError, match=r"no request is of class HEAVY .*; found: 192 WARM"):
        list(lines_of(records, "warm", only_class=PlannedClass.HEAVY))
    records[0].requests[0] = msgspec.structs.replace(records[0].requests[0], own_prefix_tokens=None)
    with pytest.raises(RouterRecordError, match="1 of 192 in the records lack own_prefix_tokens: make the runs again"):
        list(lines_of(records, "warm", only_class=PlannedClass.WARM))


def test_kinds_of_prompts_and_loads_are_never_mixed() -> None:
    text = msgspec.structs.replace(CONDITIONS, prompt_mode="text")
    records = [
        routed("warm", 0, 1.0),
        routed("warm", 0, 1.0, conditions=text),
        routed("sglang:cache_aware", 0, 1.0, conditions=text),
        routed("warm", 0, 1.0, load=2.0),
    ]
    lines = list(lines_of(records, "warm"))
    assert [line.partition(":")[0] for line in lines if line.startswith("**")] == [
        "**t, 1 x its speed, text prompts**",
        "**t, 1 x its speed, tokens prompts**",
        "**t, 2 x its speed, tokens prompts**",
    ]
    assert sum("Nothing to compare" in line for line in lines) == 2


def test_a_run_that_was_cut_off_is_named_and_compared_on_what_it_has() -> None:
    slow = routed("round_robin", 0, 2.0)
    cut = msgspec.structs.replace(slow, requests=slow.requests[:60])
    lines = list(lines_of([routed("warm", 0, 1.0), cut], "warm"))
    assert any("repeat 0: cut off after 60 of 96 requests" in line for line in lines)
    assert any("is not complete" in line for line in lines)


def test_failures_are_named_with_their_reason() -> None:
    record = routed("warm", 0, 1.0)
    record.requests[3] = msgspec.structs.replace(record.requests[3], error="http 503: no engine")
    assert any("1 failed: http 503" in line for line in lines_of([record], "warm"))


def test_a_base_without_records_is_refused() -> None:
    with pytest.raises(RouterRecordError, match="no record of joint; found: warm"):
        list(lines_of([routed("warm", 0, 1.0)], "joint"))


def test_requests_handed_over_and_the_others_are_compared_with_the_same_requests_of_the_base() -> None:
    warm = [routed("warm", repeat, seconds) for repeat, seconds in enumerate((1.0, 3.0))]
    joint = routed("joint", 0, 1.8)
    # Of three sessions, whose requests take 1.8, 1.836 and 1.872 s; with the base 2, 2.04 and 2.08 s.
    for session in range(3):
        at = 4 * session
        joint.requests[at] = msgspec.structs.replace(joint.requests[at], prefill_instance="p")
    failed = msgspec.structs.replace(joint.requests[90], error="http 503", prefill_instance="p")
    joint.requests[90] = failed
    [line] = [line for line in lines_of([*warm, joint], "warm") if "handed over." in line]
    handed, _, others = line.partition("; the others ")
    assert "`joint`: 3 requests were handed over." in handed
    assert handed.endswith("under `warm`: TTFT 0.92 and 1.02 s, E2E 1.84 and 2.04 s")
    mean = (4 * sum(1 + 0.02 * session for session in range(24)) - 1 - 1.02 - 1.04 - 1.44) / 92
    assert others == f"TTFT {0.9 * mean:.2f} and {mean:.2f} s, E2E {1.8 * mean:.2f} and {2 * mean:.2f} s."


def test_arms_without_hand_offs_have_no_line_on_them() -> None:
    lines = list(lines_of([routed("warm", 0, 1.0), routed("joint", 0, 1.8)], "warm"))
    assert not [line for line in lines if "handed over." in line]
