"""Predicted cached prefix of a request per instance: from the exact index where trusted, else from the shadow index.

Both indexes are queried wherever both can answer, so that their errors can be measured separately.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from policies.predict.exact_index import ExactIndex
from policies.predict.prefix_index import PrefixIndex
from policies.predict.promises import Promises
from policies.types import RequestView


class Match(NamedTuple):
    """Matched prefix of one request on every instance, in blocks."""

    shadow: Mapping[str, int]
    """Prediction of the shadow index, for all instances."""
    exact: Mapping[str, int]
    """Prediction of the exact index; only for trusted instances, and empty for requests whose blocks KV events do not
    cover. It takes precedence over the shadow index. Partial instances are left out where the shadow index has more.
    """


class Promised:
    """Prompts that one decision is expected to cache, per instance, until computed or dropped."""

    __slots__ = ("_exact", "_last_block", "_numbers", "_promises")

    def __init__(self, promises: Promises, exact: ExactIndex) -> None:
        self._promises = promises
        self._exact = exact
        self._numbers: dict[str, int] = {}
        self._last_block: int | None = None

    def add(self, instance: str, request: RequestView) -> None:
        """The request's prompt will be in the instance's cache."""
        if request.plain and self._exact.follows(instance):
            number = self._numbers[instance] = self._promises.add(instance, request.block_hashes)
            self._last_block = request.block_hashes[-1] if request.block_hashes else None
            if self._last_block is not None:
                self._exact.await_block(instance, self._last_block, number)

    def broken(self, instance: str) -> None:
        """The instance will not compute the prompt. Later calls do nothing."""
        number = self._numbers.pop(instance, None)
        if number is not None:
            self._promises.drop(number)

    def kept(self, instance: str | None = None) -> None:
        """The instance (None: all of them) has computed the prompt. Later calls do nothing."""
        for name in [instance] if instance is not None else list(self._numbers):
            number = self._numbers.pop(name, None)
            if number is None:
                continue
            awaited = self._last_block is not None and self._exact.follows(name) and self._exact.trusted(name)
            if awaited and not self._exact.was_reported(name, self._last_block or 0, number):
                self._promises.release(number)
            else:
                self._promises.drop(number)


class Predictor:
    """Combined prediction of shadow index, exact index and the prompts in flight."""

    def __init__(self, shadow: PrefixIndex, seed: int = 0) -> None:
        """``seed`` is that of the requests' block hashes."""
        self.shadow = shadow
        self.exact = ExactIndex(seed=seed)
        self.promises = Promises(on_drop=self.exact.forget_promise)

    def match(self, request: RequestView, now_s: float) -> Match:
        """Matched prefix of every instance: one descent per index, plus the prompts in flight on trusted instances."""
        hashes = request.block_hashes
        shadow = self.shadow.match(hashes)
        trusted = self.exact.trusted_instances() if request.plain else ()
        if not trusted:
            return Match(shadow, {})
        held = self.exact.match(hashes)
        bounds = self.exact.partial_instances
        exact = {}
        for instance in trusted:
            reported = partial(self.exact.was_reported, instance)
            blocks = self.promises.match(instance, hashes, held[instance], now_s, reported)
            if blocks >= shadow[instance] or instance not in bounds:
                exact[instance] = blocks
        return Match(shadow, exact)

    def match_one(self, instance: str, request: RequestView) -> int:
        """Matched prefix of one registered instance, in blocks, without the prompts in flight.

        From the exact index where it knows everything that the instance holds, else from the shadow index.
        """
        exact = self.exact
        if request.plain and exact.trusted(instance) and instance not in exact.partial_instances:
            return exact.match(request.block_hashes)[instance]
        return self.shadow.match_one(instance, request.block_hashes)

    def promised(self) -> Promised:
        """New record of the prompts that one decision promises."""
        return Promised(self.promises, self.exact)

    def add_instance(self, instance: str) -> None:
        """Register an instance. Idempotent."""
        self.exact.add_instance(instance)

    def remove_instance(self, instance: str) -> None:
        """Forget an instance."""
        self.exact.remove_instance(instance)
        self.promises.forget_instance(instance)

    def restarted(self, instance: str) -> None:
        """The instance restarted: its cache is empty."""
        self.exact.restarted(instance)
        self.promises.forget_instance(instance)


def cacheable_tokens(request: RequestView, matched_blocks: int) -> int:
    """Tokens of ``matched_blocks`` blocks that an engine would reuse.

    vLLM always computes the last prompt token itself, so at most the full blocks of ``prompt - 1`` tokens count.
    """
    if not matched_blocks:
        return 0
    if request.exact:
        usable = int((request.prompt_tokens - 1) // request.block_tokens)
        return int(min(matched_blocks, usable) * request.block_tokens)
    return max(0, min(int(matched_blocks * request.block_tokens), request.prompt_tokens - 1))
