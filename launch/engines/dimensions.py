"""Sizes of an engine's hand-offs, from the dimensions in its model's folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from launch.engines.vllm import resolve_model
from launch.fleet.fabric import least_write_bytes
from launch.fleet.file import FleetFile
from launch.fleet.members import Member
from launch.fleet.pieces import TCP_QUEUE, Pieces, queued_pieces, too_many_pieces
from policies.types import Role, Transport

_DEFAULT_BLOCK_TOKENS = {"cpu": 128}
"""Block size that vLLM chooses on a device; on others `_GPU_BLOCK_TOKENS`."""
_GPU_BLOCK_TOKENS = 16


class _Dimensions(msgspec.Struct):
    """Part of a model's config.json."""

    num_hidden_layers: int = 0
    num_key_value_heads: int | None = None
    num_attention_heads: int = 0
    head_dim: int | None = None
    hidden_size: int = 0
    max_position_embeddings: int | None = None
    kv_lora_rank: int | None = None
    """Of models with latent attention, whose KV has no heads, and is one tensor for each layer."""


def smallest_write_bytes(member: Member) -> int | None:
    """Smallest write of a hand-off in bytes; None where the model's dimensions are not known."""
    vllm, config = member.vllm, _dimensions(member)
    if config is None or vllm.block_size is None:
        return None
    heads = config.num_key_value_heads or config.num_attention_heads
    size = config.head_dim or config.hidden_size // max(1, config.num_attention_heads)
    if not heads or not size:
        return None
    value_bytes = 1 if "8" in (vllm.kv_cache_dtype or "") else 4 if vllm.dtype in {"float32", "float"} else 2
    return least_write_bytes(max(1, heads // vllm.tensor_parallel_size), size, value_bytes, vllm.block_size)


def pieces_of(member: Member) -> Pieces | None:
    """Dimensions that decide the pieces of a hand-off; None where they are not known."""
    vllm, config = member.vllm, _dimensions(member)
    if config is None or not config.num_hidden_layers:
        return None
    longest = vllm.max_model_len or config.max_position_embeddings
    if not longest:
        return None
    block_tokens = vllm.block_size or _DEFAULT_BLOCK_TOKENS.get(vllm.device, _GPU_BLOCK_TOKENS)
    return Pieces(config.num_hidden_layers, block_tokens, longest)


def tcp_warnings(fleet: FleetFile, inherited: Mapping[str, str] | None = None) -> list[str]:
    """Sentences on engines of the fleet whose long prompts cannot be handed over over TCP, each with its remedy.

    Args:
        fleet: the fleet to start.
        inherited: the environment that the engines would inherit; default: this process's.
    """
    found: dict[str, None] = {}
    for member in fleet.members if fleet.kind == "vllm" else ():
        if member.role is Role.NONE or member.vllm.transfer.protocol is not Transport.TCP:
            continue
        pieces = pieces_of(member)
        limit = queued_pieces({**TCP_QUEUE, **(os.environ if inherited is None else inherited), **member.env})
        if pieces is not None and (problem := too_many_pieces(pieces, limit)) is not None:
            found["; ".join(problem)] = None
    return list(found)


def _dimensions(member: Member) -> _Dimensions | None:
    """The dimensions in the model's folder; None where it is not here, or its KV has no heads."""
    try:
        text = (Path(resolve_model(member.model)) / "config.json").read_bytes()
        config = msgspec.json.decode(text, type=_Dimensions)
    except (OSError, msgspec.MsgspecError):
        return None
    return config if config.kv_lora_rank is None else None
