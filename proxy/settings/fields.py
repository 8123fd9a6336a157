"""Settings of the request fields that engines interpret beyond OpenAI's API."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field

from proxy.settings.section import Section

GuardedField = Literal[
    "vllm_xargs",
    "extra_args",
    "sampling_params",
    "ec_transfer_params",
    "disaggregated_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "logits_processors",
    "custom_logit_processor",
    "prompt_embeds",
    "input_embeds",
    "priority",
    "request_id",
    "rid",
]
"""Fields with which a request reaches an engine's scheduler, connector or tensors."""

GUARDED_FIELDS: tuple[str, ...] = get_args(GuardedField)


class FieldSettings(Section):
    """Fields of a request that are refused by default."""

    allow: tuple[GuardedField, ...] = Field(
        default=(),
        description=f"fields that clients may send although they reach into the engine: {', '.join(GUARDED_FIELDS)}",
    )
