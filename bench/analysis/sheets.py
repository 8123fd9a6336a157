"""Models and GPUs by name or file: configs/models/*.yaml (or a model's config.json) and configs/gpus/*.yaml."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bench.analysis.architecture import Architecture
from bench.analysis.output import AnalysisError
from warmroute_yaml import load_yaml, problem_text

MODEL_FOLDER = Path(__file__).resolve().parents[2] / "configs" / "models"
GPU_FOLDER = Path(__file__).resolve().parents[2] / "configs" / "gpus"
_ALIASES = {"num_local_experts": "num_experts"}
_REFUSED = {
    "kv_lora_rank": "multi-head latent attention (its KV cache is not keys and values by head)",
    "n_shared_experts": "shared experts",
    "shared_expert_intermediate_size": "shared experts",
    "first_k_dense_replace": "a mix of dense and expert layers",
    "mlp_only_layers": "a mix of dense and expert layers",
    "linear_num_value_heads": "linear attention",
    "ssm_cfg": "state-space layers",
}
_Sheet = TypeVar("_Sheet", bound=BaseModel)


class GpuSheet(BaseModel):
    """A GPU's peaks according to its data sheet, without sparsity."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    source: str
    bf16_tflops: float = Field(gt=0)
    fp8_tflops: float | None = Field(default=None, gt=0)
    hbm_tb_per_s: float = Field(gt=0)
    memory_gb: float = Field(gt=0)
    visible_mib: float = Field(gt=0)
    """Memory that the driver reports, MiB."""

    def flops_per_s(self, weight_bits: int) -> float:
        """Peak FLOP/s of the tensor cores for weights of ``weight_bits``.

        Raises:
            AnalysisError: the sheet has no such figure.
        """
        if weight_bits == 16:
            return self.bf16_tflops * 1e12
        if self.fp8_tflops is None:
            raise AnalysisError(f"GPU {self.name} has no fp8_tflops; use --weight-bits 16 or add the figure")
        return self.fp8_tflops * 1e12

    @property
    def bytes_per_s(self) -> float:
        """Peak bandwidth of the memory, bytes per second."""
        return self.hbm_tb_per_s * 1e12

    @property
    def visible_bytes(self) -> float:
        """Memory that the driver reports, bytes."""
        return self.visible_mib * 2**20


def load_model(name: str) -> Architecture:
    """A model by name in configs/models, or from a YAML file or config.json.

    Raises:
        AnalysisError: no such model, or one with an architecture that is not supported.
    """
    path = _find(name, MODEL_FOLDER, "model")
    raw = _read(path)
    if path.suffix == ".json":
        raw = _from_hugging_face(raw, path)
    return _validated(Architecture, raw, path)


def load_gpu(name: str) -> GpuSheet:
    """A GPU by name in configs/gpus, or from such a YAML file.

    Raises:
        AnalysisError: no such GPU, or a file that is not one.
    """
    path = _find(name, GPU_FOLDER, "GPU")
    return _validated(GpuSheet, _read(path), path)


def _find(name: str, folder: Path, what: str) -> Path:
    path = Path(name) if name.endswith((".yaml", ".yml", ".json")) else folder / f"{name.lower()}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(each.stem for each in folder.glob("*.yaml")))
        raise AnalysisError(f"no {what} {name!r} ({path} is not there); known: {known}; or give a path to a file")
    return path


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        raw = json.loads(text) if path.suffix == ".json" else load_yaml(text)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, yaml.YAMLError) as error:
        raise AnalysisError(f"cannot read {path}: {error}") from error
    if not isinstance(raw, dict):
        raise AnalysisError(f"{path} must be a mapping of names to values")
    return raw


def _validated(kind: type[_Sheet], raw: dict[str, Any], path: Path) -> _Sheet:
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        lines = "; ".join(
            f"{'.'.join(map(str, each['loc'])) or 'file'}: {problem_text(each)}" for each in error.errors()
        )
        raise AnalysisError(f"{path} is not a {'GPU' if kind is GpuSheet else 'model'} file: {lines}") from error


def _from_hugging_face(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """The keys that are needed, with Hugging Face's defaults; unsupported architectures are rejected."""
    raw = raw.get("text_config", raw)
    for key, what in _REFUSED.items():
        if raw.get(key):
            raise AnalysisError(f"{path}: {key} means {what}, which this analysis does not support")
    if len(set(raw.get("layer_types") or [])) > 1 or raw.get("decoder_sparse_step", 1) != 1:
        raise AnalysisError(f"{path}: layers of different kinds, which this analysis does not support")
    if raw.get("use_sliding_window", raw.get("sliding_window") is not None):
        raise AnalysisError(f"{path}: a sliding window, which this analysis does not support")
    found = {key: raw[key] for key in Architecture.model_fields if raw.get(key) is not None and key != "name"}
    for key, ours in _ALIASES.items():
        if key in raw:
            found[ours] = raw[key]
    if found.get("num_experts"):
        # Mixtral's intermediate_size is that of one expert.
        found.setdefault("moe_intermediate_size", raw.get("intermediate_size", 0))
        found.pop("intermediate_size", None)
    heads, width = raw.get("num_attention_heads"), raw.get("hidden_size")
    if isinstance(heads, int) and heads > 0:
        found.setdefault("num_key_value_heads", heads)
        if isinstance(width, int):
            found.setdefault("head_dim", width // heads)
    found.pop("source", None)
    name = path.resolve().parent.name if path.stem == "config" else path.stem
    return {"name": name, "source": str(path), **found}
