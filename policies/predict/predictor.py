"""Which prefix of a request each instance will find in its cache: by the exact index where known, else the shadow.

Both are asked wherever both can answer, so that their errors can be told apart.
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
    """As the shadow index has it, for all instances."""
    exact: Mapping[str, int]
    """As the exact index has it; only for instances whose events are trusted, and empty where the request's blocks are
    not those events tell of. Where it answers, it is the prediction."""


class Promised:
    """What one decision promised, per instance, until it is kept or broken."""

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
        """The instance will not compute it. Later calls do nothing."""
        number = self._numbers.pop(instance, None)
        if number is not None:
            self._promises.drop(number)

    def kept(self, instance: str | None = None) -> None:
        """The instance (None: all of them) has computed it. Later calls do nothing."""
        for name in [instance] if instance is not None else list(self._numbers):
            number = self._numbers.pop(name, None)
            if number is None:
                continue
            awaited = self._last_block is not None and self._exact.follows(name) and self._exact.trusted(name)
            if awaited and not self._exact.told_of(name, self._last_block or 0, number):
                self._promises.release(number)
            else:
                self._promises.drop(number)


class Predictor:
    """Shadow index, exact index and the prompts in flight, as one answer."""

    def __init__(self, shadow: PrefixIndex) -> None:
        self.shadow = shadow
        self.exact = ExactIndex()
        self.promises = Promises(on_drop=self.exact.forget_promise)

    def match(self, request: RequestView, now_s: float) -> Match:
        """Matched prefix of every instance. One descent per index, plus the prompts in flight on trusted instances."""
        hashes = request.block_hashes
        shadow = self.shadow.match(hashes)
        trusted = self.exact.trusted_instances() if request.plain else ()
        if not trusted:
            return Match(shadow, {})
        held = self.exact.match(hashes)
        exact = {}
        for instance in trusted:
            reported = partial(self.exact.told_of, instance)
            exact[instance] = self.promises.match(instance, hashes, held[instance], now_s, reported)
        return Match(shadow, exact)

    def promised(self) -> Promised:
        """A fresh record of what one decision promises."""
        return Promised(self.promises, self.exact)

    def add_instance(self, instance: str) -> None:
        """Make an instance known. Idempotent."""
        self.exact.add_instance(instance)

    def remove_instance(self, instance: str) -> None:
        """Forget an instance."""
        self.exact.remove_instance(instance)
        self.promises.forget_instance(instance)

    def restarted(self, instance: str) -> None:
        """The instance's cache is empty again."""
        self.exact.restarted(instance)
        self.promises.forget_instance(instance)
