"""Stages of one request without sockets."""

from __future__ import annotations

from pathlib import Path

from bench.data_plane.request import STAGES, stages_us


async def test_a_request_is_served_to_its_end_stage_by_stage(tmp_path: Path) -> None:
    means = await stages_us(2_000, 3, 1_000, tmp_path, tune=lambda: None)
    assert len(means) == len(STAGES)
    assert min(means) > 0
    rows = (tmp_path / "breakdown.jsonl").read_bytes().splitlines()
    assert len(rows) == 33
    assert b'"completion_tokens":80' in rows[-1]
