"""Re-simulation of recordings: the simulator reproduces its own run, and unusable recordings are rejected."""

from __future__ import annotations

import gzip
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from policies.registry import make_planner, make_routing
from policies.types import Role
from replayer.records.runs import RequestRecord, Run, RunEnd, RunHeader, encode_line
from replayer.replay.plan import PlanOptions
from replayer.traces.formats.bailian import write
from replayer.traces.loading import load_trace
from replayer.traces.synth import SynthOptions, synthetic_trace
from replayer.traces.trace import Trace
from sim.fidelity.cli import register
from sim.fidelity.comparison import compare, markdown
from sim.fidelity.recording import RecordingError, find_recordings, read_recording
from sim.fidelity.resimulate import resimulate
from sim.offline.simulate import SimOptions, simulate


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    write(path, synthetic_trace(SynthOptions(requests=80, seed=3)).requests)
    return load_trace(path)


@pytest.fixture(scope="module")
def run(trace: Trace) -> Run:
    """A run with load high enough that requests queue, and with some prefills offloaded."""
    options = SimOptions(instances=3, plan=PlanOptions(time_scale=8.0), role=Role.KV_BOTH, transport="nvlink")
    planner = make_planner("threshold", {"min_decode_requests": 0})
    return simulate(trace, options, make_routing("linear", {}), planner).run


def keep(
    run: Run, folder: Path, records: list[RequestRecord] | None = None, packed: bool = True, **note: object
) -> Path:
    folder.mkdir(parents=True)
    assert run.end is not None
    parts: list[RunHeader | RequestRecord | RunEnd] = [
        run.header,
        *(run.records if records is None else records),
        run.end,
    ]
    lines = b"".join(map(encode_line, parts))
    if packed:
        (folder / "run.jsonl.gz").write_bytes(gzip.compress(lines))
    else:
        (folder / "run.jsonl").write_bytes(lines)
    if note:
        (folder / "arm.json").write_bytes(msgspec.json.encode(note))
    return folder


def test_a_simulated_run_is_simulated_as_it_was(trace: Trace, run: Run, tmp_path: Path) -> None:
    folder = keep(run, tmp_path / "arm", label="mine", transport="nvlink", instances=3)
    recording = read_recording(folder, trace)
    assert (recording.name, recording.failed, len(recording.sent)) == ("mine", 0, 80)
    assert sum(each.record.prefill_instance is not None for each in recording.sent) >= 3
    assert len(recording.instances) == 3
    outcomes = resimulate(recording, "h200", recording.note.transport)
    for sent in recording.sent:
        outcome, record = outcomes[sent.record.request_id], sent.record
        assert outcome.latencies.ttft_s == pytest.approx(record.ttft_s, rel=1e-6)
        assert outcome.latencies.e2e_s == pytest.approx(record.e2e_s, rel=1e-6)
        assert outcome.latencies.tpot_s == (
            record.tpot_s if record.tpot_s is None else pytest.approx(record.tpot_s, rel=1e-6)
        )
        assert record.prefill_instance is not None or outcome.cached_tokens == record.cached_tokens
    fidelity = compare(recording, outcomes)
    assert [metric.metric for metric in fidelity.metrics] == ["ttft", "tpot", "e2e"]
    assert fidelity.requests == fidelity.metrics[0].requests == 80 > fidelity.metrics[1].requests
    for metric in fidelity.metrics:
        assert metric.ratios == pytest.approx((1, 1, 1), rel=1e-6)
        assert metric.typical_factor == pytest.approx(1, rel=1e-6)
        assert metric.rank_correlation == pytest.approx(1)
    assert fidelity.cache_equal == fidelity.cache_requests < 80
    assert fidelity.measured_hit_rate == fidelity.simulated_hit_rate > 0


def test_other_hardware_shows(trace: Trace, run: Run, tmp_path: Path) -> None:
    recording = read_recording(keep(run, tmp_path / "arm", packed=False), trace)
    assert recording.name == "arm"
    ttft = compare(recording, resimulate(recording, "h20", "rdma")).metrics[0]
    assert ttft.ratios[0] > 1.5
    assert ttft.typical_factor > 1.5
    assert 0 < ttft.rank_correlation < 1


def test_failed_requests_are_left_out_and_the_first_seconds_are_not_compared(
    trace: Trace, run: Run, tmp_path: Path
) -> None:
    failed = msgspec.structs.replace(run.records[0], ok=False, error="gone")
    start_s = sorted(record.sent_s or 0.0 for record in run.records)[20]
    folder = keep(run, tmp_path / "arm", [failed, *run.records[1:]], transport="nvlink", skip_first_s=start_s)
    recording = read_recording(folder, trace)
    assert (recording.failed, len(recording.sent)) == (1, 79)
    fidelity = compare(recording, resimulate(recording, "h200", "nvlink"))
    assert fidelity.requests == sum(each.sent_s >= start_s for each in recording.sent) < 79
    assert f"| arm | {fidelity.requests} | TTFT |" in markdown([fidelity._replace(name="arm")])


def test_what_cannot_be_simulated_is_refused(trace: Trace, run: Run, tmp_path: Path) -> None:
    other = msgspec.structs.replace(trace, sha256="f" * 64, name="other.jsonl")
    folder = keep(run, tmp_path / "arm")
    with pytest.raises(RecordingError, match=r"not with other\.jsonl .* give the trace it was recorded with"):
        read_recording(folder, other)
    unknown = msgspec.structs.replace(run.records[0], chat_id=10**9)
    with pytest.raises(RecordingError, match=r"is not in trace\.jsonl"):
        read_recording(keep(run, tmp_path / "unknown", [unknown]), trace)
    with pytest.raises(RecordingError, match="no request in it was answered after the first 0 s"):
        read_recording(keep(run, tmp_path / "empty", []), trace)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.jsonl").write_text("{}\n", encoding="utf-8")
    with pytest.raises(RecordingError, match="not a run record"):
        read_recording(tmp_path / "broken", trace)
    with pytest.raises(RecordingError, match="name a folder that has one"):
        find_recordings([tmp_path / "nothing"])
    note = keep(run, tmp_path / "note", skip_first_s="soon")
    with pytest.raises(RecordingError, match=r"arm\.json"):
        read_recording(note, trace)


def test_the_command_compares_every_recording_below_a_folder(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write(path, synthetic_trace(SynthOptions(requests=80, seed=3)).requests)
    keep(run, tmp_path / "kept" / "one" / "a", transport="nvlink")
    keep(run, tmp_path / "kept" / "two" / "b", packed=False, transport="nvlink")
    app = typer.Typer()
    register(app)
    app.command("other")(lambda: None)
    runner = CliRunner()
    done = runner.invoke(app, ["fidelity", str(tmp_path / "kept"), "--trace", str(path)])
    assert done.exit_code == 0, done.output
    assert "| one/a | 80 | TTFT |" in done.output
    assert "| two/b | 80 | E2E |" in done.output
    assert "(+0%)" in done.output
    refused = runner.invoke(app, ["fidelity", str(tmp_path / "kept"), "--trace", str(path), "--profile", "h999"])
    assert refused.exit_code == 2
    assert "h20, h200" in refused.output
