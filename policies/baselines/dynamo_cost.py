"""NVIDIA Dynamo's KV router: blocks to prefill plus blocks being decoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.routing.base import lowest, require
from policies.snapshot import FleetSnapshot
from policies.types import CandidateScore, Choice, InstanceView, Reason, RequestView


@dataclass(frozen=True, slots=True)
class DynamoCost:
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

    def choose(self, request: RequestView, fleet: FleetSnapshot) -> Choice:
        least = min([view.pending_prefill_tokens for view in fleet.instances])
        scores = tuple([self._score(view, request, least) for view in fleet.instances])
        return Choice(lowest(fleet, scores).instance, Reason.LOWEST_SCORE, scores)

    def _score(self, view: InstanceView, request: RequestView, least_pending_tokens: int) -> CandidateScore:
        block, prompt = request.block_tokens, max(1, request.prompt_tokens)
        excess = (view.pending_prefill_tokens - least_pending_tokens) / prompt
        credit = self.overlap_score_credit / (1 + self.overlap_score_credit_decay * excess) * view.cached_tokens / block
        raw_prefill = (view.pending_prefill_tokens + request.prompt_tokens) / block
        decode = (view.decoding_tokens + view.pending_prefill_tokens) / block
        cost = self.prefill_load_scale * max(0.0, raw_prefill - credit) + decode
        return CandidateScore(
            view.instance,
            cost + self.decode_active_request_weight * view.requests,
            {
                "raw_prefill_blocks": raw_prefill,
                "credit_blocks": credit,
                "decode_blocks": decode,
                "requests": view.requests,
            },
        )
