"""Settings of what predicts: index, KV events, tokenizer, ledger, sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from proxy.settings.section import Seconds, Section


class IndexSettings(Section):
    """The shadow prefix index."""

    block_tokens: int = Field(default=16, ge=1, description="block of token-id prompts until an engine reports its own")
    text_block_bytes: int = Field(default=1024, ge=16, description="block of text and chat prompts, in UTF-8 bytes")
    capacity_blocks: int = Field(
        default=1_000_000, ge=1, description="bound per instance until its engine reports a KV pool"
    )
    bytes_per_token: Annotated[float, Field(gt=0)] = Field(
        default=4.0, description="first guess for text, then learned"
    )


class EventSettings(Section):
    """KV events of the instances that publish them (their ``events_url``)."""

    topic: str = Field(default="", description="topic to subscribe to, a prefix; empty: all")
    receive_hwm: int = Field(default=100_000, ge=1, description="batches queued per instance before some are lost")
    blocks_per_turn: int = Field(default=256, ge=1, description="blocks entered before other work has its turn")
    replay_timeout_s: Seconds = Field(default=5.0, description="bound on fetching missed batches")
    join_interval_s: Seconds = Field(
        default=2.0, description="between two attempts to learn by replay what was stored before the proxy listened"
    )


class TokenizerSettings(Section):
    """The model's tokenizer, so that text and chat prompts have exact blocks too."""

    path: Path | None = Field(
        default=None, description="tokenizer.json or the model's folder; none: text and chat are routed by bytes"
    )
    chat_template: str = Field(
        default="auto", description="auto (beside the tokenizer), or the Jinja file given to the engine"
    )
    threads: int = Field(default=2, ge=1, description="threads that tokenize")
    cache_bytes: int = Field(default=256 * 1024 * 1024, ge=0, description="memory for pieces of text already tokenized")
    mismatches: int = Field(
        default=3, ge=1, description="prompts in a row an engine counts otherwise before an endpoint is routed by bytes"
    )

    @model_validator(mode="after")
    def _exists(self) -> TokenizerSettings:
        if self.path is not None and not self.path.exists():
            raise ValueError(f"no tokenizer at {self.path}: give a tokenizer.json or a folder that holds one")
        if self.chat_template != "auto" and not Path(self.chat_template).is_file():
            raise ValueError(f"no chat template at {self.chat_template}: give a Jinja file, or auto")
        return self


class LedgerSettings(Section):
    """Load kept by the router itself."""

    recent_half_life_s: Seconds = Field(default=30.0, description="half-life of the recently-assigned term")


class SessionSettings(Section):
    """The session table."""

    capacity: int = Field(default=100_000, ge=1, description="sessions remembered at most")
    ttl_s: Seconds = Field(default=3600.0, description="an idle session is forgotten after this long")
    headers: tuple[str, ...] = Field(
        default=(
            "x-session-id",
            "x-claude-code-session-id",
            "session-id",
            "session_id",
            "thread-id",
            "x-dynamo-session-id",
        ),
        description="request headers that may carry the session id, first match wins; then prompt_cache_key, then user",
    )
