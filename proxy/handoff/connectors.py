"""Hand-off parameters of vLLM's KV connectors: the ``kv_transfer_params`` of both legs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from policies.types import Connector


class HandOffDialect(Protocol):
    """Hand-off parameters of one connector."""

    needs_bootstrap: bool
    """True if P has a bootstrap server that reports its engine id."""

    def prefill_params(self, transfer_id: str) -> dict[str, Any]:
        """Parameters of the P leg."""
        ...

    def decode_params(
        self, transfer_id: str, answered: dict[str, Any] | None, engine_id: str | None, bootstrap_url: str | None
    ) -> dict[str, Any]:
        """Parameters of the D leg, given P's ``kv_transfer_params``.

        Raises:
            ValueError: P's answer lacks parameters that this connector needs.
        """
        ...


class MooncakeDialect:
    """MooncakeConnector: the router names the transfer; P returns nothing, D needs P's engine id and bootstrap URL."""

    needs_bootstrap = True

    def prefill_params(self, transfer_id: str) -> dict[str, Any]:
        return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}

    def decode_params(
        self, transfer_id: str, answered: dict[str, Any] | None, engine_id: str | None, bootstrap_url: str | None
    ) -> dict[str, Any]:
        """Without engine id or bootstrap address a D leg hangs or crashes D, so it is never built."""
        if not engine_id or not bootstrap_url:
            raise ValueError("P's engine id or bootstrap address is unknown")
        return {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": transfer_id,
            "remote_engine_id": engine_id,
            "remote_bootstrap_addr": bootstrap_url,
        }


class NixlDialect:
    """NixlConnector: P returns its address and block ids, which are passed to D unchanged."""

    needs_bootstrap = False

    def prefill_params(self, transfer_id: str) -> dict[str, Any]:
        return {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }

    def decode_params(
        self, transfer_id: str, answered: dict[str, Any] | None, engine_id: str | None, bootstrap_url: str | None
    ) -> dict[str, Any]:
        if not answered or not answered.get("remote_block_ids"):
            raise ValueError("P answered no kv_transfer_params with remote_block_ids")
        return answered


DIALECTS: Mapping[Connector, HandOffDialect] = MappingProxyType(
    {Connector.MOONCAKE: MooncakeDialect(), Connector.NIXL: NixlDialect()}
)
"""Connector of an instance -> its hand-off parameters. A new connector is one more class."""


def engine_ids_of(answer: bytes) -> dict[int, str]:
    """P's engine ids by data-parallel rank, from its bootstrap server's answer to ``/query``.

    Raises:
        ValueError: an unexpected answer.
    """
    try:
        entries = msgspec.json.decode(answer, type=dict[int, dict[str, msgspec.Raw]])
        return {rank: msgspec.json.decode(entry["engine_id"], type=str) for rank, entry in entries.items()}
    except (msgspec.DecodeError, KeyError) as error:
        raise ValueError(repr(error)) from error
