"""Log probabilities: made up, in the shape of the API."""

from __future__ import annotations

from typing import Any

from sim.core.content import TOKEN_BYTES, output_bytes

_MOST_LOGPROBS = 20
_STEP = 0.125
"""Difference between the log probabilities of two alternatives; a power of two, so that it is exact in JSON."""


def logprobs_asked(flag: bool | int | None, top: int | None) -> int | None:
    """Alternatives to report for each token; None: no log probabilities.

    Args:
        flag: ``logprobs`` of a chat (true or false) or of a completion (a number).
        top: ``top_logprobs`` of a chat.

    Raises:
        ValueError: more than 20, or fewer than 0.
    """
    if flag is None or flag is False:
        return None
    count = (top or 0) if flag is True else flag
    if not 0 <= count <= _MOST_LOGPROBS:
        raise ValueError(f"logprobs must be in 0 .. {_MOST_LOGPROBS}, got {count}")
    return count


def logprobs(offset: int, start: int, stop: int, count: int, *, chat: bool) -> dict[str, Any]:
    """Log probabilities of output tokens ``start`` to ``stop``, in a chat's shape or in a completion's."""
    tokens = [output_bytes(offset, at, at + 1).decode("ascii") for at in range(start, stop)]
    found = [_alternatives(offset, start + number, count) for number in range(len(tokens))]
    if not chat:
        return {
            "text_offset": [TOKEN_BYTES * at for at in range(start, stop)],
            "token_logprobs": [-_STEP] * len(tokens),
            "tokens": tokens,
            "top_logprobs": [dict(each) or {token: -_STEP} for token, each in zip(tokens, found, strict=True)],
        }
    return {
        "content": [
            {**_entry(token, -_STEP), "top_logprobs": [_entry(*each) for each in top]}
            for token, top in zip(tokens, found, strict=True)
        ]
    }


def _alternatives(offset: int, at: int, count: int) -> list[tuple[str, float]]:
    """The generated token first, then the ones that would follow it."""
    words = dict.fromkeys(
        output_bytes(offset, at + number, at + number + 1).decode("ascii") for number in range(4 * count + 1)
    )
    return [(word, -_STEP * (number + 1)) for number, word in enumerate(list(words)[:count])]


def _entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}
