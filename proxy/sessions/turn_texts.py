"""Conversations as their clients wrote them, for comparison with the session's turn before.

A chat's messages have blocks of their own, so their hashes serve here too. Those of messages and responses are hashed
over the prompt that the engine is expected to make of them, without Claude Code's line and with the tools among the
text, so their conversations are hashed again, after the answer: 1.5 us per KB of messages, 0.3 us per KB of responses.
"""

from __future__ import annotations

from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from policies.predict.blocks import hash_byte_blocks, root_hash
from proxy.request.conversation import plain_text_blocks, without_cache_marks
from proxy.request.generation_body import MessagesBody, ResponsesBody
from proxy.request.parse import Endpoint, Parsed
from proxy.request.steps import at_once
from proxy.sessions.kept_turn import MAX_BLOCKS, TurnText


def turn_text(parsed: Parsed, block_bytes: int) -> TurnText | None:
    """The conversation of a request; None for completions, media, and texts of less than a block."""
    fields = parsed.fields
    if parsed.prompt.media:
        return None
    if isinstance(fields, MessagesBody):
        return _messages_turn(fields, block_bytes)
    if isinstance(fields, ResponsesBody):
        return _responses_turn(parsed, fields, block_bytes)
    return chat_turn(parsed, block_bytes)


def chat_turn(parsed: Parsed, block_bytes: int) -> TurnText | None:
    """The conversation of a chat request; None for other requests, and where blocks are not those of its bytes."""
    prompt, fields = parsed.prompt, parsed.fields
    if parsed.endpoint is not Endpoint.CHAT or prompt.media or prompt.tokens:
        return None
    hashes = prompt.hashes[prompt.lead_blocks :] if prompt.lead_blocks else prompt.hashes
    if not hashes:
        return None
    text = memoryview(fields.messages)[:-1]  # as it was hashed
    scope = (fields.model, fields.cache_salt or "")
    return TurnText(scope, text, hashes, block_bytes, memoryview(fields.tools))


def _messages_turn(fields: MessagesBody, block_bytes: int) -> TurnText | None:
    most = MAX_BLOCKS * block_bytes
    system, messages = memoryview(fields.system), memoryview(fields.messages)[:-1]
    lead, said = _plain(bytes(system[:most])), _plain(bytes(messages[:most]))
    scope = (fields.model, fields.cache_salt or "", "messages")
    hashes = hash_byte_blocks((lead + said)[:most], block_bytes, _root(fields))
    if not hashes:
        return None
    not_read = max(0, len(system) - most) + max(0, len(messages) - most)
    tools = memoryview(fields.tools)
    return TurnText(scope, memoryview(lead + said), hashes, block_bytes, tools, len(lead), not_read)


def _responses_turn(parsed: Parsed, fields: ResponsesBody, block_bytes: int) -> TurnText | None:
    """Instructions and input; of a request that continues a stored response the instructions only."""
    most = MAX_BLOCKS * block_bytes
    lead, given = memoryview(fields.instructions), memoryview(fields.input)[:-1]
    continues = bool(fields.previous_response_id)
    if continues and not parsed.prompt.continued:
        return None
    # A string and a list of items are two forms of one prompt, which have no bytes to compare.
    form = "continued" if continues else f"responses {chr(given[0])}"
    text = memoryview(lead if continues else b"".join((lead, given[:most])))
    root = _root(fields)
    hashes = hash_byte_blocks(text[:most], block_bytes, root)
    if not hashes and not continues:
        return None
    return TurnText(
        (fields.model, fields.cache_salt or "", form),
        text,
        hashes,
        block_bytes,
        memoryview(fields.tools),
        len(lead),
        len(lead) + len(given) - len(text),
        xxh3_64_intdigest(lead, root),
        parsed.prompt.hashes,
        continues,
    )


def _root(fields: MessagesBody | ResponsesBody) -> int:
    return root_hash("turn", fields.model, fields.cache_salt or "", xxh3_128_hexdigest(fields.tools))


def _plain(text: bytes) -> bytes:
    """JSON without the forms that change from turn to turn although the prompt does not."""
    return plain_text_blocks(at_once(without_cache_marks(text)))
