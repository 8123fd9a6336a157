"""Types of a trace: requests with chained block ids, in time order, and the rule for the last block.

Imports only msgspec, because the engine simulator imports these types.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

TailRule = Literal["ceil", "floor"]
"""Treatment of a prompt's last, partial block: ``ceil`` keeps an id for it, ``floor`` drops it."""


class TraceError(ValueError):
    """A trace that cannot be used as it is. The message names file, line, error and remedy."""


class TraceRequest(msgspec.Struct, kw_only=True):
    """One call to the model.

    ``hash_ids`` are chained: an id stands for its block of ``block_tokens`` tokens *and everything before it*, so two
    prompts share exactly the blocks of their common id prefix. The last id may stand for a partial block (``ceil``).
    """

    chat_id: int
    parent_chat_id: int = -1
    """``chat_id`` of the previous turn; -1 for the first one."""
    session_id: str = ""
    turn: int = 1
    timestamp_s: float = 0.0
    """Arrival, seconds from the start of the trace."""
    input_length: int = 0
    """Prompt tokens, the whole history included (prompts are cumulative)."""
    output_length: int = 0
    """Output tokens; 0 occurs in real traces (replayed as 1)."""
    hash_ids: Sequence[int] = ()
    think_time_s: float | None = None
    """Seconds between the previous turn's end and this call, where the trace has them."""
    api_time_s: float | None = None
    """Duration of the recorded call, seconds."""
    type: str = ""
    subagent: bool = False
    tenant: str | None = None
    lengths_only: bool = False
    """The trace does not say what prompts have in common, so that this one begins as no other."""
    text: str | None = None
    """The real prompt, for traces of text; token counts are then estimates."""

    def full_blocks(self, block_tokens: int) -> int:
        """Number of ``hash_ids`` of full blocks; only these can be prefix-cache hits."""
        return min(len(self.hash_ids), self.input_length // block_tokens)


class Trace(msgspec.Struct, kw_only=True):
    """Requests sorted by time; the turns of one session come in order."""

    requests: list[TraceRequest]
    block_tokens: int
    tail: TailRule = "ceil"
    name: str = ""
    sha256: str = ""
    """Of the file's bytes as stored (of all files in name order, for a folder)."""
    notes: list[str] = msgspec.field(default_factory=list)
    """Sentences on what the loader derived, repaired or dropped."""
    read_with: dict[str, Any] = msgspec.field(default_factory=dict)
    """Options of the loader that are not its defaults: who reads the file again for a run needs the same."""

    def sessions(self) -> dict[str, list[TraceRequest]]:
        """Turns per session, sessions in order of first appearance."""
        grouped: dict[str, list[TraceRequest]] = {}
        for request in self.requests:
            grouped.setdefault(request.session_id, []).append(request)
        return grouped

    @property
    def duration_s(self) -> float:
        """Seconds between the first and the last arrival."""
        return self.requests[-1].timestamp_s - self.requests[0].timestamp_s if self.requests else 0.0
