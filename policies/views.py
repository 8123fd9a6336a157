"""Views of the instances for one request, made of index, ledger, sessions and holds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from policies.holds import Holds
from policies.ledger import Ledger
from policies.predict.predictor import Match, cacheable_tokens
from policies.types import Connector, IndexSource, InstanceView, RequestView, Role, Transport


@dataclass(slots=True)
class KnownInstance:
    """Properties of a registered instance, and the last report of its KV pool."""

    role: Role
    host: str = ""
    transport: Transport | None = None
    connector: Connector = Connector.MOONCAKE
    kv_capacity_tokens: int = 0
    kv_used_tokens: int = 0
    promised_at_report_tokens: int = 0
    restarts: int = 0
    ordered: bool = False
    """Its engine computes waiting prompts by ``priority`` (`policies.costs.order`)."""


class Viewer:
    """Makes the views of one request; ``views`` may be called for several groups of instances."""

    __slots__ = ("_class_blocks", "_holds", "_ledger", "_matched", "_now_s", "_request", "_sessions", "_tokens")

    def __init__(
        self,
        request: RequestView,
        matched: Match,
        class_blocks: int,
        ledger: Ledger,
        sessions: Mapping[str, int],
        holds: Holds,
        now_s: float,
    ) -> None:
        """``class_blocks``: number of blocks of the request's prefix class; ``sessions``: pinned ones by instance."""
        self._request = request
        self._matched = matched
        self._class_blocks = class_blocks
        self._ledger = ledger
        self._sessions = sessions
        self._holds = holds
        self._now_s = now_s
        self._tokens: dict[int, int] = {}
        """Cacheable tokens by matched blocks, which are mostly equal across instances."""

    def views(self, instances: Mapping[str, KnownInstance], wanted: Collection[str]) -> list[InstanceView]:
        """Views of the ``wanted`` instances, in the order they were added.

        A single loop with few calls, because it runs for every instance of every request.
        """
        shadow, exact = self._matched
        request, now_s, tokens, class_blocks = self._request, self._now_s, self._tokens, self._class_blocks
        ledger = self._ledger
        account_of, recent_of, unused = ledger.accounts.get, ledger.recent_tokens, ledger.unused
        remote = ledger.remote
        sessions = self._sessions
        holds = self._holds if self._holds else None
        new, shadow_source, exact_source = tuple.__new__, IndexSource.SHADOW, IndexSource.EXACT
        views = []
        for name, known in instances.items():
            if name not in wanted:
                continue
            blocks, source, exact_tokens = shadow[name], shadow_source, None
            cached = shadow_tokens = tokens.get(blocks)
            if shadow_tokens is None:
                cached = shadow_tokens = tokens[blocks] = cacheable_tokens(request, blocks)
            if exact and name in exact:
                blocks, source = exact[name], exact_source
                cached = exact_tokens = cacheable_tokens(request, blocks)
            account = ledger.joint(name, now_s) if remote else account_of(name, unused)
            # Tokens promised before the report are in its figure unless the engine had not allocated them yet; if the
            # figure is smaller, some of those requests have ended since.
            reported, used = known.promised_at_report_tokens, known.kv_used_tokens
            promised = account.promised_tokens - (reported if reported < used else used)
            held = 0 if holds is None else holds.tokens(name, now_s)
            # Positional: naming 20 fields takes as long as the rest of the loop.
            views.append(
                new(
                    InstanceView,
                    (
                        name,
                        cached,
                        account.requests,
                        account.pending_prefill_tokens,
                        account.decoding_tokens,
                        recent_of(account, now_s) if account.recent_tokens else 0.0,
                        sessions.get(name, 0),
                        known.kv_capacity_tokens,
                        used,
                        promised + held,
                        known.role,
                        blocks >= class_blocks > 0,
                        account.prefilling,
                        known.host,
                        known.transport,
                        known.connector,
                        source,
                        shadow_tokens,
                        exact_tokens,
                        account.ordered() if account.queue else (),
                    ),
                )
            )
        return views
