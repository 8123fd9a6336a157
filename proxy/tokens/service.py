"""Tokenization of requests off the event loop, disabled for endpoints whose engine counts differently."""

from __future__ import annotations

import asyncio
import logging
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import msgspec

from proxy.request.parse import Endpoint, Parsed
from proxy.settings import TokenizerSettings
from proxy.tokens.encoder import Encoder, TokenizerError

if TYPE_CHECKING:
    from proxy.tokens.template import ChatTemplate

log = logging.getLogger("warmroute.tokens")

_MAX_BYTES = 4 * 1024 * 1024
_MAX_BRACKETS = 50_000
"""Objects and lists of one body, at most: each takes up to 0.8 us to decode, garbage collection included."""

_decode = msgspec.json.Decoder(dict).decode


@dataclass(slots=True)
class EndpointTokens:
    """Tokenization counts of one endpoint."""

    trusted: bool = True
    tokenized: int = 0
    not_renderable: int = 0
    checked: int = 0
    mismatches: int = 0
    mismatches_in_a_row: int = 0


def _slow_to_decode(body: bytes) -> bool:
    """True if decoding would hold the interpreter's lock, and with it the event loop, for over 50 ms."""
    size = len(body)
    return size > _MAX_BYTES or (size > _MAX_BRACKETS and body.count(b"{") + body.count(b"[") > _MAX_BRACKETS)


class Tokens:
    """The tokenizer, its threads and its counts. ``close`` stops the threads."""

    def __init__(self, settings: TokenizerSettings) -> None:
        """Raises TokenizerError if the files cannot be used."""
        self._settings = settings
        self._encoder: Encoder | None = None
        self._template: ChatTemplate | None = None
        self._threads: ThreadPoolExecutor | None = None
        self.endpoints = {endpoint: EndpointTokens() for endpoint in (Endpoint.COMPLETIONS, Endpoint.CHAT)}
        if settings.path is not None:
            try:
                from proxy.tokens.template import ChatTemplate

                self._encoder = Encoder.load(settings.path, settings.cache_bytes)
            except ModuleNotFoundError as error:
                raise TokenizerError(
                    f"tokenizer.path is set, but {error.name} is not installed: pip install 'warmroute[tokenizer]'"
                ) from error
            self._template = ChatTemplate.load(settings.path, settings.chat_template)
            self._threads = ThreadPoolExecutor(settings.threads, thread_name_prefix="tokenize")

    @property
    def enabled(self) -> bool:
        """True if there is a tokenizer."""
        return self._encoder is not None

    async def tokens_of(self, parsed: Parsed) -> array[int] | None:
        """Token ids of a text or chat prompt as the engine will produce them; None if unknown."""
        prompt = parsed.prompt
        if self._encoder is None or self._threads is None or prompt.tokens or prompt.prompts > 1:
            return None
        if parsed.endpoint not in self.endpoints:
            return None
        seen = self.endpoints[parsed.endpoint]
        if not seen.trusted or (parsed.endpoint is Endpoint.CHAT and self._template is None):
            return None
        if prompt.media or _slow_to_decode(parsed.body):
            seen.not_renderable += 1
            return None
        try:
            ids = await asyncio.get_running_loop().run_in_executor(self._threads, self._tokenize, parsed)
        except Exception:
            # The request can be served without token ids, so a template or tokenizer must not fail it.
            log.exception("a prompt could not be tokenized")
            ids = None
        if ids is None:
            seen.not_renderable += 1
            return None
        seen.tokenized += 1
        return ids

    def check(self, parsed: Parsed, prompt_tokens: int) -> None:
        """Compare our count with the engine's; too many consecutive mismatches disable the endpoint's tokenization."""
        if not (parsed.prompt.tokens and parsed.prompt.text_bytes):
            return
        seen = self.endpoints[parsed.endpoint]
        seen.checked += 1
        if prompt_tokens == parsed.prompt.tokens:
            seen.mismatches_in_a_row = 0
            return
        seen.mismatches += 1
        seen.mismatches_in_a_row += 1
        if seen.trusted and seen.mismatches_in_a_row >= self._settings.mismatches:
            seen.trusted = False
            log.warning(
                "%s: the engine counts %d prompt tokens, the tokenizer at %s %d: it is not the model's, or the chat "
                "template differs; such prompts are routed by their bytes from now on",
                parsed.endpoint.value,
                prompt_tokens,
                self._settings.path,
                parsed.prompt.tokens,
            )

    def as_dict(self) -> dict[str, object]:
        """JSON-ready counts."""
        encoder = self._encoder
        return {
            "endpoints": {endpoint.value: asdict(seen) for endpoint, seen in self.endpoints.items()},
            "cache": {"bytes": encoder.cached_bytes, "hits": encoder.hits, "misses": encoder.misses}
            if encoder
            else None,
        }

    def close(self) -> None:
        """Stop the threads after they have finished their current work."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)

    def _tokenize(self, parsed: Parsed) -> array[int] | None:
        assert self._encoder is not None
        body = _decode(parsed.body)
        if body.get("truncate_prompt_tokens") is not None or body.get("prompt_embeds") is not None:
            return None
        if parsed.endpoint is Endpoint.COMPLETIONS:
            prompt = body["prompt"]
            text = prompt[0] if isinstance(prompt, list) else prompt
            special = bool(body.get("add_special_tokens", True))
        else:
            from proxy.tokens.template import NotRenderableError

            assert self._template is not None
            try:
                text = self._template.render(body)
            except NotRenderableError as error:
                log.debug("not tokenized: %s", error)
                return None
            special = bool(body.get("add_special_tokens", False))
        ids = self._encoder.encode(text, add_special_tokens=special)
        return ids if len(ids) else None
