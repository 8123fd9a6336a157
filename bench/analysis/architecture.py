"""Arithmetic of a decoder-only transformer: parameters, FLOPs and bytes, dense or mixture of experts.

Only matrices are counted; norms and biases are left out, they are below a thousandth.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

GATED_MATRICES = 3
"""Gate, up and down projection of a gated feed-forward layer (SwiGLU)."""


class Architecture(BaseModel):
    """Dimensions of a model with grouped-query attention and gated feed-forward layers, all layers alike."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    source: str = ""
    hidden_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    intermediate_size: int = Field(default=0, ge=0)
    """Width of the dense feed-forward layers; unused with experts."""
    tie_word_embeddings: bool = False
    num_experts: int = Field(default=0, ge=0)
    num_experts_per_tok: int = Field(default=0, ge=0)
    moe_intermediate_size: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _one_kind(self) -> Architecture:
        if self.num_experts:
            if not 0 < self.num_experts_per_tok <= self.num_experts or not self.moe_intermediate_size:
                raise ValueError("experts need num_experts_per_tok (1 to num_experts) and moe_intermediate_size")
        elif not self.intermediate_size:
            raise ValueError("a dense model needs intermediate_size, one with experts num_experts")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        return self

    @property
    def attention_parameters(self) -> int:
        """Query, key, value and output projections of all layers."""
        inner = self.num_attention_heads * self.head_dim
        kv = self.num_key_value_heads * self.head_dim
        return self.num_hidden_layers * self.hidden_size * (2 * inner + 2 * kv)

    @property
    def expert_parameters(self) -> int:
        """All experts of all layers; 0 for a dense model."""
        return (
            self.num_hidden_layers * self.num_experts * GATED_MATRICES * self.hidden_size * self.moe_intermediate_size
        )

    @property
    def dense_parameters(self) -> int:
        """Parameters that every token uses in the layers: attention, routers, dense feed-forward."""
        if self.num_experts:
            other = self.hidden_size * self.num_experts
        else:
            other = GATED_MATRICES * self.hidden_size * self.intermediate_size
        return self.attention_parameters + self.num_hidden_layers * other

    @property
    def head_parameters(self) -> int:
        """The output layer: read and multiplied once for each token that is sampled."""
        return self.hidden_size * self.vocab_size

    @property
    def parameters(self) -> int:
        """All matrices, the embedding included."""
        embeddings = 1 if self.tie_word_embeddings else 2
        return self.dense_parameters + self.expert_parameters + embeddings * self.head_parameters

    @property
    def active_share(self) -> float:
        """Share of the experts that one token uses; 1 without experts."""
        return self.num_experts_per_tok / self.num_experts if self.num_experts else 1.0

    @property
    def layer_parameters_per_token(self) -> float:
        """Parameters of the layers that one token is multiplied with."""
        return self.dense_parameters + self.expert_parameters * self.active_share

    def touched_parameters(self, tokens: int) -> float:
        """Parameters of the layers read by a step over ``tokens`` tokens, if each chooses its experts at random.

        A token does not use an expert with probability 1 - k/E, so ``1 - (1 - k/E)**tokens`` of them are read.
        """
        return self.dense_parameters + self.expert_parameters * (1.0 - (1.0 - self.active_share) ** tokens)

    def kv_bytes_per_token(self, bytes_per_value: float = 2.0) -> float:
        """Bytes of the keys and values of one token in all layers."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * bytes_per_value

    def layer_flops_per_token(self) -> float:
        """FLOPs of one token in all layers, without attention scores; a multiply-add counts as two."""
        return 2.0 * self.layer_parameters_per_token

    def attention_flops(self, new_tokens: float, context_tokens: float) -> float:
        """Scores and weighted values of ``new_tokens`` that follow ``context_tokens``, each seeing what precedes it.

        Each pair costs 2 + 2 multiply-adds counted twice over heads and their width; half of the square is masked.
        """
        pairs = new_tokens * (context_tokens + new_tokens / 2)
        return 4.0 * self.num_hidden_layers * self.num_attention_heads * self.head_dim * pairs
