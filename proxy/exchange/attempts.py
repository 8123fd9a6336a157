"""Failed attempts of one request: if another one may follow, and the error after the last."""

from __future__ import annotations

import time
from functools import cached_property
from typing import NamedTuple

from policies.row import RequestOutcome, Row
from proxy.core import Core
from proxy.errors import AttemptFailedError, RequestError, no_instance_error, out_of_sockets_error
from proxy.exchange.poison import PoisonGuard
from proxy.fleet.instances import Instance
from proxy.fleet.reachability import outage
from proxy.routing.retries import NO_RETRY_HEADER


class _Failure(NamedTuple):
    instance: Instance
    error: str
    sent_s: float
    counted: bool
    """Its breaker has counted it."""


class Attempts:
    """The attempts of one request."""

    def __init__(self, core: Core, row: Row, headers: dict[bytes, bytes]) -> None:
        self._core = core
        self._row = row
        self._headers = headers
        self._not_retried = ""
        self._alike: list[_Failure] = []
        """Failures in a row of different engines that may be the request's fault, all in the same words."""
        self.tried: set[str] = set()
        """Instances that failed."""

    @cached_property
    def guard(self) -> PoisonGuard:
        """Guard of this request, created when something fails or is handed off."""
        return PoisonGuard(self._core, self._row.request_id)

    async def may_follow(self, failure: AttemptFailedError, model: str | None) -> bool:
        """True if a request for ``model`` that failed before its first byte may be sent to another engine."""
        core = self._core
        if core.instances.healthy(model) <= self.tried or await self.guard.dead():
            return False
        if self._headers.get(NO_RETRY_HEADER, b"0") != b"0":
            self._not_retried = "not retried because of x-warmroute-no-retry"
        elif not core.retries.take(time.monotonic(), seen=failure.seen):
            self._not_retried = "not retried: the retry budget is exhausted (limits.retry_ratio, retry_min_per_s)"
        return not self._not_retried

    def count(
        self,
        instance: Instance,
        error: str,
        sent_s: float,
        model: str | None,
        *,
        refused: bool,
        fault: bool = False,
    ) -> None:
        """Record a failure before the first byte for the health of its instance.

        Where all engines that were tried fail in the same words, none has failed: a few such requests of one client
        would close the fleet to all. The first failure counts until then, as an engine that fails at everything must be
        left out soon, unless engines have failed alike in these words lately, or no other engine can be asked: then it
        counts if another one answers.

        Args:
            instance: where it was sent.
            error: description of the failure.
            sent_s: when it was sent (monotonic).
            model: the request's.
            refused: the connection was refused.
            fault: the request may be its cause.
        """
        alike, common, now_s = self._alike, self._core.common_failures, time.monotonic()
        again = fault and bool(alike) and alike[0].error == error
        if again and all(instance.url != each.instance.url for each in alike):
            if alike[0].counted:
                self._core.instances.forgive(alike[0].instance)
                alike[0] = alike[0]._replace(counted=False)
            common.add(error, now_s)
            alike.append(_Failure(instance, error, sent_s, counted=False))
            return
        self.answered()
        if fault:
            waits = common.known(error, now_s) or self._alone(instance, model)
            alike.append(_Failure(instance, error, sent_s, not waits and instance.breaker.counts(sent_s)))
            if waits:
                return
        self._core.instances.failed(instance, error, refused=refused, sent_s=sent_s)

    def _alone(self, instance: Instance, model: str | None) -> bool:
        """True if no other engine may be asked now."""
        instances = self._core.instances
        return all(instances[name].url == instance.url for name in instances.healthy(model) & instances.decoders())

    def answered(self) -> None:
        """Record that another engine answered otherwise than those that failed alike: they failed."""
        for each in self._alike:
            if not each.counted:
                self._core.instances.failed(each.instance, each.error, sent_s=each.sent_s)
        self._alike.clear()

    def failed(self, error: AttemptFailedError, *, after: AttemptFailedError | None) -> AttemptFailedError:
        """Record a failed attempt and return it; ``after`` is the one before."""
        if after is not None and after.refusal is None:
            error.refusal = None  # an instance that serves the model has failed
        self.tried.add(error.instance)
        self._row.note_failed(error.instance, str(error))
        return error

    async def give_up(self, failure: AttemptFailedError | None) -> RequestError:
        """Record the outcome; returns the error for the client."""
        row = self._row
        if failure is None:
            row.outcome = RequestOutcome.NO_INSTANCE
            return no_instance_error(self._core.settings.health.interval_s, outage(self._core.instances))
        if failure.own:
            row.outcome = RequestOutcome.NO_INSTANCE
            return out_of_sockets_error(str(failure))
        if failure.refusal is not None:
            row.outcome = RequestOutcome.ENGINE_REFUSED
            return failure.refusal
        message = f"{len(row.attempts)} attempt(s) failed, the last on {failure.instance}: {failure}"
        if dead := await self.guard.dead():
            row.outcome = RequestOutcome.POISON_REQUEST
            message += f"; not retried: {' and '.join(dead)} died while serving this request"
            return RequestError(502, message, kind="upstream_error", code="poison_request")
        if self._not_retried:
            message += f"; {self._not_retried}"
        if failure.timed_out:
            row.outcome = RequestOutcome.UPSTREAM_TIMEOUT
            return RequestError(504, message, kind="upstream_error", code="upstream_timeout")
        row.outcome = RequestOutcome.UPSTREAM_ERROR
        return RequestError(502, message, kind="upstream_error", code="upstream_error", retry_after_s=1)
