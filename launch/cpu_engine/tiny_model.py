"""Write a tiny model of a real architecture: ``python -m launch.cpu_engine.tiny_model FOLDER``.

Run it with the engines' Python. The model is a Qwen3 of two layers with random weights, a byte-level BPE tokenizer
trained on the Python standard library's sources, and a chat template. Nothing is downloaded. Its text has no
meaning, but it depends on all parts of the prompt: a wrong or missing KV cache shows as different text.
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Token ids 0, 1 and 2; the first also ends a text and pads."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)


@dataclass(frozen=True)
class Shape:
    """Size of the model. KV bytes per token: 2 x layers x kv_heads x head_size x bytes per value."""

    vocabulary: int = 2048
    hidden: int = 64
    layers: int = 2
    heads: int = 2
    kv_heads: int = 1
    head_size: int = 32
    context_tokens: int = 131_072
    spread: float = 0.3
    """Standard deviation of the weights. The usual 0.02 gives nearly the same logits for every prompt."""


def make_tokenizer(vocabulary: int, corpus: list[Path]) -> Any:
    """A fast tokenizer with exactly ``vocabulary`` entries, the same for the same corpus."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast  # type: ignore[import-not-found]

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in corpus], trainer)
    if tokenizer.get_vocab_size() != vocabulary:
        raise SystemExit(f"the corpus gives only {tokenizer.get_vocab_size()} of {vocabulary} tokens; use more files")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL_TOKENS[0],
        pad_token=SPECIAL_TOKENS[0],
        chat_template=CHAT_TEMPLATE,
        model_max_length=10**7,
    )


def make_model(shape: Shape, seed: int, end_of_text: int) -> Any:
    """A Qwen3 with random bfloat16 weights, the same for the same seed."""
    import torch  # type: ignore[import-not-found]
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=2 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        max_position_embeddings=shape.context_tokens,
        rope_theta=1e6,
        initializer_range=shape.spread,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end_of_text,
        pad_token_id=end_of_text,
    )
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.generation_config.do_sample = False
    return model


def write(folder: Path, shape: Shape, seed: int) -> int:
    """Write the model and its tokenizer; returns the number of weights."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    corpus = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:120]
    tokenizer = make_tokenizer(shape.vocabulary, corpus)
    model = make_model(shape, seed, tokenizer.eos_token_id)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder, safe_serialization=True)
    return sum(weights.numel() for weights in model.parameters())


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m launch.cpu_engine.tiny_model", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder for the model; created when missing")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default 0)")
    parser.add_argument(
        "--vocabulary", type=int, default=Shape.vocabulary, help=f"tokens (default {Shape.vocabulary}); 300 at least"
    )
    chosen = parser.parse_args(arguments)
    count = write(chosen.folder, Shape(vocabulary=chosen.vocabulary), chosen.seed)
    print(f"tiny model: {count:,} weights, vocabulary {chosen.vocabulary}, seed {chosen.seed} -> {chosen.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
