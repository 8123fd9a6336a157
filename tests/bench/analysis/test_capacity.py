"""KV capacity: pools against an engine's report, the held KV against a simulation, splits that keep up or fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from bench.analysis.cli import application
from bench.analysis.commands.kv_wall import HANDOFFS
from bench.analysis.kv_wall import Handoff, SplitFleet, SplitVerdict, assess, fits, held_kv, kv_pool
from bench.analysis.output import AnalysisError
from bench.analysis.sheets import load_gpu, load_model
from replayer.traces.formats import bailian
from replayer.traces.trace import Trace, TraceRequest
from sim.hardware import load_profile

GIB = 2**30
QWEN = load_model("qwen3-coder-30b-a3b")


def pool(gpu: str = "h20", given_gib: float | None = 38.0, **more: Any) -> Any:
    values: dict[str, Any] = {
        "weight_bytes": QWEN.parameters * 2.0,
        "kv_bytes_per_token": QWEN.kv_bytes_per_token(),
        "gpus": 1,
        "utilisation": 0.9,
        "overhead_bytes": 2.0 * GIB,
        "given_bytes": None if given_gib is None else given_gib * GIB,
    }
    return kv_pool(QWEN, load_gpu(gpu), **(values | more))


def made(requests: int = 400, prompt: int = 33_600, output: int = 445) -> Trace:
    """Requests of one length that share nothing, one a second."""
    rows = [
        TraceRequest(
            chat_id=n, session_id=f"s{n}", timestamp_s=float(n), input_length=prompt, output_length=output, hash_ids=[n]
        )
        for n in range(requests)
    ]
    return Trace(requests=rows, block_tokens=prompt, name="made")


def test_the_published_request_sizes_against_the_published_pool() -> None:
    rows = {row.tokens: row for row in fits(made(), pool(), QWEN.kv_bytes_per_token(), [125_600, 33_600])}
    assert rows[125_600].kv_bytes / GIB == pytest.approx(11.5, abs=0.01)
    assert int(rows[125_600].requests) == 3
    assert int(rows[33_600].requests) == 12
    assert pool().pool_tokens == load_profile("h20").kv.pool_tokens


def test_the_sheet_leaves_what_an_engine_reported() -> None:
    reported = load_profile("h200").kv.pool_tokens
    assert pool("h200", None).pool_tokens == pytest.approx(reported, rel=0.01)


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(AnalysisError, match="leaves no room for KV on 1 x h100"):
        pool("h100", None, weight_bytes=75 * GIB)


def test_held_kv_is_that_of_a_simulation() -> None:
    """Poisson arrivals with holding times, sampled at intervals: mean, tail and p99 as computed."""
    draw = np.random.default_rng(7)
    kv = draw.lognormal(21, 1.0, 500)
    held_s = draw.lognormal(1, 1, 500)
    rate, limit = 0.9, 12e9
    p99, overflow = held_kv(kv, held_s, rate, limit)
    horizon_s = 200_000.0
    arrivals = np.sort(draw.uniform(0, horizon_s, draw.poisson(rate * horizon_s)))
    which = draw.integers(0, 500, arrivals.size)
    looks = np.arange(1000.0, horizon_s - 1000, 5.0)
    # Held now = arrivals less departures.
    come = np.concatenate(([0.0], np.cumsum(kv[which])))[np.searchsorted(arrivals, looks)]
    leave_s = arrivals + held_s[which]
    order = np.argsort(leave_s)
    gone = np.concatenate(([0.0], np.cumsum(kv[which][order])))[np.searchsorted(leave_s[order], looks)]
    held = come - gone
    assert held.mean() == pytest.approx(rate * float((kv * held_s).mean()), rel=0.03)
    assert 0.01 < overflow < 0.5
    assert overflow == pytest.approx(float((held > limit).mean()), rel=0.1)
    assert p99 == pytest.approx(float(np.quantile(held, 0.99)), rel=0.05)


def fleet(handoff: Handoff = Handoff.PULL, profile: str = "h20", given_gib: float = 38.0) -> SplitFleet:
    timing = load_profile(profile)
    return SplitFleet(timing, pool(given_gib=given_gib), QWEN.kv_bytes_per_token(), timing.transport_name(), handoff)


def test_little_s_law_holds_for_a_split() -> None:
    (split,) = assess(made(), fleet(), [(4, 4)], 0.2, hits=False)
    assert split.verdict is SplitVerdict.OK
    assert split.streams is not None
    assert split.tpot_s is not None
    assert split.hold_s is not None
    assert split.kv_mean_bytes is not None
    # Streams = rate x decode time, KV = rate x KV x time held; four instances share the load.
    assert split.streams == pytest.approx(0.2 / 4 * 445 * split.tpot_s)
    assert split.kv_mean_bytes == pytest.approx(0.2 / 4 * (33_600 + 445) * 98_304 * split.hold_s)
    timing = load_profile("h20").timing
    step_s = timing.decode(1, round(split.streams * (33_600 + 222)))
    assert split.tpot_s == pytest.approx(step_s, rel=0.2)


def test_a_split_breaks_where_it_says() -> None:
    chosen = [(0, 8), (2, 6), (4, 4), (7, 1)]
    at_one = assess(made(), fleet(), chosen, 0.1, hits=False)
    assert [split.verdict for split in at_one] == [SplitVerdict.OK] * 4
    for split in at_one:
        assert split.breaks_at is not None
        pair = [(split.prefill, split.decode)]
        (below,) = assess(made(), fleet(), pair, 0.1 * split.breaks_at * 0.99, hits=False)
        (above,) = assess(made(), fleet(), pair, 0.1 * split.breaks_at * 1.01, hits=False)
        assert (below.verdict, above.verdict) == (SplitVerdict.OK, split.breaks_by)
    limits = {split.prefill: split.breaks_by for split in at_one}
    assert limits[2] is SplitVerdict.PREFILL
    assert limits[7] in (SplitVerdict.KV, SplitVerdict.DECODE)


def test_a_pool_too_small_is_what_breaks_static_separation() -> None:
    (roomy,) = assess(made(), fleet(given_gib=380.0), [(7, 1)], 0.5, hits=False)
    (tight,) = assess(made(), fleet(given_gib=6.0), [(7, 1)], 0.5, hits=False)
    assert roomy.verdict is SplitVerdict.OK
    assert tight.verdict is SplitVerdict.KV
    assert tight.breaks_at is not None
    assert tight.breaks_at < 1


def test_holding_from_the_arrival_takes_the_queue_on_p_to_d() -> None:
    (pull,) = assess(made(), fleet(), [(4, 4)], 0.7, hits=False)
    (arrival,) = assess(made(), fleet(Handoff.ARRIVAL), [(4, 4)], 0.7, hits=False)
    assert pull.hold_s is not None
    assert arrival.hold_s is not None
    assert pull.prefill_wait_s is not None
    assert arrival.hold_s > pull.hold_s + pull.prefill_wait_s
    # With P saturated the queue, and with it the KV that D holds, is unbounded.
    (pull,) = assess(made(), fleet(), [(4, 4)], 2.0, hits=False)
    (arrival,) = assess(made(), fleet(Handoff.ARRIVAL), [(4, 4)], 2.0, hits=False)
    assert pull.hold_s is not None
    assert arrival.hold_s is None
    assert arrival.overflow == 1.0


def test_reuse_takes_work_off_p() -> None:
    turns = made(40)
    for number, request in enumerate(turns.requests):
        request.session_id, request.hash_ids = "one", [0]
        assert number or request.hash_ids
    (with_hits,) = assess(turns, fleet(), [(1, 1)], 0.1, hits=True)
    (without,) = assess(turns, fleet(), [(1, 1)], 0.1, hits=False)
    assert with_hits.prefill_busy < 0.1 * without.prefill_busy


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "made.jsonl"
    bailian.write(path, made(60, prompt=6400).requests)
    return path


def test_the_command_reports_what_the_code_finds(trace_file: Path) -> None:
    arguments = [
        "kv-wall",
        str(trace_file),
        "--block-tokens",
        "6400",
        "--request-tokens",
        "125000",
        "--splits",
        "4+4",
        "--json",
    ]
    result = CliRunner().invoke(application(), [*arguments, "--pool-gib", "38", "--arrival-speed", "2"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["rate_per_s"] == pytest.approx(2 * 60 / 59)
    assert [row["size"] for row in found["fits"]] == ["mean", "p50", "p90", "p99", "longest", "asked for"]
    (split,) = found["splits"]
    assert (split["prefill"], split["decode"]) == (4, 4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--splits", "4/4"], "'4/4' is not P+D"),
        (["--splits", "4+0"], "at least one D"),
        (["--handoff", "later"], "known: pull, arrival"),
        (["--rate-per-s", "0"], "must be above 0"),
        (["--utilisation", "1.5"], "at most 1"),
        (["--transport", "pigeon"], "has no transport 'pigeon'"),
        (["--model", "llama-3.1-70b"], "leaves no room for KV"),
        (["--profile", "abacus"], "no hardware profile"),
    ],
)
def test_bad_options_say_what_to_do(trace_file: Path, arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(application(), ["kv-wall", str(trace_file), "--block-tokens", "6400", *arguments])
    assert result.exit_code == 2
    assert said in result.output.replace("\n", " ")


def test_the_command_offers_every_hand_off() -> None:
    assert tuple(each.value for each in Handoff) == HANDOFFS
