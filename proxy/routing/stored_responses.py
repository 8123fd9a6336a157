"""Responses that engines have stored: what continues, reads or cancels one must go to the engine that has it."""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Sequence, Set
from typing import NamedTuple, Protocol

import msgspec
from xxhash import xxh3_64_digest

from policies.predict.blocks import hash_byte_blocks
from proxy.clip import clip
from proxy.errors import RequestError
from proxy.fleet.instances import Instance, Instances
from proxy.request.generation_body import ResponsesBody
from proxy.request.parse import Parsed, Prompt
from proxy.request.token_chunks import MAX_BLOCKS
from proxy.settings import ResponseSettings

_ID = re.compile(r"[A-Za-z0-9_.:-]{1,256}")
"""Ids that can stand in a path; an engine's are random, unless it lets clients choose them."""
_MAX_BLOCKS = 1024
"""Block hashes kept of one prompt, 8 bytes each: those of 1 MiB of text with the default block size."""
_SHOWN_CHARACTERS = 100
_SHOWN_MODELS = 5


class _Stored(NamedTuple):
    instance: str
    url: str
    started_unix_s: float | None
    """Start of the engine's process, since a restarted one has lost its responses; None: unknown."""
    hashes: bytes
    """Hashes of its prompt's blocks, packed."""
    text_bytes: int
    chain: str
    """Id of the first response of its conversation; empty: unknown, as another replica's."""
    until_s: float


class _Elsewhere(Protocol):
    """A response that another replica has learned."""

    @property
    def response_id(self) -> str: ...
    @property
    def instance(self) -> str: ...
    @property
    def url(self) -> str: ...
    @property
    def started_unix_s(self) -> float | None: ...
    @property
    def hashes(self) -> bytes: ...
    @property
    def text_bytes(self) -> int: ...
    @property
    def chain(self) -> str: ...


class StoredResponses:
    """Response id to instance, for at most ``capacity`` responses (8 KiB each in the worst case), the oldest dropped.

    An id is learned when an engine's answer begins. Times are monotonic.
    """

    def __init__(self, settings: ResponseSettings, instances: Instances, text_block_bytes: int) -> None:
        self._block_bytes = text_block_bytes
        self._capacity, self._ttl_s = settings.capacity, settings.ttl_s
        self._instances = instances
        self._stored: OrderedDict[str, _Stored] = OrderedDict()
        self._learned: OrderedDict[str, None] | None = None
        """Ids that were not sent to other replicas; None: there are no others."""

    def __len__(self) -> int:
        """Number of known responses, expired ones included until the next is learned."""
        return len(self._stored)

    def learn(
        self, response_id: str, instance: Instance, prompt: Prompt, now_s: float, chain: str | None = None
    ) -> None:
        """Record that an engine has begun a response; ids that cannot be asked for are ignored.

        ``chain``: id of the first response of the conversation; None: this one.
        """
        if not _ID.fullmatch(response_id):
            return
        hashes = array("Q", prompt.hashes[:_MAX_BLOCKS]).tobytes()
        until_s = now_s + self._ttl_s
        started_unix_s, text_bytes = instance.started_unix_s, prompt.text_bytes
        chain = chain or response_id
        stored = _Stored(instance.name, instance.url, started_unix_s, hashes, text_bytes, chain, until_s)
        self._keep(response_id, stored, now_s)
        if self._learned is not None:
            self._learned[response_id] = None
            if len(self._learned) > self._capacity:
                self._learned.popitem(last=False)

    def share(self) -> None:
        """Keep the ids that are learned from now on for ``take_learned``."""
        self._learned = OrderedDict()

    def take_learned(self, limit: int) -> list[tuple[str, str, str, float | None, bytes, int, str]]:
        """The oldest responses learned here and not taken: the fields of `SharedResponse`."""
        taken: list[tuple[str, str, str, float | None, bytes, int, str]] = []
        while self._learned and len(taken) < limit:
            response_id, _ = self._learned.popitem(last=False)
            stored = self._stored.get(response_id)
            if stored is not None:
                taken.append((response_id, *stored[:6]))
        return taken

    def learn_elsewhere(self, response: _Elsewhere, now_s: float) -> None:
        """Take a response that another replica has learned; an id that is known here stays as it is."""
        if response.response_id in self._stored or not _ID.fullmatch(response.response_id):
            return
        hashes = response.hashes[: _MAX_BLOCKS * array("Q").itemsize]
        until_s = now_s + self._ttl_s
        stored = _Stored(
            response.instance,
            response.url,
            response.started_unix_s,
            hashes,
            response.text_bytes,
            response.chain if _ID.fullmatch(response.chain) else "",
            until_s,
        )
        self._keep(response.response_id, stored, now_s)

    def _keep(self, response_id: str, stored: _Stored, now_s: float) -> None:
        self._stored.pop(response_id, None)
        self._stored[response_id] = stored
        while len(self._stored) > self._capacity or self._first().until_s <= now_s:
            self._stored.popitem(last=False)

    def instance_of(self, response_id: str, param: str, now_s: float) -> Instance:
        """The engine that has a response; ``param`` is the request's field with the id.

        Raises:
            RequestError: 404, the id is unknown or its engine is gone; 503, the engine cannot be sent requests now.
        """
        return self._find(response_id, param, now_s)[1]

    def continued(self, parsed: Parsed, now_s: float) -> Parsed:
        """A request that continues a stored response, bound to its engine; any other as it is.

        Raises:
            RequestError: as ``instance_of``; 400, the engine does not serve the request's model.
        """
        fields = parsed.fields
        if not isinstance(fields, ResponsesBody) or not fields.previous_response_id:
            return parsed
        stored, instance = self._find(fields.previous_response_id, "previous_response_id", now_s)
        if instance.models is not None and instance.models.names and fields.model not in instance.models.names:
            raise _other_model(fields, instance.name, instance.models.names)
        before = array("Q", stored.hashes).tolist()
        prompt = self._continued_prompt(parsed.prompt, fields, before, stored.text_bytes)
        chain = stored.chain or fields.previous_response_id
        return msgspec.structs.replace(parsed, prompt=prompt, only=instance.name, chain=chain)

    def _continued_prompt(
        self, prompt: Prompt, fields: ResponsesBody, before: Sequence[int], before_bytes: int
    ) -> Prompt:
        """A prompt of text after a stored one of ``before_bytes`` bytes, whose blocks are ``before``."""
        text_bytes, hashes = before_bytes + prompt.text_bytes, prompt.hashes
        if before:
            # The stored text is not kept, so the block that ends in this text is hashed from the blocks before and the
            # whole of this text, and so are those after it: inputs shorter than a block add up to blocks as well.
            added = text_bytes // self._block_bytes - before_bytes // self._block_bytes
            digest = xxh3_64_digest(memoryview(fields.input)[:-1], before[-1])
            hashes = [*before, *hash_byte_blocks(digest * min(added, MAX_BLOCKS), len(digest), before[-1])]
        return msgspec.structs.replace(prompt, hashes=hashes, text_bytes=text_bytes, continued=True)

    def _first(self) -> _Stored:
        return next(iter(self._stored.values()))

    def _find(self, response_id: str, param: str, now_s: float) -> tuple[_Stored, Instance]:
        stored = self._stored.get(response_id)
        shown = clip(response_id, _SHOWN_CHARACTERS)
        if stored is None or stored.until_s <= now_s:
            raise _missing(
                f"no response with id {shown!r} is known here: it was not created through this proxy, or too long ago",
                "response_not_found",
                param,
            )
        instance = self._instances.get(stored.instance)
        if instance is None or not _is_same(instance, stored):
            raise _missing(
                f"the response {shown!r} is lost: the engine that stored it ({stored.instance}) was restarted or has "
                "left the fleet; send the whole conversation as input",
                "response_lost",
                param,
            )
        if not instance.healthy or instance.draining:
            raise RequestError(
                503,
                f"the engine that stored the response {shown!r} ({stored.instance}) is down or draining",
                kind="service_unavailable",
                code="response_unavailable",
                param=param,
                retry_after_s=1,
            )
        return stored, instance


def _is_same(instance: Instance, stored: _Stored) -> bool:
    """True unless another engine, or a restarted one, has taken the place of the one that stored the response."""
    if instance.url != stored.url:
        return False
    return stored.started_unix_s is None or instance.started_unix_s in {None, stored.started_unix_s}


def _other_model(fields: ResponsesBody, instance: str, served: Set[str]) -> RequestError:
    shown = ", ".join([clip(name, _SHOWN_CHARACTERS) for name in sorted(served)[:_SHOWN_MODELS]])
    return RequestError(
        400,
        f"the response {clip(fields.previous_response_id or '', _SHOWN_CHARACTERS)!r} is stored by an engine "
        f"({instance}) that does not serve the model {clip(fields.model, _SHOWN_CHARACTERS)!r}: continue it with a "
        f"model of that engine ({shown}{', …' if len(served) > _SHOWN_MODELS else ''}), or send the whole conversation "
        "as input",
        code="response_of_other_model",
        param="model",
    )


def _missing(message: str, code: str, param: str) -> RequestError:
    return RequestError(404, message, code=code, param=param)
