"""Parsing of a request body at once, for tests."""

from __future__ import annotations

from collections.abc import Callable

from proxy.request.parse import Endpoint, Parsed, ParseRules, parse_steps
from proxy.request.steps import at_once
from proxy.request.token_chunks import TokenChunks


def parse_request(
    endpoint: Endpoint,
    body: bytes,
    block_tokens: int,
    text_block_bytes: int,
    is_base_model: Callable[[str], bool] = lambda _: False,
    chunks: TokenChunks | None = None,
    seed: int = 0,
) -> Parsed:
    """Parse one request body; arguments and errors as of `proxy.request.parse.parse_steps`."""
    rules = ParseRules(block_tokens, text_block_bytes, seed=seed)
    return at_once(parse_steps(endpoint, body, rules, is_base_model, TokenChunks(1) if chunks is None else chunks))
