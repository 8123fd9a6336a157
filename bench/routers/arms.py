"""Arms of the comparison: which router, with which policy and options."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum

import msgspec

CORE_ARMS = ("warm", "joint", "session_sticky", "vllm:cache_aware", "sglang:cache_aware")
"""The routers of the claim; without text prompts the last one is left out."""
ALL_ARMS = (
    *("warm", "joint", "session_sticky", "lmetric", "round_robin"),
    *("vllm:cache_aware", "vllm:round_robin", "sglang:cache_aware"),
)
_UNFIT = re.compile(r"[^A-Za-z0-9_-]+")


class RouterProduct(StrEnum):
    """A router that can be started here."""

    WARMROUTE = "warmroute"
    VLLM = "vllm"
    """vLLM Router."""
    SGLANG = "sglang"
    """SGLang's gateway."""


POLICIES_OF_PEERS = {
    RouterProduct.VLLM: ("cache_aware", "round_robin", "kv_aware", "consistent_hash"),
    RouterProduct.SGLANG: ("cache_aware", "round_robin"),
}


class RouterArm(msgspec.Struct, frozen=True):
    """A router with a policy: ``[PRODUCT:]POLICY[,KEY=VALUE...][@ENGINES]``, the product warmroute unless named."""

    product: RouterProduct
    policy: str
    options: tuple[str, ...] = ()
    """``KEY=VALUE``: parameters of warmroute's policy, or command-line options of a peer without their dashes."""
    engines: str = ""
    """Name of the set of engines that it runs on; empty: those of all arms that name none."""

    @classmethod
    def parse(cls, text: str) -> RouterArm:
        """Read an arm. Raises ValueError: unknown product, unknown policy of a peer, an option without value."""
        router, at, engines = text.partition("@")
        if at and not engines:
            raise ValueError(f"arm {text}: no name of engines after the @")
        head, *options = router.split(",")
        product, separator, policy = head.rpartition(":")
        try:
            chosen = RouterProduct(product) if separator else RouterProduct.WARMROUTE
        except ValueError:
            raise ValueError(f"arm {text}: no router {product}; known: {', '.join(RouterProduct)}") from None
        known = POLICIES_OF_PEERS.get(chosen)
        if known is not None and policy not in known:
            raise ValueError(f"arm {text}: {chosen} has no policy {policy} here; known: {', '.join(known)}")
        if wrong := [each for each in options if not all(each.partition("="))]:
            raise ValueError(f"arm {text}: {wrong[0]} is not KEY=VALUE")
        return cls(chosen, policy, tuple(options), engines)

    @property
    def label(self) -> str:
        """The arm as it was given."""
        product = "" if self.product is RouterProduct.WARMROUTE else f"{self.product}:"
        return product + self.settings + (f"@{self.engines}" if self.engines else "")

    @property
    def settings(self) -> str:
        """Policy and options as they were given."""
        return ",".join([self.policy, *self.options])

    @property
    def slug(self) -> str:
        """The label with letters, digits, ``-`` and ``_`` only, for names of files."""
        return _UNFIT.sub("-", self.label)

    @property
    def text_only(self) -> bool:
        """True if the router rejects prompts of token ids."""
        return self.product is RouterProduct.SGLANG


def chosen_arms(texts: Sequence[str], prompt_mode: str) -> list[RouterArm]:
    """The arms of a comparison in the order given; none given: the core, as far as the prompts allow.

    Raises:
        ValueError: an arm is wrong, given twice, or cannot take these prompts.
    """
    if not texts:
        core = [RouterArm.parse(text) for text in CORE_ARMS]
        return [arm for arm in core if prompt_mode == "text" or not arm.text_only]
    arms = [RouterArm.parse(text) for text in texts]
    slugs = [arm.slug for arm in arms]
    if twice := [arm.label for arm in arms if slugs.count(arm.slug) > 1]:
        raise ValueError(f"arm {twice[0]} is given twice")
    if refused := [arm.label for arm in arms if arm.text_only and prompt_mode != "text"]:
        raise ValueError(f"arm {refused[0]} takes text prompts only: give --prompt-mode text for the whole comparison")
    return arms
