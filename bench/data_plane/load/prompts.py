"""Distinct request bodies, equal for equal seeds; made when they are sent, since thousands would fill memory."""

from __future__ import annotations

import random
from functools import cache

from bench.data_plane.stub.answers import MODEL

CORPUS_BYTES = 2_000_000
ID_BYTES = 6
"""A token id has five digits and a comma."""
SESSION_TURNS = 12
FIRST_TURN_BYTES = 20_000
TURN_BYTES = 20_000
ANSWER_BYTES = 2_000
"""Bytes of a turn's growth that are the assistant's answer; the rest is a tool's."""

_END = b',"max_tokens":%d,"temperature":0,"stream":true%b}'
_ASK_USAGE = b',"stream_options":{"include_usage":true}'


@cache
def _corpus(seed: int) -> bytes:
    """Text that looks like code and logs to a JSON parser: escaped newlines and quotes, words of changing length."""
    rng = random.Random(f"corpus {seed}")
    words = ["".join(rng.choices("etaoinshrdlucmfwypvbgkjqxz_.()", k=rng.randint(2, 11))) for _ in range(4000)]
    parts: list[str] = []
    size = 0
    while size < CORPUS_BYTES:
        line = " ".join(rng.choices(words, k=rng.randint(4, 14)))
        if rng.random() < 0.2:
            line += ' \\"' + rng.choice(words) + '\\"'
        parts.append(line)
        size += len(line) + 3
    return " \\n".join(parts).encode()[:CORPUS_BYTES]


@cache
def _ids(seed: int) -> bytes:
    rng = random.Random(f"ids {seed}")
    return ",".join(str(rng.randint(10_000, 99_999)) for _ in range(CORPUS_BYTES // ID_BYTES)).encode() + b","


def text(seed: int, number: int, size: int) -> bytes:
    """About ``size`` bytes of JSON-escaped text that shares no prefix with that of another number."""
    rng = random.Random(f"{seed} {number}")
    corpus = _corpus(seed)
    start = corpus.index(b" ", rng.randrange(CORPUS_BYTES - size - 200))
    end = corpus.rindex(b" ", start, start + size + 1) if size > 100 else start
    return b"%016x %b" % (rng.getrandbits(64), corpus[start + 1 : end])


def _body(fields: bytes, events: int, ask_usage: bool) -> bytes:
    return b'{"model":"%b",%b%b' % (MODEL.encode(), fields, _END % (events, _ASK_USAGE if ask_usage else b""))


def text_body(seed: int, number: int, size: int, events: int, ask_usage: bool = False, tag: str = "") -> bytes:
    """A streamed ``/v1/completions`` request whose prompt is text of ``size`` bytes."""
    mark = b"[[%b]] " % tag.encode() if tag else b""
    return _body(b'"prompt":"%b%b"' % (mark, text(seed, number, size)), events, ask_usage)


def ids_body(seed: int, number: int, size: int, events: int, ask_usage: bool = False) -> bytes:
    """A streamed ``/v1/completions`` request whose prompt is ``size`` bytes of token ids."""
    rng = random.Random(f"ids {seed} {number}")
    ids = _ids(seed)
    count = size // ID_BYTES
    start = rng.randrange(len(ids) // ID_BYTES - count) * ID_BYTES
    first = b"".join(b"%d," % rng.randint(10_000, 99_999) for _ in range(4))
    return _body(b'"prompt":[%b%b]' % (first, ids[start : start + count * ID_BYTES - 1]), events, ask_usage)


def session_body(seed: int, session: int, turn: int, events: int, ask_usage: bool = False) -> bytes:
    """Turn ``turn`` (from 0) of an agent's session, a chat completion: turn k + 1 begins with all of turn k."""
    messages = [b'{"role":"system","content":"%b"}' % text(seed, session * 1000, FIRST_TURN_BYTES)]
    for k in range(1, turn + 1):
        answer = text(seed, session * 1000 + 2 * k, ANSWER_BYTES)
        result = text(seed, session * 1000 + 2 * k + 1, TURN_BYTES - ANSWER_BYTES)
        messages.append(b'{"role":"assistant","content":"%b"}' % answer)
        messages.append(b'{"role":"user","content":"%b"}' % result)
    return _body(b'"messages":[%b]' % b",".join(messages), events, ask_usage)
