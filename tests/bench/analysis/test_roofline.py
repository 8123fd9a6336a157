"""Roofline: known parameters and bytes, FLOPs against a count by matrices, floors below the measured times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from bench.analysis.architecture import Architecture
from bench.analysis.cli import application
from bench.analysis.output import AnalysisError
from bench.analysis.roofline import (
    Machine,
    Precision,
    StepWork,
    compute_bound_chunk,
    decode_step,
    machine,
    prefill_s,
    prefill_step,
)
from bench.analysis.sheets import GPU_FOLDER, MODEL_FOLDER, load_gpu, load_model

QWEN = load_model("qwen3-coder-30b-a3b")
FULL = Precision()


@pytest.mark.parametrize(
    ("name", "billions", "kv_bytes"),
    [
        ("qwen3-coder-30b-a3b", 30.5, 98_304),
        ("qwen3-0.6b", 0.6, 114_688),
        ("qwen3-32b", 32.8, 262_144),
        ("llama-3.1-70b", 70.6, 327_680),
    ],
)
def test_models_have_their_published_sizes(name: str, billions: float, kv_bytes: int) -> None:
    model = load_model(name)
    assert model.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert model.kv_bytes_per_token() == kv_bytes
    assert model.kv_bytes_per_token(1.0) == kv_bytes / 2


def test_thirty_billion_of_which_three_are_active() -> None:
    embedding = QWEN.head_parameters
    assert (QWEN.layer_parameters_per_token + 2 * embedding) / 1e9 == pytest.approx(3.3, abs=0.1)


def test_every_bundled_sheet_loads_under_its_own_name() -> None:
    for path in MODEL_FOLDER.glob("*.yaml"):
        assert load_model(path.stem).name == path.stem
    for path in GPU_FOLDER.glob("*.yaml"):
        gpu = load_gpu(path.stem)
        assert gpu.name == path.stem
        assert gpu.fp8_tflops == pytest.approx(2 * gpu.bf16_tflops)
        # The memory that the driver reports is close to the sheet's decimal gigabytes.
        assert gpu.visible_bytes / 1e9 == pytest.approx(gpu.memory_gb, rel=0.08)


def plain_flops(model: Architecture, new: int, context: int) -> float:
    """A chunk's FLOPs matrix by matrix and token by token, the output layer for the last token."""
    inner, kv = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    total = 2.0 * model.hidden_size * model.vocab_size
    for position in range(context, context + new):
        layer = 2.0 * model.hidden_size * (inner + kv + kv) + 2.0 * inner * model.hidden_size
        layer += 2 * (2.0 * inner * (position + 0.5))
        if model.num_experts:
            layer += 2.0 * model.hidden_size * model.num_experts
            layer += model.num_experts_per_tok * 3 * 2.0 * model.hidden_size * model.moe_intermediate_size
        else:
            layer += 3 * 2.0 * model.hidden_size * model.intermediate_size
        total += model.num_hidden_layers * layer
    return total


@pytest.mark.parametrize("name", ["qwen3-coder-30b-a3b", "qwen3-0.6b"])
@pytest.mark.parametrize(("new", "context"), [(1, 0), (64, 0), (100, 1000)])
def test_flops_are_the_sum_over_matrices(name: str, new: int, context: int) -> None:
    model = load_model(name)
    assert prefill_step(model, FULL, new, context).flops == pytest.approx(plain_flops(model, new, context))


def test_a_dense_step_reads_all_weights_and_the_cache() -> None:
    model = load_model("qwen3-0.6b")
    one, eight = decode_step(model, FULL, 1, 1000), decode_step(model, FULL, 8, 1000)
    # Tied embeddings: the output layer is the only copy.
    assert one.bytes == 2 * model.parameters + 1001 * 114_688
    assert eight.bytes - one.bytes == 7 * 1001 * 114_688


def test_more_tokens_touch_more_experts_but_never_more_than_there_are() -> None:
    everything = QWEN.dense_parameters + QWEN.expert_parameters
    assert QWEN.touched_parameters(1) == pytest.approx(QWEN.layer_parameters_per_token)
    touched = [QWEN.touched_parameters(tokens) for tokens in (1, 2, 8, 64, 1000)]
    assert touched == sorted(touched)
    assert touched[-1] == pytest.approx(everything)


@given(st.integers(1, 10**9), st.integers(1, 10**9))
def test_a_step_takes_the_longer_of_both_limits(flops: int, size: int) -> None:
    on = Machine(2e3, 1e3)
    work = StepWork(flops, size)
    assert on.seconds(work) == max(flops / 2e3, size / 1e3)
    assert on.attainable(work.intensity) * on.seconds(work) == pytest.approx(flops)


def test_chunks_add_up_and_the_ridge_separates_them() -> None:
    on = machine(load_gpu("h200"), FULL)
    whole = prefill_s(QWEN, FULL, on, 20_000, 5_000, 8192)
    parts = [(8192, 5_000, 0), (8192, 13_192, 0), (3616, 21_384, 1)]
    assert whole == pytest.approx(sum(on.seconds(prefill_step(QWEN, FULL, *part)) for part in parts))
    edge = compute_bound_chunk(QWEN, FULL, on)
    assert edge is not None
    assert prefill_step(QWEN, FULL, edge, 0).intensity >= on.ridge > prefill_step(QWEN, FULL, edge - 1, 0).intensity


def test_two_gpus_halve_the_floor() -> None:
    one, two = machine(load_gpu("h100"), FULL), machine(load_gpu("h100"), FULL, 2)
    assert prefill_s(QWEN, FULL, two, 4096) == pytest.approx(prefill_s(QWEN, FULL, one, 4096) / 2)


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(application(), ["roofline", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("gpu", "kinds"), [("h20", {"prefill among 8 decodes", "decode"}), ("h200", {"prefill", "decode"})]
)
def test_nothing_measured_is_faster_than_its_floor(gpu: str, kinds: set[str]) -> None:
    found = run("--gpu", gpu)
    assert {row["kind"] for row in found["measured"]} == kinds
    for row in found["measured"]:
        assert 0.03 < row["floor_s"] / row["measured_s"] < 1, row


def test_a_long_prefill_comes_nearer_to_the_peak_than_a_short_one() -> None:
    share = {row["point"]: row["floor_s"] / row["measured_s"] for row in run("--gpu", "h20")["measured"]}
    assert share["131,072 new"] == pytest.approx(0.89, abs=0.01)
    assert share["2,048 new"] == pytest.approx(0.61, abs=0.01)


def test_measured_points_are_only_held_against_the_model_they_are_of() -> None:
    assert run("--model", "qwen3-0.6b", "--gpu", "h200")["measured"] == []
    assert run("--gpu", "h200", "--weight-bits", "8")["measured"] == []
    assert run("--gpu", "b200")["profile"] is None


HUGGING_FACE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 5472,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "sliding_window": None,
    "use_sliding_window": False,
}


def test_a_config_json_is_the_model_it_describes(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-Coder"
    folder.mkdir()
    path = folder / "config.json"
    path.write_text(json.dumps(HUGGING_FACE))
    read = load_model(str(path))
    assert read.name == "Qwen3-Coder"
    assert read.model_dump(exclude={"name", "source", "intermediate_size"}) == QWEN.model_dump(
        exclude={"name", "source", "intermediate_size"}
    )


def test_mixtral_names_its_experts_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "mixtral.json"
    dense = {
        key: HUGGING_FACE[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    }
    path.write_text(json.dumps(dense | {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 14336}))
    read = load_model(str(path))
    assert (read.num_experts, read.moe_intermediate_size, read.intermediate_size) == (8, 14336, 0)
    assert (read.num_key_value_heads, read.head_dim) == (32, 64)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kv_lora_rank": 512}, "multi-head latent attention"),
        ({"mlp_only_layers": [0]}, "a mix of dense and expert layers"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layers of different kinds"),
        ({"use_sliding_window": True}, "a sliding window"),
        ({"num_attention_heads": 33}, "multiple of num_key_value_heads"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"num_experts_per_tok": 0}, "experts need"),
    ],
)
def test_what_counts_otherwise_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(HUGGING_FACE | change))
    with pytest.raises(AnalysisError, match=said):
        load_model(str(path))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpu", "v100"], "no GPU 'v100'"),
        (["--model", "gpt-9"], "known: llama-3.1-70b"),
        (["--weight-bits", "4"], "16 or 8"),
        (["--chunk-tokens", "0"], "--chunk-tokens: '0' is not a whole number from 1"),
        (["--streams", ""], "--streams: give at least one"),
        (["--profile", "b200"], "--profile: no points file"),
    ],
)
def test_bad_options_say_what_to_do(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(application(), ["roofline", *arguments])
    assert result.exit_code == 2
    assert said in result.output.replace("\n", " ")
