"""Contexts of sessions in flight and kept, each session counted once, and what the fleet recomputes of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Set
from math import inf

from policies.admission.base import SessionView
from policies.admission.homes import Contexts, Home, Homes, RemoteContexts
from policies.admission.losses import Losses
from policies.admission.prompt_ends import continued
from policies.admission.residency import Residency
from policies.admission.return_gaps import ReturnGaps
from policies.admission.turns import SessionAccount, Turn, TurnEnd
from policies.costs.formulas import PrefillModel
from policies.replicas.shared_sessions import SharedSessions
from policies.types import RequestView

TURNS_PER_INSTANCE = 25
"""Turns over which the share that another one follows is averaged, and returns over which gaps are, the latest counting
most. A fixed number would be seconds of a large fleet's traffic and minutes of a small one's."""
DEFERRED = 32
"""Beginnings and ends of turns that are counted together, in 0.1 ms: after an answer if there is one in time, and when
there are twice as many before a request is sent."""


class SessionAccounts:
    """Owner of the sessions' contexts and of the fleet's loss. Single writer, O(1) per call, amortised.

    A session is active while a request of it is in flight, then kept until nearly all that return have done so
    (`policies.admission.return_gaps`), ``keep_s`` seconds at most, or until a request of it finds its context evicted,
    then remembered: of those, at most ``capacity``.
    """

    def __init__(self, keep_s: float = 30.0, capacity: int = 100_000, residency: Residency | None = None) -> None:
        """``residency``: recognises evicted contexts; None: none is."""
        self._residency = residency
        self.homes = Homes()
        self.remote = RemoteContexts()
        """Sums of other replicas (``set_remote``)."""
        self.shared: SharedSessions | None = None
        """Sessions that other replicas serve too; None: there are none."""
        self.instances = 1
        self._gaps = ReturnGaps(keep_s)
        self._capacity = capacity
        self._active: dict[str, SessionAccount] = {}
        self._kept: OrderedDict[str, SessionAccount] = OrderedDict()
        self._past: OrderedDict[str, SessionAccount] = OrderedDict()
        self._oldest_s = inf
        """Time since which the first of the kept ones has been kept at the longest: before, nothing expires."""
        self._active_tokens = 0
        self._kept_tokens = 0
        self._seen_s = 0.0
        self._losses = Losses()
        self.prefill: PrefillModel | None = None
        """Prices what would be computed again, as of the latest request; None before the first."""
        self._deferred = False
        self._waiting: list[Turn | TurnEnd] = []

    @property
    def active_sessions(self) -> int:
        """Sessions with a request in flight."""
        return self.contexts()[0]

    @property
    def active_tokens(self) -> int:
        """Their contexts."""
        return self.contexts()[1]

    @property
    def kept_sessions(self) -> int:
        """Sessions whose last request ended less than ``keeps_s`` ago, as of the last call with a time, less those
        found evicted.
        """
        return self.contexts()[2]

    @property
    def kept_tokens(self) -> int:
        """Their contexts."""
        return self.contexts()[3]

    def contexts(self) -> Contexts:
        """The four numbers above."""
        if self._waiting:
            self.settle()
        return len(self._active), self._active_tokens, len(self._kept), self._kept_tokens

    @property
    def gaps(self) -> ReturnGaps:
        """Returns of sessions, as learned."""
        if self._waiting:
            self.settle()
        return self._gaps

    @property
    def losses(self) -> Losses:
        """Recomputation of contexts that were evicted."""
        if self._waiting:
            self.settle()
        return self._losses

    def in_use(self, now_s: float) -> tuple[int, int, float]:
        """Tokens in flight, tokens in use by other replicas, and the time lost, as a share of one instance's."""
        remote, losses = self.remote, self.losses
        lost = losses.share(1, now_s) + remote.lost_share(1)
        return self._active_tokens, remote.active_tokens + remote.kept_tokens, lost

    def defer(self, deferred: bool) -> None:
        """``deferred``: nothing reads the accounts for every request, so turns are counted in batches."""
        self.settle()
        self._deferred = deferred

    def settle(self) -> None:
        """Count the turns that wait. Everything that reads or changes the accounts does this first."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if isinstance(each, Turn):
                self._count(each)
            else:
                self._count_end(*each)

    def add_instance(self, instance: str) -> None:
        """Idempotent."""
        self.settle()
        self.homes.add(instance)
        self._losses.add_instance(instance)
        self.instances = max(1, len(self.homes.by_name))

    def remove_instance(self, instance: str) -> None:
        """Its sessions are on none of the fleet's until their next request."""
        self.settle()
        self.homes.remove(instance)
        self._losses.remove_instance(instance)
        self.instances = max(1, len(self.homes.by_name))

    def sent(
        self,
        request: RequestView,
        instance: str,
        cached_tokens: int,
        model: PrefillModel,
        now_s: float,
        elsewhere_tokens: int = 0,
    ) -> Turn:
        """A request is sent, which ends with ``ended``.

        Args:
            instance: where its answer is computed, and its context is then.
            cached_tokens: predicted to be cached where its prompt is computed.
            model: prices what is recomputed.
            elsewhere_tokens: the most predicted to be cached on another instance, which has not evicted them.
        """
        turn = Turn()
        turn.request, turn.instance, turn.cached_tokens = request, instance, cached_tokens
        turn.elsewhere_tokens, turn.model, turn.sent_s = elsewhere_tokens, model, now_s
        self.prefill = model
        if not self._deferred:
            self._count(turn)
            return turn
        waiting = self._waiting
        waiting.append(turn)
        if len(waiting) >= 2 * DEFERRED:
            self.settle()
        return turn

    def ended(self, turn: Turn, now_s: float | None, cached_tokens: int | None, model: PrefillModel) -> None:
        """A request has ended.

        Args:
            now_s: the time; None: that of the latest request.
            cached_tokens: as its engine reported; None: it did not.
        """
        if not self._deferred:
            self._count_end(turn, now_s, cached_tokens, model)
            return
        self._waiting.append((turn, now_s, cached_tokens, model))
        if len(self._waiting) >= DEFERRED:
            self.settle()

    def set_keep(self, keep_s: float, now_s: float) -> None:
        """Another ``keep_s``, from which learning begins again. O(sessions)."""
        self.settle()
        if keep_s != self._gaps.longest_s:
            self._gaps = ReturnGaps(keep_s, self._gaps.return_share)
        past = list(self._past.values())
        idle = sorted([*self._past.items(), *self._kept.items()], key=lambda item: item[1].since_s)
        self._past.clear()
        self._kept = OrderedDict(idle)
        self._kept_tokens = sum(account.context_tokens for _, account in idle)
        for account in past:
            account.home.keep(account.context_tokens)
        self.expire(now_s)

    def expire(self, now_s: float) -> None:
        """Move sessions that were kept for long enough to those that are remembered."""
        if self._waiting:
            self.settle()
        self._expire(now_s)

    def _expire(self, now_s: float) -> None:
        kept, oldest_s = self._kept, now_s - self._gaps.keep_s
        while kept:
            name, account = next(iter(kept.items()))
            if account.since_s > oldest_s:
                self._oldest_s = account.since_s
                return
            self._forget(name, account)
            if not account.expired:  # else it was counted before a longer time to keep brought it back
                account.expired = True
                self._gaps.not_followed(TURNS_PER_INSTANCE * self.instances)
        self._oldest_s = inf

    def _forget(self, name: str, account: SessionAccount) -> None:
        """A kept session is only remembered from now on."""
        del self._kept[name]
        self._kept_tokens -= account.context_tokens
        account.home.drop(account.context_tokens)
        self._past[name] = account
        if len(self._past) > self._capacity:
            self._past.popitem(last=False)

    def set_remote(
        self, contexts: Collection[Mapping[str, Contexts]], lost_shares: Mapping[str, float], held: int
    ) -> None:
        """Replace what other replicas report: each one's contexts by instance, the sums of the rest."""
        self.homes.set_elsewhere(contexts)
        self.remote = RemoteContexts(*self.homes.sums_elsewhere(), lost_shares, held)

    def restarted(self, instance: str) -> None:
        """The instance has lost its contexts: keep its sessions no longer. O(kept sessions)."""
        self.settle()
        home = self.homes.by_name.get(instance)
        for name in [name for name, account in self._kept.items() if account.home is home]:
            self._forget(name, self._kept[name])

    def ran_elsewhere(self, context_id: str) -> None:
        """A request of the session was sent by another replica, whose account has it from now on."""
        self.settle()
        account = self._kept.get(context_id)
        if account is not None:
            self._forget(context_id, account)

    def in_flight_of(self, names: Set[str]) -> Set[str]:
        """Those of the sessions that are in flight, with a rule that holds."""
        return names & self._active.keys()

    def kept_of(self, names: Set[str]) -> Set[str]:
        """Those of the sessions that are kept, as of the last call with a time, with a rule that holds."""
        return names & self._kept.keys()

    def kept_at(self, context_id: str | None) -> tuple[Home | None, int]:
        """The place of a kept session's context, and its tokens; None: the session is not kept."""
        account = self._kept.get(context_id) if context_id is not None else None
        return (None, 0) if account is None else (account.home, account.context_tokens)

    def still_held(self, context_id: str, now_s: float) -> None:
        """A request of the session has been held until now: a kept one is kept for as long, as by ``view_of``."""
        account = self._kept.get(context_id)
        if account is not None:
            account.since_s = now_s
            self._kept.move_to_end(context_id)

    def view(self, context_id: str | None, now_s: float, waited_s: float = 0.0) -> SessionView:
        """A session without the request that is about to be sent."""
        if self._waiting:
            self.settle()
        if context_id is None:
            return SessionView(waited_s=waited_s)
        account = self._active.get(context_id)
        if account is not None:
            return SessionView(account.in_flight, account.context_tokens, 0.0, account.turns, waited_s)
        account = kept = self._kept.get(context_id)
        if kept is None and self.shared is not None:
            elsewhere = self.shared.elsewhere(context_id, now_s - self._gaps.keep_s)
            if elsewhere is not None:
                return SessionView(0, elsewhere.tokens, max(0.0, now_s - elsewhere.at_s), 1, waited_s, True)
        if account is None and (account := self._past.get(context_id)) is None:
            return SessionView(waited_s=waited_s)
        idle_s = max(0.0, now_s - account.since_s)
        return SessionView(0, account.context_tokens, idle_s, account.turns, waited_s, kept is not None)

    def view_of(self, request: RequestView, now_s: float, waited_s: float = 0.0) -> SessionView:
        """The session of a request that is about to be sent, without it.

        With its first question (``waited_s`` = 0) a session has returned, however long the request is held then, and a
        kept one is kept for as long. If its context turns out to be evicted it is kept no longer. A prompt that
        continues none of the session's, as a new sub-agent's, is no evidence of that.
        """
        if self._waiting:
            self.settle()
        name = request.context_id
        account = None if name is None else self._kept.get(name)
        if name is None or (account is None and waited_s):
            return self.view(name, now_s, waited_s)
        if account is None:
            if (past := self._past.get(name)) is not None:
                past.gap_s = now_s - past.since_s
        elif waited_s:
            self.still_held(name, now_s)
        else:
            account.gap_s = now_s - account.since_s
            end = continued(account.ends, request.block_hashes)
            if end is not None and self._residency is not None:
                before_tokens = int(end[0] * request.block_tokens)
                if self._residency.evicted(request, before_tokens, now_s):
                    self._forget(name, account)
        return self.view(name, now_s, waited_s)

    # The two below run for every request, with a rule or without: long bodies with few calls.

    def _count(self, turn: Turn) -> None:
        request, now_s, tokens = turn.request, turn.sent_s, turn.request.prompt_tokens
        self._seen_s = now_s
        name = request.context_id or request.request_id
        homes = self.homes
        home = homes.by_name.get(turn.instance, homes.elsewhere)
        account = self._active.get(name)
        if account is not None:
            account.in_flight += 1
            context_tokens, before = account.context_tokens, account.home
            before.active_sessions -= 1
            before.active_tokens -= context_tokens
            if context_tokens < tokens:
                self._active_tokens += tokens - context_tokens
                context_tokens = account.context_tokens = tokens
        else:
            if self._oldest_s <= now_s - self._gaps.keep_s:
                self._expire(now_s)
            account = self._kept.pop(name, None)
            if account is not None:
                context_tokens, before = account.context_tokens, account.home
                self._kept_tokens -= context_tokens
                before.kept_sessions -= 1
                before.kept_tokens -= context_tokens
                self._returned(account, now_s)
            elif self._past and (account := self._past.pop(name, None)) is not None:
                self._returned(account, now_s)
            else:
                account = SessionAccount()
            account.in_flight = 1
            self._active[name] = account
            self._active_tokens += tokens
            context_tokens = account.context_tokens = tokens
        account.turns += 1
        account.home = home
        home.active_sessions += 1
        home.active_tokens += context_tokens
        turn.account = account
        turn.before_tokens = before_tokens = account.computed_before(request) if request.session_id else 0
        if before_tokens > turn.cached_tokens:
            held_tokens = max(turn.cached_tokens, turn.elsewhere_tokens)
            self._losses.sent(turn.instance, turn.model, tokens, before_tokens, held_tokens, now_s)

    def _count_end(self, turn: Turn, now_s: float | None, cached_tokens: int | None, model: PrefillModel) -> None:
        account, request = turn.account, turn.request
        if now_s is None:
            now_s = self._seen_s
        if cached_tokens is not None:
            before_tokens, predicted = turn.before_tokens, turn.cached_tokens
            losses = self._losses
            if before_tokens > cached_tokens or cached_tokens != predicted or not losses.reports_cached:
                others = turn.elsewhere_tokens
                prompt = request.prompt_tokens
                losses.reported(turn.instance, model, prompt, before_tokens, predicted, cached_tokens, now_s, others)
        account.in_flight -= 1
        if account.in_flight:
            return
        name = request.context_id or request.request_id
        del self._active[name]
        tokens, home = account.context_tokens, account.home
        self._active_tokens -= tokens
        home.active_sessions -= 1
        home.active_tokens -= tokens
        if not request.session_id:  # nobody returns to it
            return
        account.since_s = now_s
        self._kept[name] = account
        self._kept_tokens += tokens
        home.kept_sessions += 1
        home.kept_tokens += tokens
        self._oldest_s = min(self._oldest_s, now_s)
        if self._oldest_s <= now_s - self._gaps.keep_s:
            self._expire(now_s)

    def _returned(self, account: SessionAccount, now_s: float) -> None:
        gap_s = now_s - account.since_s if account.gap_s is None else account.gap_s
        turns = TURNS_PER_INSTANCE * self.instances
        self._gaps.add(gap_s, turns)
        account.gap_s = None
        if account.expired:
            account.expired = False
        else:
            self._gaps.followed(turns)
