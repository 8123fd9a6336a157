"""Named conditions of the proxy with their remedies, listed by ``GET /ready?verbose``.

The answer is open to everyone, so it has names and counts, but no error texts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from policies.offload.never import Never
from policies.types import PolicyPart
from proxy.core import Core
from proxy.discovery.status import Reading
from proxy.meters.checks import MEANINGS, REMEDIES
from proxy.routing.policy_watch import RECENT_S
from proxy.settings import roles_permit_hand_offs

_SHOWN = 5
"""Instances that the detail of a condition names."""


class Condition(NamedTuple):
    """One condition."""

    name: str
    ok: bool
    detail: str
    remedy: str | None = None
    """Action that makes it ok; None if it is."""
    since_unix_s: float | None = None
    """Time since which it has this state, as observed."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return self._asdict()


def conditions(core: Core) -> list[Condition]:
    """Every condition; those that hold are listed too."""
    now = [
        _instances(core),
        _discovery(core),
        _accepting(core),
        *_policies(core),
        _plug_ins(core),
        _records(core),
        *_shared_state(core),
        *_meters(core),
    ]
    return [each._replace(since_unix_s=_since(core.meters.since, each)) for each in now]


def _instances(core: Core) -> Condition:
    healthy, known = len(core.instances.healthy()), len(list(core.instances))
    if not known:
        add = "add one to the settings, or with POST /instances"
        return Condition("instances", False, "the fleet has no instance", add)
    detail = f"{healthy} of {known} instances can be sent requests"
    remedy = None if healthy == known else "GET /instances has the last error of each instance"
    drained = [each.name for each in core.instances if each.draining and not each.leaving]
    leaving = sum(each.leaving for each in core.instances)
    if drained:
        detail += f", {len(drained)} draining"
    if leaving:
        detail += f", {leaving} being removed"
    if healthy + len(drained) + leaving == known != healthy:
        remedy = "wait for the end of the removal: GET /instances has it under departing"
        if drained:
            remedy = f"POST /instances/{drained[0]}/undrain ends it"
    return Condition("instances", healthy == known, detail, remedy)


def _discovery(core: Core) -> Condition:
    status = core.discovery
    if status.source == "static":
        return Condition("discovery", True, "the instances are those of the settings and of POST /instances")
    found = f"{status.instances} instances of the source {status.source}"
    if status.last is Reading.FAILED or status.last is None:
        failures = status.failures_in_a_row
        failed = f"the last {'reading' if failures == 1 else f'{failures} readings'} failed; "
        if not failures:
            failed = "not read yet; "
        return Condition("discovery", False, f"{failed}{found} are kept", "GET /stats has the error, under discovery")
    if status.last is Reading.EMPTY:
        detail = f"the source has no instance; {found} are kept"
        remedy = "check the name or selector of the source; discovery.accept_empty: true if it is right"
    elif status.problems:
        detail = found
    else:
        return Condition("discovery", True, found)
    if status.problems:
        detail = f"{detail}, {len(status.problems)} left out"
        remedy = "GET /stats has the reasons, under discovery"
    return Condition("discovery", False, detail, remedy)


def _accepting(core: Core) -> Condition:
    if core.draining:
        return Condition("accepting", False, "the proxy is shutting down", "send requests to another proxy")
    return Condition("accepting", True, "new requests are accepted")


def _policies(core: Core) -> Iterator[Condition]:
    """Conditions ``policy``, ``planner``, ``admission`` and ``decision_time``, of the parts that decide now."""
    router, now_s = core.router, time.monotonic()
    minutes = f"{RECENT_S / 60:g} minutes"
    rule = router.routing.gate.rule.name
    for part, name, instead, switch in (
        (PolicyPart.POLICY, router.policy.name, "a built-in policy decides where it fails", "/policy"),
        (PolicyPart.PLANNER, router.planner.name, "nothing is offloaded where it fails", "/policy"),
        (PolicyPart.ADMISSION, rule, "requests are sent at once where it fails", "/admission"),
    ):
        failed = router.watch.failures.get((part, name))
        if failed is None or not failed.recent(now_s):
            without = part is PolicyPart.PLANNER and _plans_in_vain(core)
            yield _no_hand_offs(name) if without else Condition(part.value, True, f"{name} decides")
            continue
        yield Condition(
            part.value,
            False,
            f"{name} failed {failed.count} times, the last time within {minutes}; {instead}",
            f"the log has the first error and its calls, GET /stats the last one; switch to another with PUT {switch}",
        )
    times = router.watch.times[router.policy.name]
    slow, decided = times.lately(now_s)
    counts = f"{slow} of {decided} routing decisions of {router.policy.name} were slow within {minutes}"
    if not times.too_slow(now_s):
        yield Condition("decision_time", True, counts if slow else "no slow routing decision lately")
    else:
        yield Condition(
            "decision_time",
            False,
            counts,
            "use a cheaper policy, or give the proxy more CPU; limits.slow_decision_s is the limit",
        )


def _plans_in_vain(core: Core) -> bool:
    """True if there is a planner, and no instance whose role permits a hand-off."""
    fleet = [each.settings for each in core.instances]
    return bool(fleet) and core.router.planner.name != Never.name and not roles_permit_hand_offs(fleet)


def _no_hand_offs(planner: str) -> Condition:
    return Condition(
        PolicyPart.PLANNER.value,
        False,
        f"{planner} can offload nothing: no instance's role permits a hand-off to another",
        "give the instances the role of their engines and a bootstrap_url, or switch the planner off: PUT /policy with "
        'planner "never"',
    )


def _plug_ins(core: Core) -> Condition:
    broken = core.router.broken_policies
    if not broken:
        return Condition("plug_ins", True, "every installed policy can be loaded")
    return Condition(
        "plug_ins",
        False,
        f"installed policies that cannot be used: {', '.join(sorted(broken))}",
        "GET /policy has the errors; fix or uninstall the packages, then restart",
    )


def _records(core: Core) -> Condition:
    breakdown = core.breakdown
    lost = f"; {breakdown.file_dropped} rows were not written since the start" if breakdown.file_dropped else ""
    if breakdown.file_error is None:
        return Condition("records", True, f"rows are recorded{lost}")
    return Condition(
        "records",
        False,
        f"writing the breakdown file failed; rows are kept in memory{lost}",
        "make room where breakdown.jsonl_path is; writing is tried again every 2 s, and the log has the error",
    )


def _shared_state(core: Core) -> Iterator[Condition]:
    """Condition ``shared_state``, where replicas share state."""
    sharing = core.sharing
    if sharing is None:
        return
    if sharing.twin:
        yield Condition(
            "shared_state",
            False,
            "another process shares state under this replica's name",
            "give every replica a name of its own: sharing.replica",
        )
    elif sharing.linked or sharing.starting:
        yield Condition("shared_state", True, f"state is shared with {len(sharing.others)} other replica(s)")
    else:
        yield Condition(
            "shared_state",
            False,
            "the store of the shared state cannot be used: this replica routes from what it knows, and limits of "
            "keys count its own requests",
            "check the store of sharing.url; the log has the error, and the connection is tried again every 2 s",
        )


def _meters(core: Core) -> Iterator[Condition]:
    """Conditions of ``proxy.meters.checks``."""
    for name, found in core.meters.failing.items():
        if not found:
            yield Condition(name, True, MEANINGS[name])
            continue
        shown = [f"{instance}: {text}" if instance else text for instance, text in sorted(found.items())[:_SHOWN]]
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        yield Condition(name, False, "; ".join(shown) + more, REMEDIES[name])


def _since(times: dict[str, tuple[bool, float]], condition: Condition) -> float:
    """Unix time since which a condition has its state; noted when it is first observed."""
    known = times.get(condition.name)
    if known is None or known[0] is not condition.ok:
        known = times[condition.name] = (condition.ok, round(time.time(), 3))
    return known[1]
