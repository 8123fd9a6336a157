"""NVIDIA Dynamo's KV router: blocks to prefill plus blocks being decoded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from policies.routing.base import ColumnPolicy, Pick, least, require
from policies.snapshot import FleetColumns, FleetSnapshot
from policies.types import Reason, RequestView


@dataclass(frozen=True, slots=True)
class DynamoCost(ColumnPolicy):
    """``cost = prefill_load_scale x max(0, raw_prefill - credit) + decode + request_weight x requests``, in blocks.

    ``raw_prefill = (active_prefill_tokens + prompt) / block``; ``credit = overlap_score_credit x decay x cached /
    block``; ``decay = 1 / (1 + overlap_score_credit_decay x (active_prefill - least active_prefill) / prompt)``.
    ``decode`` is the blocks of the requests in flight. Lowest wins.

    Source: ai-dynamo/dynamo ``lib/kv-router/src/scheduling/selector/default.rs`` (``worker_logit``) and ``config.rs``
    as of commit 2a6da14c (2026-08-21), with its defaults: credit 1.0, decay 0, scale 1.0, request weight 0,
    temperature 0.

    Deviations: host, disk and shared tiers, taints and softmax sampling have no counterpart in the snapshot; the blocks
    of requests in flight are their decoded contexts plus what they have still to prefill, shared blocks counted as
    often as they are used (the source counts them once, and the cached part of requests in prefill as well); this
    request's own blocks are the same on every candidate and left out; ties go by ``tie_break``, not at random.
    Complexity: O(n).
    """

    overlap_score_credit: float = 1.0
    overlap_score_credit_decay: float = 0.0
    prefill_load_scale: float = 1.0
    decode_active_request_weight: float = 0.0
    name: ClassVar[str] = "dynamo_cost"

    def __post_init__(self) -> None:
        require(0 <= self.overlap_score_credit <= 1, "dynamo_cost: overlap_score_credit must be between 0 and 1")
        require(self.overlap_score_credit_decay >= 0, "dynamo_cost: overlap_score_credit_decay must not be negative")
        require(self.prefill_load_scale >= 0, "dynamo_cost: prefill_load_scale must not be negative")
        require(
            self.decode_active_request_weight >= 0, "dynamo_cost: decode_active_request_weight must not be negative"
        )

    def scores(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Sequence[float]:
        scale, weight = self.prefill_load_scale, self.decode_active_request_weight
        block, prompt = request.block_tokens, request.prompt_tokens
        return [
            (scale * (raw_prefill - credit) if (raw_prefill := (pending + prompt) / block) > credit else 0.0)
            + (decoding + pending) / block
            + weight * requests
            for pending, decoding, credit, requests in self._terms(request, columns)
        ]

    def inputs(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Iterable[dict[str, float]]:
        block, prompt = request.block_tokens, request.prompt_tokens
        return [
            {
                "raw_prefill_blocks": (pending + prompt) / block,
                "credit_blocks": credit,
                "decode_blocks": (decoding + pending) / block,
                "requests": requests,
            }
            for pending, decoding, credit, requests in self._terms(request, columns)
        ]

    def pick(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns, scores: Sequence[float]) -> Pick:
        return Pick(least(fleet, scores), Reason.LOWEST_SCORE)

    def _terms(self, request: RequestView, columns: FleetColumns) -> Iterable[tuple[int, int, float, int]]:
        """Tokens in prefill and decode, credit in blocks, and requests in flight, of every candidate."""
        pending, block, overlap = columns.pending_prefill_tokens, request.block_tokens, self.overlap_score_credit
        decay, divisor = self.overlap_score_credit_decay, max(1, request.prompt_tokens)
        if decay:
            fewest = min(pending)
            credits = [
                overlap / (1 + decay * ((each - fewest) / divisor)) * cached / block
                for each, cached in zip(pending, columns.cached_tokens, strict=True)
            ]
        else:
            credits = [overlap * cached / block for cached in columns.cached_tokens]
        return zip(pending, columns.decoding_tokens, credits, columns.requests, strict=True)
