"""Settings of the predictions: index, KV events, tokenizer, ledger, snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from proxy.settings.section import Seconds, Section


class IndexSettings(Section):
    """The shadow prefix index."""

    block_tokens: int = Field(default=16, ge=1, description="tokens per block until an engine reports its own")
    text_block_bytes: int = Field(default=1024, ge=16, description="UTF-8 bytes per block of text and chat prompts")
    capacity_blocks: int = Field(
        default=1_000_000, ge=1, description="blocks per instance until its engine reports a KV pool"
    )
    bytes_per_token: Annotated[float, Field(gt=0)] = Field(
        default=4.0, description="initial ratio for text prompts, then learned"
    )


class EventSettings(Section):
    """KV events of the instances that publish them (their ``events_url``)."""

    topic: str = Field(default="", description="topic prefix to subscribe to; empty: all")
    receive_hwm: int = Field(default=100_000, ge=1, description="batches queued per instance before some are dropped")
    blocks_per_turn: int = Field(default=256, ge=1, description="blocks applied before yielding to other tasks")
    replay_timeout_s: Seconds = Field(default=5.0, description="bound on fetching missed batches")
    replay_at_start_s: float = Field(
        default=5.0, ge=0, description="time that the start of the proxy waits for the replay of past events"
    )
    join_interval_s: Seconds = Field(
        default=2.0, description="interval between attempts to replay what was stored before the proxy subscribed"
    )


class TokenizerSettings(Section):
    """The model's tokenizer, for exact blocks of text and chat prompts."""

    path: Path | None = Field(
        default=None, description="tokenizer.json or the model's folder; none: text and chat are routed by bytes"
    )
    chat_template: str = Field(
        default="auto", description="auto (beside the tokenizer), or the Jinja file given to the engine"
    )
    threads: int = Field(default=2, ge=1, description="tokenizer threads")
    cache_bytes: int = Field(default=256 * 1024 * 1024, ge=0, description="memory for cached pieces of tokenized text")
    mismatches: int = Field(
        default=3, ge=1, description="consecutive count mismatches with an engine before an endpoint is routed by bytes"
    )

    @model_validator(mode="after")
    def _exists(self) -> TokenizerSettings:
        if self.path is not None and not self.path.exists():
            raise ValueError(f"no tokenizer at {self.path}: give a tokenizer.json or a folder that contains one")
        if self.chat_template != "auto" and not Path(self.chat_template).is_file():
            raise ValueError(f"no chat template at {self.chat_template}: give a Jinja file, or auto")
        return self


class LedgerSettings(Section):
    """In-flight load tracked by the router."""

    recent_half_life_s: Seconds = Field(default=30.0, description="half-life of the recently-assigned term")


class SnapshotSettings(Section):
    """Shadow index and sessions on disk, for the next process."""

    path: Path | None = Field(
        default=None, description="file, readable by its owner only; none: a restarted proxy starts without them"
    )
    interval_s: Seconds = Field(default=30.0, description="time between two snapshots; the last is written at the end")
    max_bytes: int = Field(
        default=256 * 1024 * 1024,
        ge=65_536,
        description="maximum size of the file, shared equally by the instances and the sessions, the most recent first",
    )
    max_age_s: Seconds = Field(default=600.0, description="age beyond which a snapshot is ignored at the start")


class ResponseSettings(Section):
    """Stored responses (``/v1/responses``): the engine that has each is remembered."""

    capacity: int = Field(default=20_000, ge=1, description="maximum number of responses")
    ttl_s: Seconds = Field(default=86_400.0, description="time after which a response is no longer found")
