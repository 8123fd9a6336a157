"""Contexts of sessions in flight and kept, each session counted once, and what the fleet recomputes of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from math import exp2, log
from operator import itemgetter
from typing import NamedTuple

from policies.admission.base import SessionView
from policies.admission.homes import Contexts, Home, Homes, RemoteContexts
from policies.admission.residency import Residency
from policies.admission.return_gaps import ReturnGaps
from policies.costs.formulas import PrefillModel
from policies.replicas.shared_sessions import SharedSessions
from policies.types import RequestView

HALF_LIFE_S = 30.0
"""Half-life of the time lost by recomputation."""
TURNS_PER_INSTANCE = 25
"""Turns over which the share that another one follows is averaged, and returns over which gaps are, the latest counting
most. A fixed number would be seconds of a large fleet's traffic and minutes of a small one's.
"""
LONGEST_DIFFERENCE = 128
"""Blocks at the end of a prompt that a further turn may have changed and still be recognised."""
REMEMBERED_TURNS = 4
"""Last prompts of a session by which a longer one is recognised: sub-agents of one session take turns."""


_LOG_2 = log(2.0)
_LESS = (0, 1, 2, 4, 8, 16, 32, 64, LONGEST_DIFFERENCE)
"""Differences at a prompt's end that are tried, in blocks."""
_SAMPLES = tuple(itemgetter(*[-1 - less for less in _LESS[: number + 1]]) for number in range(len(_LESS)))
"""Readers of the hashes at the first 1, 2, ... of these differences: much faster than a loop."""

Beginnings = tuple[int, ...]
"""A prompt's blocks, and the hashes of those after which it is ``_LESS`` blocks shorter."""


class ComputedPrompt(NamedTuple):
    """A prompt as it was when its request was sent; tokens."""

    prompt_tokens: int
    before_tokens: int
    """Computed by the fleet for this session before."""
    cached_tokens: int
    """Predicted to be cached on the instance that computes it."""


class _Account:
    __slots__ = (
        "before_tokens",
        "context_tokens",
        "ends",
        "expired",
        "gap_s",
        "home",
        "in_flight",
        "request_id",
        "since_s",
        "single",
        "turns",
    )

    def __init__(self) -> None:
        self.home: Home
        """Contexts of the instance that its last request was sent to."""
        self.context_tokens = 0
        self.in_flight = 0
        self.single = False
        """A request without a session: forgotten when it ends."""
        self.turns = 0
        self.since_s = 0.0
        """When its last request ended."""
        self.request_id: str | None = None
        """Its last request."""
        self.gap_s: float | None = None
        """Seconds between its last request's end and one that was held or has yet to be sent."""
        self.expired = False
        """It was kept to the end and had not returned."""
        self.before_tokens = 0
        """Tokens of that one's prompt that had been computed before."""
        self.ends: tuple[Beginnings, ...] = ()
        """Of the last prompts. No lists: of numbers in tuples the garbage collector keeps no track."""


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
        """Instances of the fleet, set by its owner."""
        self._gaps = ReturnGaps(keep_s)
        self._capacity = capacity
        self._active: dict[str, _Account] = {}
        self._kept: OrderedDict[str, _Account] = OrderedDict()
        self._past: OrderedDict[str, _Account] = OrderedDict()
        self.active_tokens = 0
        self.kept_tokens = 0
        self._seen_s = 0.0
        self.return_share = 1.0
        """Share of turns that another of the same session follows while it is kept, lately. Begins at 1: what is not
        known yet may return.
        """
        self._lost_s = 0.0
        self._lost_at_s = 0.0
        self._reports_cached = False
        """An engine has reported cached tokens: where none does, 0 may mean that it cannot."""
        self.lost_tokens = 0
        """Tokens recomputed although the fleet had computed them for the same session before."""

    @property
    def active_sessions(self) -> int:
        """Sessions with a request in flight."""
        return len(self._active)

    @property
    def kept_sessions(self) -> int:
        """Sessions whose last request ended less than ``keeps_s`` ago, as of the last call with a time, less those
        found evicted.
        """
        return len(self._kept)

    @property
    def keeps_s(self) -> float:
        """Seconds for which a session is kept, as learned."""
        return self._gaps.keep_s

    def set_keep(self, keep_s: float, now_s: float) -> None:
        """Another ``keep_s``, from which learning begins again. O(sessions)."""
        if keep_s != self._gaps.longest_s:
            self._gaps = ReturnGaps(keep_s)
        past = list(self._past.values())
        idle = sorted([*self._past.items(), *self._kept.items()], key=lambda item: item[1].since_s)
        self._past.clear()
        self._kept = OrderedDict(idle)
        self.kept_tokens = sum(account.context_tokens for _, account in idle)
        for account in past:
            account.home.keep(account.context_tokens)
        self.expire(now_s)

    def expire(self, now_s: float) -> None:
        """Move sessions that were kept for long enough to those that are remembered."""
        kept, oldest_s = self._kept, now_s - self._gaps.keep_s
        while kept:
            name, account = next(iter(kept.items()))
            if account.since_s > oldest_s:
                return
            self._forget(name, account)
            if not account.expired:  # else it was counted before a longer time to keep brought it back
                account.expired = True
                self._not_followed()

    def _forget(self, name: str, account: _Account) -> None:
        """A kept session is only remembered from now on."""
        del self._kept[name]
        self.kept_tokens -= account.context_tokens
        account.home.drop(account.context_tokens)
        self._past[name] = account
        if len(self._past) > self._capacity:
            self._past.popitem(last=False)

    def set_remote(self, contexts: Collection[Mapping[str, Contexts]], lost_share: float, held: int) -> None:
        """Replace what other replicas report: each one's contexts by instance, the sums of the rest."""
        self.homes.set_elsewhere(contexts)
        self.remote = RemoteContexts(*self.homes.sums_elsewhere(), lost_share, held)

    def restarted(self, instance: str) -> None:
        """The instance has lost its contexts: keep its sessions no longer. O(kept sessions)."""
        home = self.homes.of(instance)
        for name in [name for name, account in self._kept.items() if account.home is home]:
            self._forget(name, self._kept[name])

    def ran_elsewhere(self, session_id: str) -> None:
        """A request of the session was sent by another replica, whose account has it from now on."""
        account = self._kept.get(session_id)
        if account is not None:
            self._forget(session_id, account)

    def view(self, session_id: str | None, now_s: float, waited_s: float = 0.0) -> SessionView:
        """A session without the request that is about to be sent."""
        if session_id is None:
            return SessionView(waited_s=waited_s)
        account = self._active.get(session_id)
        if account is not None:
            return SessionView(account.in_flight, account.context_tokens, 0.0, account.turns, waited_s)
        account = kept = self._kept.get(session_id)
        if kept is None and self.shared is not None:
            elsewhere = self.shared.elsewhere(session_id, now_s - self._gaps.keep_s)
            if elsewhere is not None:
                return SessionView(0, elsewhere.tokens, max(0.0, now_s - elsewhere.at_s), 1, waited_s, True)
        if account is None and (account := self._past.get(session_id)) is None:
            return SessionView(waited_s=waited_s)
        idle_s = max(0.0, now_s - account.since_s)
        return SessionView(0, account.context_tokens, idle_s, account.turns, waited_s, kept is not None)

    def view_of(self, request: RequestView, now_s: float, waited_s: float = 0.0) -> SessionView:
        """The session of a request that is about to be sent, without it.

        With its first question (``waited_s`` = 0) a session has returned, however long the request is held then, and a
        kept one is kept for as long. If its context turns out to be evicted it is kept no longer. A prompt that
        continues none of the session's, as a new sub-agent's, is no evidence of that.
        """
        session_id = request.session_id
        account = None if session_id is None else self._kept.get(session_id)
        if session_id is None or (account is None and waited_s):
            return self.view(session_id, now_s, waited_s)
        if account is None:
            if (past := self._past.get(session_id)) is not None:
                past.gap_s = now_s - past.since_s
        elif waited_s:
            account.since_s = now_s
            self._kept.move_to_end(session_id)
        else:
            account.gap_s = now_s - account.since_s
            end = _longest(account, request.block_hashes)
            if end is not None and self._residency is not None:
                before_tokens = int(end[0] * request.block_tokens)
                if self._residency.evicted(request, before_tokens, now_s):
                    self._forget(session_id, account)
        return self.view(session_id, now_s, waited_s)

    def begin(self, name: str, prompt_tokens: int, now_s: float, instance: str = "", *, single: bool = False) -> None:
        """A request of the session is sent to an instance; ``single``: it has no session, and ``name`` is its own."""
        self._seen_s = now_s
        home = self.homes.of(instance)
        account = self._active.get(name)
        if account is not None:
            account.in_flight += 1
            account.turns += 1
            account.home.deactivate(account.context_tokens)
            if prompt_tokens > account.context_tokens:
                self.active_tokens += prompt_tokens - account.context_tokens
                account.context_tokens = prompt_tokens
            home.activate(account.context_tokens)
            account.home = home
            return
        self.expire(now_s)
        account = self._kept.pop(name, None)
        if account is not None:
            self.kept_tokens -= account.context_tokens
            account.home.drop(account.context_tokens)
            self._returned(account, now_s)
        elif self._past and (account := self._past.pop(name, None)) is not None:
            self._returned(account, now_s)
        else:
            account = _Account()
        account.in_flight = 1
        account.single = single
        account.turns += 1
        account.context_tokens = prompt_tokens
        self._active[name] = account
        self.active_tokens += prompt_tokens
        account.home = home
        home.activate(prompt_tokens)

    def _returned(self, account: _Account, now_s: float) -> None:
        gap_s = now_s - account.since_s if account.gap_s is None else account.gap_s
        turns = TURNS_PER_INSTANCE * self.instances
        self._gaps.add(gap_s, turns)
        account.gap_s = None
        if account.expired:
            account.expired = False
        else:
            self.return_share += (1.0 - self.return_share) / turns

    def _not_followed(self) -> None:
        self.return_share -= self.return_share / (TURNS_PER_INSTANCE * self.instances)

    def end(self, name: str, now_s: float | None) -> None:
        """A request of the session has ended; None: at the time of the last ``begin``."""
        account = self._active.get(name)
        if account is None:
            return
        account.in_flight -= 1
        if account.in_flight:
            return
        del self._active[name]
        self.active_tokens -= account.context_tokens
        account.home.deactivate(account.context_tokens)
        if account.single:
            return
        account.since_s = now_s = self._seen_s if now_s is None else now_s
        self._kept[name] = account
        self.kept_tokens += account.context_tokens
        account.home.keep(account.context_tokens)
        self.expire(now_s)

    def compute(self, name: str, request_id: str, hashes: Sequence[int], block_tokens: float) -> int:
        """Remember a prompt that is being computed; call after ``begin``.

        Returns the tokens at its beginning that the fleet has computed for this session before. A further attempt of
        the same request gets the answer of its first: that one may not have computed anything.
        """
        account = self._active[name]
        if account.request_id == request_id:
            return account.before_tokens
        account.request_id, account.before_tokens = request_id, 0
        if not hashes:
            return 0
        ends, new = account.ends, _sampled(hashes)
        if not ends:
            account.ends = (new,)
            return 0
        longest = _longest(account, hashes)
        if longest is not None and len(ends) == 1:
            account.ends = (new,)
        else:
            repeated = None if longest is None else longest[1]
            account.ends = (*[end for end in ends if end is not repeated], new)[-REMEMBERED_TURNS:]
        if longest is not None:
            account.before_tokens = int(longest[0] * block_tokens)
        return account.before_tokens

    def sent(self, model: PrefillModel, work: ComputedPrompt, now_s: float) -> None:
        """Count what of a prompt the fleet had computed and lost, as predicted."""
        if work.before_tokens > work.cached_tokens:
            self._count(model, work, work.cached_tokens, 1, now_s)

    def reported(self, model: PrefillModel, work: ComputedPrompt, cached_tokens: int, now_s: float | None) -> None:
        """Correct the prediction by what the engine reported.

        What was cached at the decision may be evicted before its turn comes in the engine's queue. Until an engine has
        reported cached tokens, 0 may mean that it reports none, and corrects nothing.
        """
        if cached_tokens:
            self._reports_cached = True
        elif not self._reports_cached:
            cached_tokens = work.cached_tokens
        before = work.before_tokens
        if before > cached_tokens:
            self.lost_tokens += before - cached_tokens
        if cached_tokens == work.cached_tokens:
            return
        now_s = self._seen_s if now_s is None else now_s
        if before > work.cached_tokens:
            self._count(model, work, work.cached_tokens, -1, now_s)
        if before > cached_tokens:
            self._count(model, work, cached_tokens, 1, now_s)

    def lost_share(self, instances: int, now_s: float) -> float:
        """Share of the time of ``instances`` that recomputation took, weighted by 2 ** (-age / HALF_LIFE_S)."""
        if not self._lost_s or not instances:
            return 0.0
        return self._decayed(now_s) * _LOG_2 / (HALF_LIFE_S * instances)

    def _count(self, model: PrefillModel, work: ComputedPrompt, cached_tokens: int, sign: int, now_s: float) -> None:
        tokens, before, _ = work
        seconds = model.seconds(tokens - cached_tokens, cached_tokens) - model.seconds(tokens - before, before)
        if seconds > 0.0:
            self._lost_s = max(0.0, self._decayed(now_s) + sign * seconds)
            self._lost_at_s = max(now_s, self._lost_at_s)

    def _decayed(self, now_s: float) -> float:
        return self._lost_s * exp2(min(self._lost_at_s - now_s, 0.0) / HALF_LIFE_S) if self._lost_s else 0.0


def _sampled(hashes: Sequence[int]) -> Beginnings:
    """Samples of a prompt's chained hashes, for comparison with later prompts.

    A further turn repeats nearly all of the last prompt, but not always its end: chat templates close it otherwise
    (thoughts are removed, say), and tokens of a last partial block shift. Beginnings that are 1, 2, 4, ... blocks
    shorter find the common part to a factor of two of what differs.
    """
    count = len(hashes)
    shorter = min((count - 1).bit_length(), len(_SAMPLES) - 1)  # powers of two below the count
    return (count, *_SAMPLES[shorter](hashes)) if shorter else (count, hashes[-1])


def _longest(account: _Account, hashes: Sequence[int]) -> tuple[int, Beginnings] | None:
    """The longest part in blocks of one of the session's last prompts that this one repeats, and that prompt."""
    ends, count, longest, found = account.ends, len(hashes), 0, None
    if len(ends) == 1 and ends[0][0] <= count and hashes[ends[0][0] - 1] == ends[0][1]:
        return ends[0][0], ends[0]  # what nearly all turns do: they only add
    for beginnings in ends:
        whole = beginnings[0]
        for place, less in enumerate(_LESS, 1):
            blocks = whole - less
            if blocks <= longest:
                break
            if blocks <= count and hashes[blocks - 1] == beginnings[place]:
                longest, found = blocks, beginnings
                break
    return None if found is None else (longest, found)
