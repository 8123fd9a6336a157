"""The table of a small record made by hand, and the files it is read from."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.home_case.fleet import HomeCaseError
from bench.home_case.record import (
    BREAKDOWN,
    RUN,
    SUSTAINED,
    TELEMETRY,
    FleetEngine,
    ProxyFacts,
    SustainedRecord,
    read_files,
    write_files,
)
from bench.home_case.samples import ProxySample, thinned
from bench.home_case.table import lines_of
from bench.routers.records import EngineCounters
from replayer.records.runs import RequestRecord, RunHeader, encode_line

MIB = 2**20


def sample(at_s: float, rss_mib: float = 100.0) -> ProxySample:
    return ProxySample(at_s, int(rss_mib * MIB), 20, at_s / 10, held=1.0, queued=0.0, in_flight=4.0)


def request(number: int, *, ok: bool = True, ttft_s: float = 0.5) -> RequestRecord:
    return RequestRecord(
        request_id=f"r{number}",
        session_id="s",
        turn=number,
        chat_id=number,
        trace_timestamp_s=0.0,
        scheduled_s=float(number),
        sent_s=float(number),
        finished_s=10.0 + number,
        ttft_scheduled_s=ttft_s,
        tpot_s=0.01,
        e2e_scheduled_s=4 * ttft_s,
        output_length=2,
        prompt_tokens=1000,
        completion_tokens=2,
        cached_tokens=500,
        predicted_cached_tokens=500,
        ok=ok,
        error=None if ok else "503",
        prefill_instance="inst-1" if number == 1 else None,
    )


def row(number: int, **values: Any) -> dict[str, Any]:
    return {"request_id": f"r{number}", "class": "WARM", "outcome": "ok", "admission": "room", "held_s": 0.0, **values}


def record(**values: Any) -> SustainedRecord:
    facts: dict[str, Any] = {
        "fleet": "elastic-4x-kv-both",
        "hardware": "4 x H200",
        "limit_s": 400.0,
        "cut": False,
        "replay_s": 60.0,
        "model": "m",
        "engines": [
            FleetEngine(
                name="inst-0",
                kind="vllm",
                version="0.18.1",
                role="kv_both",
                pool_tokens=800_000,
                counters=EngineCounters(prompt_tokens=3000, cached_tokens=1500),
            )
        ],
        "proxy": ProxyFacts(
            version="0.1.0",
            policy={"name": "joint", "planner": "cost_model"},
            admission={"name": "working_set"},
            counters={'warmroute_retries_total{result="retried"}': 2.0},
            cpu_s=0.03,
            rss_most_bytes=130 * MIB,
            descriptors_most=44,
            samples=[sample(0.0), sample(60.0, 110.0)],
        ),
        "idle_after_s": 0.5,
    }
    return SustainedRecord(**{**facts, **values})


def written(folder: Path, made: SustainedRecord, telemetry: str | None = None) -> str:
    """The table of a run of three requests, read back from its files."""
    header = RunHeader(trace="t.jsonl", offered={"requests": 4, "sessions": 2, "input_mean_tokens": 1000.0})
    records = [request(0), request(1, ttft_s=1.5), request(2, ok=False)]
    rows = [
        row(0, offload_reason="does_not_pay", legs={"first_token": {"predicted_s": 0.25, "actual_s": 0.5}}),
        row(
            1,
            **{"class": "HEAVY", "offload_reason": "chosen", "held_s": 2.5},
            legs={"prefill": {"predicted_s": 1.0, "actual_s": 0.8}, "transfer": {"predicted_s": 0.1, "actual_s": 0.3}},
        ),
        row(2, offload_reason="fell_back_p_timeout", attempts=[{"instance": "inst-0", "error": "gone"}]),
    ]
    plain = {
        RUN: encode_line(header) + b"".join(encode_line(each) for each in records),
        BREAKDOWN: b"".join(msgspec.json.encode(each) + b"\n" for each in rows),
    }
    if telemetry is not None:
        plain[TELEMETRY] = telemetry.encode()
    write_files(folder, made, plain)
    return "\n".join(lines_of(read_files(folder)))


@pytest.mark.parametrize(
    "line",
    [
        "4 requests of 2 sessions, mean prompt 1,000 tokens",
        "1 engines (vllm 0.18.1; role 1 kv_both; 4 x H200), model m, pools of 800,000 tokens",
        "policy `joint`, planner `cost_model`, admission `working_set`",
        "| all | 2/4 | 1.000 / 1.400 / 1.490 | 1.000 |",
        "| WARM | 1/2 | 0.500 /",
        "| HEAVY | 1/1 | 1.500 /",
        "| succeeded | 2 of 4 (1 503; 1 not ended at the limit) |",
        "| hit rate by the engines' counters | 0.500 |",
        "| co-located: until the first token: predicted within a factor of | 2.00 in half, 2.00 in 90 % of 1",
        "| P leg: prefill on P, until its answer: predicted within a factor of | 1.25 in half",
        "| D leg: pull and first token on D: predicted within a factor of | 3.00 in half",
        "| handed off | 1 of 3 |",
        "| planner's reasons | 1 chosen, 1 does_not_pay |",
        "| fallbacks | 1 fell_back_p_timeout |",
        "| requests with a failed attempt | 1 |",
        '| retries, resumes, refusals | 2 retries{result="retried"} |',
        "| held by admission (wall time) | 1 of 3 for 2.5 s in all",
        "| router CPU, ms/request | 10.0 |",
        "| memory of the proxy, start / end / most, MiB | 100.0 / 110.0 / 130.0 |",
        "| descriptors of the proxy, start / end / most | 20 / 20 / 44 |",
        "| leaks | none |",
    ],
)
def test_the_table_has(line: str, tmp_path: Path) -> None:
    assert line in written(tmp_path, record())


def test_leaks_and_problems_are_named(tmp_path: Path) -> None:
    leaks = ["proxy: warmroute_in_flight is 1", "inst-0: share of KV blocks in use is 0.02"]
    table = written(tmp_path, record(leaks=leaks, idle_after_s=None, problems=["inst-0 was restarted during the run"]))
    assert f"| leaks | {'; '.join(leaks)} |" in table
    assert "| idle after the last request, s | – |" in table
    assert "- inst-0 was restarted during the run" in table


def test_the_use_of_each_gpu_is_its_mean(tmp_path: Path) -> None:
    header = "unix_s,gpu,uuid,utilisation_percent,memory_used_bytes,power_w"
    lines = [f"1,0,u,40,{2**30},300", f"2,0,u,60,{3 * 2**30},500", "1,1,v,,,"]
    table = written(tmp_path, record(), "\n".join([header, *lines]))
    assert "| GPU 0, mean utilisation, power, memory | 50.0 %, 400.0 W, 2.0 GiB (2 samples) |" in table
    assert "| GPU 1, mean utilisation, power, memory | – (1 samples) |" in table


def test_a_run_without_gpus_replaces_the_telemetry_of_one_before(tmp_path: Path) -> None:
    written(tmp_path, record(), "unix_s,gpu\n")
    assert "| GPUs | no telemetry: no driver |" in written(tmp_path, record(telemetry="no driver"))
    assert not (tmp_path / TELEMETRY).exists()


def test_equal_runs_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        written(tmp_path / name, record())
    for name in (RUN, BREAKDOWN, SUSTAINED):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HomeCaseError, match="schema 99"):
        written(tmp_path, record(schema=99))
    written(tmp_path, record())
    (tmp_path / RUN).write_bytes(gzip.compress(b"{}\n"))
    with pytest.raises(HomeCaseError, match="not the files of a sustained run"):
        read_files(tmp_path)


def test_one_sample_in_five_seconds_is_kept_with_the_first_and_the_last() -> None:
    assert [each.at_s for each in thinned([sample(float(at)) for at in range(13)])] == [0.0, 5.0, 10.0, 12.0]
