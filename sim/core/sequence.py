"""A request as it is submitted, and as the scheduler holds it while it lives."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from enum import IntEnum
from typing import NamedTuple

from sim.core.blocks import Holding
from sim.core.content import ROOT_KEY, TOKEN_BYTES, block_key, chain_keys, output_bytes, output_offset


class KvTransfer(NamedTuple):
    """``kv_transfer_params`` of one leg of a hand-off."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    transfer_id: str | None = None
    remote_engine_id: str | None = None
    remote_bootstrap_addr: str | None = None


class Request(NamedTuple):
    """A request as an engine takes it. Build it with ``from_tokens``, or with block keys from a trace.

    ``block_keys`` are chained content keys (a key stands for its block and all before it), at least one for every
    full block of the prompt; keys of a partial last block are ignored. ``tail`` holds the token bytes after the last
    full block, or nothing when only keys are known.
    """

    request_id: str
    prompt_tokens: int
    block_keys: SequenceOf[int]
    tail: bytes = b""
    max_tokens: int = 16
    min_tokens: int = 0
    stop_after: int | None = None
    """Tokens after which the simulated model would end by itself, the ending token included; None: never."""
    seed: int = 0
    kv_transfer: KvTransfer | None = None
    tokens: bytes = b""
    """The prompt's token bytes, where known: only reports of the cache's content need them."""
    output_key: int | None = None
    """Key of the first block with generated tokens, the next ones counting up; None: they are hashed from content."""
    priority: int = 0
    """Lower goes first where the engine schedules by priority."""

    @classmethod
    def from_tokens(
        cls,
        request_id: str,
        tokens: bytes,
        block_tokens: int,
        *,
        max_tokens: int = 16,
        min_tokens: int = 0,
        stop_after: int | None = None,
        seed: int = 0,
        kv_transfer: KvTransfer | None = None,
    ) -> Request:
        """A request for a prompt given as token bytes (``sim.core.content``), hashed in blocks of ``block_tokens``."""
        keys = chain_keys(tokens, block_tokens)
        tail = tokens[len(keys) * block_tokens * TOKEN_BYTES :]
        count = len(tokens) // TOKEN_BYTES
        return cls(request_id, count, keys, tail, max_tokens, min_tokens, stop_after, seed, kv_transfer, tokens)

    @property
    def output_offset(self) -> int:
        """Offset in the pseudo-text at which the output starts (``sim.core.content.output_bytes``)."""
        return output_offset(self.block_keys[-1] if self.block_keys else ROOT_KEY, self.tail, self.seed)


def keyed_request(
    request_id: str,
    keys: list[int],
    prompt_tokens: int,
    max_tokens: int,
    output_key: int,
    kv_transfer: KvTransfer | None = None,
    priority: int = 0,
) -> Request:
    """A request by keys alone, for virtual time: nothing is hashed, ``keys`` are taken as they are and never changed.

    ``keys``: chained content keys, at least one for every full block of the prompt (a trace's ``hash_ids``).
    ``output_key``: keys from it on, one per 64 generated tokens or whatever a block holds, are this output's own.
    """
    return Request(
        request_id,
        prompt_tokens,
        keys,
        max_tokens=max_tokens,
        kv_transfer=kv_transfer,
        output_key=output_key,
        priority=priority,
    )


class RequestStatus(IntEnum):
    """State of a request. ``PULLING``: waiting for KV from another engine (vLLM's WAITING_FOR_REMOTE_KVS)."""

    ARRIVING = 0
    WAITING = 1
    PULLING = 2
    RUNNING = 3
    DONE = 4


class Sequence:
    """A live request: its computed tokens, the blocks it references, when and why it will finish."""

    __slots__ = (
        "arrival",
        "block_tokens",
        "blocks",
        "cached_tokens",
        "computed",
        "decoding",
        "finish_reason",
        "full_blocks",
        "generated",
        "joined",
        "keys",
        "offset",
        "own_keys",
        "published",
        "pulled",
        "reported",
        "request",
        "serial",
        "status",
        "target",
        "wants_pull",
    )

    def __init__(self, request: Request, block_tokens: int, max_model_len: int) -> None:
        prompt = request.prompt_tokens
        full_blocks = prompt // block_tokens
        if prompt < 1 or request.max_tokens < 1:
            raise ValueError(f"{request.request_id}: a request needs at least 1 prompt token and max_tokens >= 1")
        if len(request.block_keys) < full_blocks:
            raise ValueError(f"{request.request_id}: {full_blocks} full blocks but {len(request.block_keys)} keys")
        if prompt + 1 > max_model_len:
            raise ValueError(f"{request.request_id}: {prompt} prompt tokens leave no room in {max_model_len}")
        self.request = request
        self.block_tokens = block_tokens
        self.status = RequestStatus.ARRIVING
        self.computed = 0
        """Tokens whose KV is in the request's blocks (or will be when the step in flight ends); while ``decoding``,
        as of when it joined the other streams. This also holds for ``generated``."""
        self.generated = 0
        self.decoding = False
        """True while it gets a token a step along with the other streams (``sim.core.decoding``)."""
        self.joined = 0
        self.arrival = 0
        """Number of its submission."""
        self.serial = 0
        """Number of its admission while it runs: the running requests are in this order."""
        self.reported = 0
        """Tokens that events have reported."""
        self.blocks = Holding()
        self.full_blocks = full_blocks
        """Full blocks of the prompt."""
        keys = request.block_keys
        self.keys = keys if type(keys) is list else list(keys)
        """Content keys of the prompt's blocks, perhaps more; changed only when ``own_keys``."""
        self.own_keys = False
        self.published = 0
        """Number of ``blocks``, from the first, that prefix lookups can find."""
        self.cached_tokens: int | None = None
        """Prompt tokens that were not computed here when the request was first scheduled."""
        self.offset: int | None = None
        transfer = request.kv_transfer
        self.wants_pull = transfer is not None and transfer.do_remote_prefill
        self.pulled = False
        self.target, self.finish_reason = _end(request, max_model_len)

    @property
    def total(self) -> int:
        """Prompt tokens plus tokens generated so far."""
        return self.request.prompt_tokens + self.generated

    def keys_between(self, first: int, last: int) -> list[int]:
        """Keys of the blocks from ``first`` up to ``last`` (exclusive), all of them full; a list of the caller's."""
        if last <= self.full_blocks:
            return self.keys[first:last]
        output = self.request.output_key
        if output is not None and first >= self.full_blocks:
            output -= self.full_blocks
            return list(range(output + first, output + last))
        self.extend_keys(last)
        return self.keys[first:last]

    def extend_keys(self, count: int) -> None:
        """Make ``keys`` cover the first ``count`` blocks, all of them full; the blocks past the prompt hold output."""
        if count <= self.full_blocks:
            return
        if not self.own_keys:
            self.keys = self.keys[: self.full_blocks]
            self.own_keys = True
        keys = self.keys
        output = self.request.output_key
        if output is not None:
            keys.extend(range(output + len(keys) - self.full_blocks, output + count - self.full_blocks))
            return
        while len(keys) < count:
            start = len(keys) * self.block_tokens
            prompt = self.request.prompt_tokens
            head = self.request.tail if start < prompt else b""
            if self.offset is None:
                self.offset = self.request.output_offset
            text = output_bytes(self.offset, max(start - prompt, 0), start + self.block_tokens - prompt)
            keys.append(block_key(head + text, keys[-1] if keys else ROOT_KEY))

    def block_tokens_between(self, first: int, last: int) -> bytes:
        """Token bytes of the blocks from ``first`` up to ``last`` (exclusive), prompt and output."""
        start, stop, prompt = first * self.block_tokens, last * self.block_tokens, self.request.prompt_tokens
        known = self.request.tokens[start * TOKEN_BYTES : min(stop, prompt) * TOKEN_BYTES]
        if stop <= prompt:
            return known
        if self.offset is None:
            self.offset = self.request.output_offset
        return known + output_bytes(self.offset, max(start - prompt, 0), stop - prompt)


def _end(request: Request, max_model_len: int) -> tuple[int, str]:
    """Number of tokens a request will generate, and its finish reason. The end-of-sequence token is not chosen before
    ``min_tokens`` others; where it falls on the last allowed token, "stop" wins (vLLM's order of checks)."""
    limit = min(request.max_tokens, max_model_len - request.prompt_tokens)
    if request.stop_after is not None:
        stop = request.stop_after if request.stop_after > request.min_tokens else request.min_tokens + 1
        if stop <= limit:
            return stop, "stop"
    return limit, "length"
