"""Pool and overrides of ``small_engines.sh``: what its environment asks for, checked before an engine starts.

Run by the engines' Python, so it needs the standard library only. Prints the tokens of a KV pool (0: unknown) and the
value of vLLM's ``--hf-overrides``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

QWEN3_06B = {
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "hidden_size": 1024,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
}
"""Of config.json of Qwen/Qwen3-0.6B, the default of ``MODEL``, which is not a folder."""
WEIGHT_SHAPES = frozenset({*QWEN3_06B, "intermediate_size", "vocab_size"} - {"torch_dtype"})
VALUE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
BLOCK_STEP = 16
"""FLASH_ATTN takes blocks of a multiple of this many tokens."""
POSITIONS = "max_position_embeddings"


class EngineShapeError(ValueError):
    """Settings that contradict each other; the message names them."""


def merged_overrides(text: str, longest: int, *, random_weights: bool) -> dict[str, Any]:
    """Overrides of the model's configuration: those of a JSON object, and the context.

    Raises:
        EngineShapeError: no JSON object, or one that other settings contradict.
    """
    try:
        given = json.loads(text)
    except ValueError as error:
        raise EngineShapeError(f"HF_OVERRIDES: {error}; give a JSON object") from error
    if not isinstance(given, dict):
        raise EngineShapeError(f"HF_OVERRIDES: {text} is not a JSON object")
    if POSITIONS in given:
        raise EngineShapeError(f"HF_OVERRIDES: leave out {POSITIONS}, and set MAX_MODEL_LEN")
    shapes = sorted(WEIGHT_SHAPES & set(given))
    if shapes and not random_weights:
        raise EngineShapeError(
            f"HF_OVERRIDES: {', '.join(shapes)} changes the shape of weights, which no file has: set LOAD_FORMAT=dummy"
        )
    return {**given, POSITIONS: longest}


def configuration(model: str) -> dict[str, Any] | None:
    """The configuration of a model's folder or of the default model; None for other names, which vLLM downloads."""
    path = Path(model) / "config.json"
    if path.is_file():
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
    return dict(QWEN3_06B) if model == "Qwen/Qwen3-0.6B" else None


def pool_tokens(config: dict[str, Any], pool_bytes: int, block_tokens: int) -> int:
    """Tokens of a KV pool as vLLM counts them: whole blocks of keys and values of all layers.

    0 where the configuration does not have the dimensions.

    Raises:
        EngineShapeError: the heads do not go together.
    """
    layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    if layers is None or heads is None:
        return 0
    pairs = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or config.get("hidden_size", 0) // heads
    for name, value in (("num_hidden_layers", layers), ("num_key_value_heads", pairs), ("head_dim", width)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise EngineShapeError(f"{name}: {value!r} is no positive integer")
    if heads % pairs:
        raise EngineShapeError(f"num_attention_heads {heads} is no multiple of num_key_value_heads {pairs}")
    value_bytes = VALUE_BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), 2)
    return int(pool_bytes // (2 * layers * pairs * width * value_bytes * block_tokens) * block_tokens)


def shape(
    model: str, overrides: str, longest: int, pool_bytes: int, block_tokens: int, *, random_weights: bool
) -> tuple[int, dict[str, Any]]:
    """Tokens of a pool, 0 if unknown, and all overrides. Raises EngineShapeError."""
    if block_tokens < 1 or block_tokens % BLOCK_STEP:
        raise EngineShapeError(f"BLOCK_SIZE: {block_tokens} is no multiple of {BLOCK_STEP}")
    merged = merged_overrides(overrides, longest, random_weights=random_weights)
    config = configuration(model)
    if config is None:
        return 0, merged
    tokens = pool_tokens({**config, **merged}, pool_bytes, block_tokens)
    if 0 < tokens < longest:
        raise EngineShapeError(
            f"MAX_MODEL_LEN {longest} does not fit the pool of {tokens} tokens: raise POOL_BYTES, or lower it"
        )
    return tokens, merged


def main(arguments: list[str]) -> None:
    """Print both. Exit status 2 for settings that contradict each other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--overrides", default="{}")
    parser.add_argument("--longest", type=int, required=True)
    parser.add_argument("--pool-bytes", type=int, required=True)
    parser.add_argument("--block-size", type=int, required=True)
    parser.add_argument("--random-weights", action="store_true")
    given = parser.parse_args(arguments)
    try:
        tokens, merged = shape(
            given.model,
            given.overrides,
            given.longest,
            given.pool_bytes,
            given.block_size,
            random_weights=given.random_weights,
        )
    except (EngineShapeError, OSError) as error:
        sys.exit(f"error: {error}")
    print(tokens, json.dumps(merged, separators=(",", ":")))


if __name__ == "__main__":
    main(sys.argv[1:])
