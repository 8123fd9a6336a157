"""The policies that take part, by label."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import inspect
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from bench.tournament.results import costs_digest
from bench.tournament.settings import TournamentError, TournamentSettings
from policies.admission.base import AdmissionRule
from policies.admission.never_hold import NeverHold
from policies.offload import recent_contexts, specialists
from policies.registry import PolicyParameterError, make_admission, make_routing, routing_policies
from policies.routing.base import RoutingPolicy
from warmroute_yaml import load_yaml

_OF_RULE = "admission."
_SPECIALISTS = (specialists.__name__, recent_contexts.__name__)


class Entrant(msgspec.Struct, frozen=True, kw_only=True):
    """One policy with its parameters."""

    label: str
    """Its name in the tables and the name of its results' files."""
    policy: str
    """Registered name, or ``module:Class``."""
    params: dict[str, Any] = {}
    admission: str = "never_hold"
    admission_params: dict[str, Any] = {}

    def admission_rule(self) -> AdmissionRule:
        """Its admission rule.

        Raises:
            TournamentError: no such rule, or parameters that it rejects.
        """
        try:
            return make_admission(self.admission, self.admission_params)
        except ValueError as error:
            raise TournamentError(f"{self.label}: {error}") from error

    def make(self) -> RoutingPolicy:
        """A new policy object.

        Raises:
            TournamentError: no such policy, or parameters that it rejects.
        """
        try:
            if ":" not in self.policy and self.policy in routing_policies():
                return make_routing(self.policy, self.params)
            factory = _factory(self.policy)
            if dataclasses.is_dataclass(factory):
                unknown = set(self.params) - {field.name for field in dataclasses.fields(factory)}
                if unknown:
                    raise TournamentError(f"policy {self.policy!r} has no parameter {', '.join(sorted(unknown))}")
            return cast(RoutingPolicy, factory(**self.params))
        except (PolicyParameterError, TypeError, ValueError) as error:
            raise TournamentError(f"{self.label}: {error}") from error

    def digest(self) -> str:
        """Digest of the policy's parameters and of the source files that its class is made of.

        The files of the learned cost models count only for policies that use them (``fleet.costs``), those of the
        designation of specialists likewise (``fleet.specialists``).
        """
        found: set[str] = set()
        rule = self.admission_rule()
        for each in (*type(self.make()).__mro__, *(() if rule.name == NeverHold.name else type(rule).__mro__)):
            if each.__module__ not in sys.stdlib_module_names:
                _modules(each.__module__, found)
        body = b"".join(_source(module) for module in sorted(found))
        if b"costs" in body:
            body += costs_digest().encode()
        if b"fleet.specialists" in body:
            body += b"".join(map(_source, _SPECIALISTS))
        parameters = [self.params, self.admission_params] if self.admission_params else self.params
        return hashlib.sha256(msgspec.json.encode(parameters, order="sorted") + body).hexdigest()[:16]


def _modules(name: str, found: set[str]) -> set[str]:
    """A policy's module, and those of its package whose names it uses."""
    found.add(name)
    package = name.rpartition(".")[0]
    for value in vars(sys.modules[name]).values():
        used = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
        if isinstance(used, str) and used.rpartition(".")[0] == package and used in sys.modules and used not in found:
            _modules(used, found)
    return found


def _source(module: str) -> bytes:
    path = getattr(sys.modules[module], "__file__", None)
    return Path(path).read_bytes() if path else b""


def _factory(policy: str) -> Any:
    if ":" not in policy:
        raise TournamentError(f"unknown policy {policy!r}; known: {', '.join(routing_policies())}, or module:Class")
    module, _, name = policy.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise TournamentError(f"policy {policy!r}: {error}") from error


def parse(text: str) -> Entrant:
    """``[LABEL=]NAME[+RULE][,key=value...]``, NAME a registered policy or ``module:Class``, RULE an admission rule.

    A key ``admission.NAME`` is a parameter of the rule.

    Raises:
        TournamentError: the text does not have that form, or the policy rejects it.
    """
    head, *pairs = text.split(",")
    label, equals, name = head.partition("=")
    if not equals:
        label, name = text.replace(":", "."), head
    params: dict[str, Any] = {}
    rule_params: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise TournamentError(f"--policies {text!r}: {pair!r} is not key=value")
        of_rule = key.startswith(_OF_RULE)
        (rule_params if of_rule else params)[key.removeprefix(_OF_RULE)] = load_yaml(value)
    name, _, rule = name.partition("+")
    entrant = Entrant(
        label=label.strip(),
        policy=name.strip(),
        params=params,
        admission=rule.strip() or NeverHold.name,
        admission_params=rule_params,
    )
    entrant.make()
    entrant.admission_rule()
    return entrant


def field_of(texts: Sequence[str], left_out: Collection[str] = ()) -> list[Entrant]:
    """The named entrants, or all registered policies except ``left_out``; labels in order, without duplicates.

    Raises:
        TournamentError: a text that cannot be parsed, or one label for two policies.
    """
    entrants = [parse(text) for text in (texts or [name for name in routing_policies() if name not in left_out])]
    labels = [entrant.label for entrant in entrants]
    twice = {label for label in labels if labels.count(label) > 1}
    if twice:
        raise TournamentError(f"--policies names {', '.join(sorted(twice))} twice; give labels: LABEL=NAME,key=value")
    return sorted(entrants, key=lambda entrant: entrant.label)


def ablations(settings: TournamentSettings) -> list[Entrant]:
    """The subject with each of its ideas switched off.

    Raises:
        TournamentError: the settings name none, or parameters the subject does not have.
    """
    if not settings.ablations:
        raise TournamentError("the settings have no ablations: add `ablations: {idea: {parameter: value}}`")
    made = [
        Entrant(label=ablation_label(settings, idea), policy=settings.subject, params=params)
        for idea, params in sorted(settings.ablations.items())
    ]
    for entrant in made:
        entrant.make()
    return made


def ablation_label(settings: TournamentSettings, idea: str) -> str:
    """Label of the subject without an idea."""
    return f"{settings.subject} without {idea}"
