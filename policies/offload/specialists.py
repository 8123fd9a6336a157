"""Prefill specialists: how many instances take the long cold prefills, and which ones.

The number follows the share of that work, from none up. A specialist decodes as well; it only costs more to be chosen
(`policies.routing.joint`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import exp2, inf, log
from typing import NamedTuple

from policies.offload.recent_contexts import RecentContexts
from policies.types import ContextsView, InstanceView, RequestView, Role

HALF_LIFE_S = 60.0
"""Half-life of the share of long prefills."""
SHARE = 0.75
"""Specialists per instance's worth of long prefills: not all of them gain by a hand-off."""
PER_INSTANCES = 4
"""At most one specialist for so many instances: one whose queue is long is refused, and one of eight is not enough
where long prefills take two instances' time.
"""
LEAST_INSTANCES = 4
"""Smaller fleets have none."""
MARGIN = 0.25
"""The number shrinks only when the wanted one is this far below the edge of rounding."""
ROOM = 0.8
"""Share of the pools of the other instances that the working set may fill: they do not fill evenly."""
FULLEST = 0.65
"""Share of all pools that the working set may fill when a specialist is added: its estimate is low while caches fill,
and in a large fleet nearly all pools are the others' (docs/decisions/0020-joint-placement.md).
"""
MOST_LOST = 0.05
"""Share of the fleet's time that recomputing evicted contexts may take."""
KEEPS = 1.25
"""Both bounds are this many times higher for specialists that there are already."""
MOST_BUSY = 0.95
"""Largest share of a specialist's time that long prefills count for: predicted work may exceed the time."""
ABSENT_S = 10.0
"""An instance is no part of the fleet any more after HEAVY requests could not use it for so long, nor any other one."""
SETTLED_S = 60.0
"""No specialist is added before both bounds held for this long, after the first decision too. The working set falls for
seconds where contexts are evicted, since those found evicted are not kept any longer.
"""


class FleetLoad(NamedTuple):
    """State of the fleet that the number of specialists depends on."""

    share: float
    """Time of long prefills as a share of time; 2: as much as two instances can compute."""
    instances: int
    working_set_tokens: int
    """Contexts in flight, and those of the last minutes that may return (`policies.offload.recent_contexts`)."""
    pool_tokens: int
    """KV pools of ``instances`` together; 0: unknown, and then there are no specialists."""
    lost_share: float
    """Share of the fleet's time that recomputing evicted contexts takes."""

    @classmethod
    def of(cls, pools: Collection[int], share: float, working_set_tokens: int, lost_share: float) -> FleetLoad:
        """Load of the instances with these KV pools together."""
        return cls(share, len(pools), working_set_tokens, sum(pools) if all(pools) else 0, lost_share)


def wanted(current: int, load: FleetLoad, *, settled: bool = True) -> int:
    """Number of specialists, at most one more or one less than ``current`` unless a bound permits fewer.

    ``settled``: there may be one more.

    ``round(SHARE * share)``, damped by ``MARGIN``; at most ``most`` of the fleet. The work that the others take over
    must fit: none while the working set exceeds ``ROOM`` of their pools, or while contexts are evicted and recomputed;
    and one more only while it is within ``FULLEST`` of all pools.
    """
    number = current
    if settled and SHARE * load.share > current + 0.5 and load.working_set_tokens <= FULLEST * load.pool_tokens:
        number += 1
    elif SHARE * load.share < current - 0.5 - MARGIN:
        number -= 1
    number = min(number, most(load.instances))
    while number and not bearable(number, load, KEEPS if number <= current else 1.0):
        number -= 1
    return number


def most(instances: int) -> int:
    """Largest number of specialists among so many instances."""
    return max(1, instances // PER_INSTANCES) if instances >= LEAST_INSTANCES else 0


def bearable(number: int, load: FleetLoad, factor: float = 1.0) -> bool:
    """True if the working set and the share of recomputation are within ``factor`` times their bounds."""
    others_tokens = load.pool_tokens * (load.instances - number) / load.instances
    return load.working_set_tokens <= factor * ROOM * others_tokens and load.lost_share <= factor * MOST_LOST


def may_specialise(view: InstanceView) -> bool:
    """True if the instance can prefill and decode: it does not take one part of requests only."""
    return view.role is Role.KV_BOTH or view.role is Role.NONE


def designated(current: Sequence[str], number: int, views: Sequence[InstanceView]) -> tuple[str, ...]:
    """Names of ``number`` specialists, or of fewer where no other instance may be one; the oldest ones stay.

    New ones are those that can send KV, then those with the fewest decoding streams, then the fewest sessions, then the
    first of ``views``. O(n) for each new one.
    """
    names = list(current[:number])
    if len(names) == number:
        return tuple(names)  # nearly always: this runs for every request
    rest = [view for view in views if may_specialise(view) and view.instance not in names]
    while len(names) < number and rest:
        idlest = min(rest, key=lambda view: (view.role is Role.NONE, view.requests - view.prefilling, view.sessions))
        rest.remove(idlest)
        names.append(idlest.instance)
    return tuple(names)


class _Decaying(NamedTuple):
    """A sum whose parts halve every ``HALF_LIFE_S``."""

    value: float
    at_s: float

    def at(self, now_s: float) -> float:
        """The sum at a time; one before the last part counts as that of the last."""
        return self.value * exp2(min(0.0, self.at_s - now_s) / HALF_LIFE_S)

    def plus(self, part: float, now_s: float) -> _Decaying:
        """With one more part."""
        return _Decaying(self.at(now_s) + part, max(self.at_s, now_s))


_NOTHING = _Decaying(0.0, 0.0)


class Specialists:
    """Owner of the designation and of the shares of long prefills. Single writer; the time is an argument."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        """Designated instances, oldest first."""
        self.contexts = RecentContexts()
        self._work_s = _NOTHING
        self._work_on_s: dict[str, _Decaying] = {}
        """By instance."""
        self._began_s: float | None = None
        self._unsettled_s = 0.0
        """Time when a bound did not hold last, or of the first decision."""
        self._pools: dict[str, int] = {}
        """KV pools of the fleet, by instance."""
        self._missed_s: dict[str, float] = {}
        """Time of the first HEAVY request that could not use an instance of the fleet, if none could use it since."""
        self._long_s: dict[str, float] = {}
        """Time of the last HEAVY request that could use an instance."""

    def began(self, now_s: float) -> None:
        """Note the time of the first decision, from which shares are counted. Later calls do nothing."""
        if self._began_s is None:
            self._began_s = self._unsettled_s = now_s

    def sent(self, request: RequestView, instance: str, now_s: float, memory: int, *, heavy: bool) -> bool:
        """Count the context of a request that was sent to an instance; True if its prefill is to be counted too.

        `RecentContexts.sent`, with the request as its own session if it has none.
        """
        self.began(now_s)
        session, tokens = request.context_id or request.request_id, request.prompt_tokens
        return self.contexts.sent(session, instance, tokens, now_s, memory, request.request_id, heavy=heavy)

    def contexts_without(self, session: str) -> ContextsView:
        """Recent contexts without that of ``session``; empty while there is no specialist."""
        contexts = self.contexts
        return ContextsView(contexts.by_instance(session), contexts.return_share) if self.names else ContextsView()

    def prefilled(self, instance: str, seconds: float, now_s: float) -> None:
        """Count a long prefill that was sent to an instance, ``seconds`` long as predicted."""
        self.began(now_s)
        self._work_s = self._work_s.plus(seconds, now_s)
        self._work_on_s[instance] = self._work_on_s.get(instance, _NOTHING).plus(seconds, now_s)

    def share(self, now_s: float) -> float:
        """Seconds of long prefills per second, weighted by 2 ** (-age / HALF_LIFE_S); 0 at the first one."""
        return self._work_s.at(now_s) * self._weight(now_s)

    def stretches(self, now_s: float) -> dict[str, float]:
        """``1 / (1 - u)`` of each specialist, the oldest first, ``u`` being that share of the work sent to it, at most
        ``MOST_BUSY``: a stream there stalls for ``u`` of its time. O(specialists).
        """
        weight, work = self._weight(now_s) if self.names else 0.0, self._work_on_s
        return {name: 1 / (1 - min(MOST_BUSY, work.get(name, _NOTHING).at(now_s) * weight)) for name in self.names}

    def pools(self, views: Sequence[InstanceView], now_s: float, *, heavy: bool) -> Collection[int]:
        """KV pools of the fleet, which has the candidates of this request and of recent ones. O(n).

        One request may be bound to few: a retry, a stored response, another model. Requests that are not HEAVY remove
        none, since those that are may come seldom.
        """
        own = {view.instance: view.kv_capacity_tokens for view in views}
        if self._pools.keys() <= own.keys():  # nearly always: this runs for every request
            self._pools, self._missed_s = own, {}
            return own.values()
        missing, missed_s = self._pools.keys() - own.keys(), self._missed_s
        if heavy:
            missed_s = {name: missed_s.get(name, now_s) for name in missing}
            missing = {name for name in missing if now_s - missed_s[name] <= ABSENT_S}
        self._missed_s = {name: missed_s[name] for name in missing if name in missed_s}
        self._pools = {**{name: pool for name, pool in self._pools.items() if name in missing}, **own}
        return self._pools.values()

    def update(self, views: Sequence[InstanceView], load: FleetLoad, now_s: float, *, heavy: bool) -> None:
        """Change the designation by the candidates of a decision and the load of the fleet. O(n).

        New ones are candidates of this request, if these permit one more, that HEAVY requests of the last
        ``HALF_LIFE_S`` could use too: others may serve a model that has no long prompts. ``load`` is that of ``pools``
        with the same candidates.
        """
        if heavy:
            self._long_s |= dict.fromkeys([view.instance for view in views], now_s)
        former = set(self.names)
        unfit = [view.instance for view in views if view.instance in former and not may_specialise(view)]
        names = [name for name in self.names if name not in unfit]
        here = [name for name in names if name in self._pools]
        current = len(names)
        if not bearable(current + 1, load):
            self._unsettled_s = now_s
        number = wanted(current, load, settled=now_s - self._unsettled_s >= SETTLED_S)
        chosen = tuple(here[:number])
        if number > len(here):
            more = max(0, most(len(views)) - sum([view.instance in here for view in views]))
            long = [view for view in views if now_s - self._long_s.get(view.instance, -inf) <= HALF_LIFE_S]
            chosen = designated(here, min(number, len(here) + more), long)
        absent = [name for name in names if name not in self._pools]
        self.names = (*chosen, *absent[: number - len(chosen)])

    def forget(self, instance: str) -> None:
        """The instance left the fleet."""
        self.restarted(instance)
        self._pools.pop(instance, None)
        self._missed_s.pop(instance, None)
        self._long_s.pop(instance, None)
        self.names = tuple([name for name in self.names if name != instance])

    def restarted(self, instance: str) -> None:
        """The instance has lost its contexts, and what it was computing."""
        self.contexts.lost(instance)
        self._work_on_s.pop(instance, None)

    def _weight(self, now_s: float) -> float:
        """Factor that makes a share of time of a decaying sum of seconds; 0 at the first decision."""
        if self._began_s is None or now_s <= self._began_s:
            return 0.0
        return log(2.0) / HALF_LIFE_S / (1 - exp2((self._began_s - now_s) / HALF_LIFE_S))
