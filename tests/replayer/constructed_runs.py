"""Constructed runs: many sessions, heavy-tailed times, one arm a known multiple of the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from replayer.records.runs import RequestRecord, Run, RunEnd, RunHeader, encode_line

RunMaker = Callable[..., Run]


def make_run(
    label: str = "baseline",
    *,
    seed: int = 1,
    noise_seed: int = 1,
    noise: float = 0.05,
    slower: float = 1.0,
    sessions: int = 60,
    fail_every: int = 0,
    cached_share: float = 0.5,
    **header: object,
) -> Run:
    """A complete run: ``seed`` fixes the work (the same in every arm), ``noise_seed`` what one replay adds to it."""
    work, extra = np.random.default_rng(seed), np.random.default_rng(noise_seed)
    records: list[RequestRecord] = []
    clock = 0.0
    for session in range(sessions):
        for turn in range(1, int(work.geometric(0.25)) + 1):
            clock += 0.5
            ttft = float(np.exp(work.normal(0.0, 1.0))) * slower * float(np.exp(extra.normal(0.0, noise)))
            tpot = 0.01 * float(np.exp(work.normal(0.0, 0.3))) * slower * float(np.exp(extra.normal(0.0, noise)))
            ok = not fail_every or len(records) % fail_every != 0
            prompt = 1000 * turn
            records.append(
                RequestRecord(
                    request_id=f"{label}-{len(records)}",
                    session_id=f"s{session}",
                    turn=turn,
                    chat_id=len(records),
                    trace_timestamp_s=clock,
                    scheduled_s=clock,
                    sent_s=clock + 0.01,
                    first_token_s=clock + 0.01 + ttft if ok else None,
                    finished_s=clock + 0.01 + ttft + 100 * tpot,
                    ttft_s=ttft if ok else None,
                    ttft_scheduled_s=ttft + 0.01 if ok else None,
                    tpot_s=tpot if ok else None,
                    e2e_s=ttft + 100 * tpot if ok else None,
                    e2e_scheduled_s=ttft + 100 * tpot + 0.01 if ok else None,
                    input_length=prompt,
                    output_length=101,
                    wait_s=0.5 if turn > 1 else 0.0,
                    own_prefix_tokens=prompt - 1000,
                    prompt_tokens=prompt if ok else None,
                    completion_tokens=101 if ok else None,
                    # The first request of all finds empty caches, as on a fresh fleet.
                    cached_tokens=int(prompt * cached_share) * bool(records) if ok else None,
                    ok=ok,
                    error=None if ok else "ReadTimeout",
                    http_status=200 if ok else None,
                    instance=f"inst-{session % 4}",
                    request_class=("WARM", "MEDIUM", "HEAVY")[turn % 3],
                    reason="lowest_score" if turn > 1 else "session_placed",
                    predicted_cached_tokens=int(prompt * cached_share) + 64,
                )
            )
    values = {"trace": "synthetic", "trace_sha256": "ab" * 32, "clock_scale": 10.0, "warmroute_version": "0.1.0"}
    head = RunHeader(label=label, **{**values, **header})  # type: ignore[arg-type]
    return Run(head, records, RunEnd(finished_unix_s=1.0, requests=len(records), ok=sum(r.ok for r in records)))


def write_run(path: Path, run: Run) -> Path:
    """Store a run as the replayer would."""
    lines = [encode_line(run.header), *(encode_line(record) for record in run.records)]
    if run.end is not None:
        lines.append(encode_line(run.end))
    path.write_bytes(b"".join(lines))
    return path


@pytest.fixture
def run_maker() -> RunMaker:
    """`make_run`."""
    return make_run


@pytest.fixture
def stored(tmp_path: Path) -> Callable[[Run], Path]:
    """Writes a run under its label and returns the path."""

    def store(run: Run) -> Path:
        return write_run(tmp_path / f"run-{len(list(tmp_path.iterdir()))}.jsonl", run)

    return store
