"""Pieces of a hand-off over TCP: their number, Mooncake's queue, the warning of `up` and of the doctor."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from launch.__main__ import app
from launch.doctor.facts import EnginePython
from launch.doctor.probe import gather
from launch.engines.commands import engine_specs
from launch.engines.dimensions import tcp_warnings
from launch.fleet.file import FleetFile, parse_fleet
from launch.fleet.pieces import QUEUE_VARIABLE, QUEUED_PIECES, Pieces, queued_pieces, too_many_pieces
from tests.launch.doctor.machines import CPU_PACKAGES, bad, fleet, h200, reported
from tests.launch.fake_nvml import FakeNvml

LARGE = Pieces(layers=48, block_tokens=16, max_tokens=140_000)
QWEN3_CODER = {"num_hidden_layers": 48, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 262_144}


@pytest.mark.parametrize(
    ("block_tokens", "tokens", "most"),
    # Blocks x 96: those of the failed pulls were 196,704 (32,769 tokens) and 378,816 of at most 786,528.
    [(16, 32_769, 196_704), (16, 131_073, 786_528), (128, 131_073, 98_400), (128, 128, 96), (128, 129, 192)],
)
def test_a_worn_pool_has_one_piece_for_each_block_and_layer_of_k_and_of_v(
    block_tokens: int, tokens: int, most: int
) -> None:
    assert Pieces(48, block_tokens, tokens).most == most


@pytest.mark.parametrize("block_tokens", [16, 128])
def test_the_longest_prompt_fits_and_one_block_more_does_not(block_tokens: int) -> None:
    longest = Pieces(48, block_tokens, 1).longest_tokens(QUEUED_PIECES)
    assert longest == {16: 10_832, 128: 86_656}[block_tokens]
    assert too_many_pieces(Pieces(48, block_tokens, longest), QUEUED_PIECES) is None
    assert too_many_pieces(Pieces(48, block_tokens, longest + 1), QUEUED_PIECES) is not None


def test_the_finding_has_the_longest_prompt_and_the_remedy() -> None:
    problem = too_many_pieces(LARGE, QUEUED_PIECES)
    assert problem is not None
    assert "prompts longer than 10,832 tokens cannot be handed over" in problem[0]
    assert "140,000 tokens are up to 840,000 pieces, and Mooncake's queue takes 65,000" in problem[0]
    assert f'set vllm.block_size: 128, env.{QUEUE_VARIABLE}: "1000000"' in problem[1]
    larger = too_many_pieces(Pieces(48, 128, 140_000), QUEUED_PIECES)
    assert larger is not None
    assert "block_size" not in larger[1]  # it has that already


@pytest.mark.parametrize(
    ("setting", "mooncake", "limit"),
    [
        (None, None, 65_000),
        (None, "0.3.14", 65_000),
        (None, "0.3.13.post1", 2_048),
        ("300000", "0.3.14", 300_000),
        ("300000", "0.3.13.post1", 2_048),  # out of its range: it takes its default, with a warning in its log
        ("65535", "0.3.13.post1", 65_535),
        ("many", "0.3.14", 65_000),
        ("0", "0.3.14", 65_000),
    ],
)
def test_the_queue_by_version_and_setting(setting: str | None, mooncake: str | None, limit: int) -> None:
    assert queued_pieces({} if setting is None else {QUEUE_VARIABLE: setting}, mooncake) == limit


def a_fleet(folder: Path, config: dict[str, Any] | None = None, **values: Any) -> FleetFile:
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    vllm = {"python": sys.executable, "max_model_len": 140_000, **values.pop("vllm", {})}
    base = {"kind": "vllm", "count": 2, "model": str(folder), "role": "kv_both"}
    return parse_fleet({**base, "vllm": {"transfer": {"protocol": "tcp"}, **vllm}, **values})


def test_up_warns_once_of_prompts_that_do_not_fit(tmp_path: Path) -> None:
    [warning] = tcp_warnings(a_fleet(tmp_path, QWEN3_CODER), {})
    assert "prompts longer than 10,912 tokens" in warning
    assert "longer than 87,296" in tcp_warnings(a_fleet(tmp_path, vllm={"block_size": 128}), {})[0]
    assert "262,144 tokens are" in tcp_warnings(a_fleet(tmp_path, vllm={"max_model_len": None}), {})[0]


@pytest.mark.parametrize(
    "values",
    [
        {"vllm": {"block_size": 128, "max_model_len": 87_296}},
        {"vllm": {"transfer": {"protocol": "rdma"}}},
        {"vllm": {"transfer": {"protocol": "nvlink"}}},
        {"env": {QUEUE_VARIABLE: "1000000"}},
        {"vllm": {"device": "cpu", "max_model_len": 87_296}},  # blocks of 128 tokens by default
    ],
)
def test_up_does_not_warn_where_it_fits(tmp_path: Path, values: dict[str, Any]) -> None:
    assert tcp_warnings(a_fleet(tmp_path, QWEN3_CODER, **values), {}) == []


def test_up_does_not_warn_without_a_connector_or_dimensions(tmp_path: Path) -> None:
    assert tcp_warnings(a_fleet(tmp_path), {}) == []
    assert tcp_warnings(a_fleet(tmp_path, {**QWEN3_CODER, "kv_lora_rank": 512}), {}) == []
    assert tcp_warnings(a_fleet(tmp_path, {"num_key_value_heads": 4}), {}) == []
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_CODER))
    values = {"kind": "vllm", "count": 2, "model": str(tmp_path), "vllm": {"max_model_len": 140_000}}
    assert tcp_warnings(parse_fleet({**values, "role": "kv_both"}), {}) != []
    assert tcp_warnings(parse_fleet({**values, "role": "none"}), {}) == []


def test_the_inherited_environment_counts(tmp_path: Path) -> None:
    assert tcp_warnings(a_fleet(tmp_path, QWEN3_CODER), {QUEUE_VARIABLE: "1000000"}) == []


@pytest.mark.parametrize("protocol", ["tcp", "nvlink", "rdma"])
def test_engines_over_tcp_get_a_larger_queue_unless_it_is_given(tmp_path: Path, protocol: str) -> None:
    def queue(inherited: dict[str, str], **values: Any) -> list[str | None]:
        specs = engine_specs(a_fleet(tmp_path, vllm={"transfer": {"protocol": protocol}}, **values))
        return [spec.complete_environment(inherited).get(QUEUE_VARIABLE) for spec in specs]

    assert queue({}) == ["65535" if protocol == "tcp" else None] * 2
    assert queue({QUEUE_VARIABLE: "70000"}) == ["70000"] * 2
    assert queue({QUEUE_VARIABLE: "70000"}, env={QUEUE_VARIABLE: "1000000"}) == ["1000000"] * 2


def test_engines_without_a_connector_get_no_queue(tmp_path: Path) -> None:
    values = {"kind": "vllm", "count": 1, "model": str(tmp_path), "role": "none"}
    assert [dict(spec.default_environment) for spec in engine_specs(parse_fleet(values))] == [{}]


def test_a_dry_run_shows_the_warning(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_CODER))
    settings = ["vllm.transfer.protocol=tcp", "vllm.block_size=16", f"model={tmp_path}"]
    arguments = [part for setting in settings for part in ("--set", setting)]
    done = CliRunner().invoke(app, ["up", "elastic-2x-kv-both", "--dry-run", "--no-proxy", *arguments])
    assert done.exit_code == 0
    assert "warning: over TCP, prompts longer than 10,912 tokens" in done.output


def test_the_doctor_knows_the_version_of_mooncake() -> None:
    engines = fleet("tcp", pieces=LARGE)
    assert bad(h200(fleet=engines))["tcp-pieces"].startswith("warning: over TCP, prompts longer than 10,832 tokens")
    small = Pieces(layers=2, block_tokens=16, max_tokens=16_384)
    facts = h200(fleet=fleet("tcp", pieces=small))
    assert reported(facts, "tcp-pieces") == "ok: the longest prompt has at most 4,096 pieces"
    python = EnginePython(executable="/venv/bin/python", packages=CPU_PACKAGES)
    older = h200(fleet=fleet("tcp", pieces=small), engine_python=python)
    assert "prompts longer than 8,192 tokens" in bad(older)["tcp-pieces"]
    assert "tcp-pieces" not in bad(h200(fleet=fleet("nvlink", pieces=LARGE)))


def test_the_doctor_reads_the_models_folder(tmp_path: Path) -> None:
    found = gather(a_fleet(tmp_path, QWEN3_CODER), engine_python=sys.executable, library=FakeNvml()).fleet
    assert found is not None
    assert [engine.pieces for engine in found.engines] == [LARGE, LARGE]
