"""Shorten the prompts of a trace, for engines whose context is smaller than the trace's."""

from __future__ import annotations

import msgspec

from replayer.traces.trace import Trace


def shortened(trace: Trace, scale: float) -> Trace:
    """The same trace with each prompt cut to ``scale`` times its blocks, at least one.

    The first blocks are kept, so prefixes that were shared stay shared. Output lengths and times do not change. Texts
    are left out, as they have the whole length.
    """
    requests = []
    for request in trace.requests:
        blocks = max(1, round(len(request.hash_ids) * scale))
        tokens = min(request.input_length, blocks * trace.block_tokens)
        requests.append(
            msgspec.structs.replace(request, hash_ids=request.hash_ids[:blocks], input_length=tokens, text=None)
        )
    return msgspec.structs.replace(trace, requests=requests)
