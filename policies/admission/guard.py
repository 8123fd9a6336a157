"""The admission rule, asked so that its failure is reported and holds no request."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf, isnan

from policies.admission.base import AdmissionRule, AdmissionView, Admit, Hold, SessionView, checked_answer
from policies.admission.selection import SelectiveRule
from policies.types import PolicyFailedError, PolicyFailure, PolicyPart, RequestView


class GuardedRule:
    """A rule and the observer of its failures."""

    def __init__(self, rule: AdmissionRule) -> None:
        self.set_rule(rule)
        self.on_failure: Callable[[PolicyFailure], None] | None = None
        """Called when the rule fails, after which the request is sent at once; None: its failure is raised."""

    def set_rule(self, rule: AdmissionRule) -> None:
        """Another rule."""
        self.rule = rule
        self.selective = rule if isinstance(rule, SelectiveRule) else None

    def answer(self, request: RequestView, session: SessionView, fleet: AdmissionView) -> Admit | Hold | None:
        """The rule's answer; None if it failed. Raises PolicyFailedError if nobody observes that."""
        try:
            return checked_answer(self.rule.name, self.rule.admit(request, session, fleet))
        except Exception as error:
            failure = self._failure(error)
            if self.on_failure is None:
                raise PolicyFailedError(failure, request.request_id) from error
            self.on_failure(failure)
            return None

    def longest_sent(self, views: Iterable[AdmissionView], *, kept: bool) -> float:
        """The largest bound of a selective rule for these; none if it failed, so that it is asked about every request.

        Raises PolicyFailedError as ``answer``.
        """
        assert self.selective is not None
        try:
            longest = max([float(self.selective.longest_sent(fleet, kept)) for fleet in views], default=-inf)
        except Exception as error:
            failure = self._failure(error)
            if self.on_failure is None:
                raise PolicyFailedError(failure, None) from error
            self.on_failure(failure)
            return inf
        return inf if isnan(longest) else longest

    def _failure(self, error: Exception) -> PolicyFailure:
        return PolicyFailure.of(PolicyPart.ADMISSION, self.rule.name, error)
