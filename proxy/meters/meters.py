"""Owner of the meters of one proxy: fed by finished requests and by the health probes, read by admin and metrics."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from policies.meters.hits import CeilingCache, HitTokens, best_prediction, hit_tokens
from policies.meters.window import SlidingSums
from policies.row import Row
from policies.state import FleetState
from policies.types import CachePrediction, IndexSource, RequestView
from proxy.events.subscriber import EventSubscriber
from proxy.fleet.instances import Instance, Instances
from proxy.meters.checks import Checks
from proxy.meters.engine import EngineMeter, EngineSums, LoadReading
from proxy.meters.session_headers import SessionHeaders
from proxy.records.batch import RecordBatch
from proxy.sessions.prefix_chain import PREFIX_SOURCE
from proxy.settings import MeterSettings

log = logging.getLogger("warmroute.meters")

_Served = tuple[RequestView, Row, float, float, bool | None]
"""A request, its record, when it was sent and ended (monotonic), and ``echoed``.

A plain tuple: making a named one is one more call at the end of each request, with cold caches.
"""


class Meters:
    """Meters of the fleet and of each instance. Single writer: the event loop."""

    def __init__(
        self, settings: MeterSettings, state: FleetState, instances: Instances, events: EventSubscriber
    ) -> None:
        self.settings = settings
        self.engines: dict[str, EngineMeter] = {}
        self.session_headers = SessionHeaders()
        self.further_sequences = 0
        """Sequences in flight beyond one for each request: several prompts or choices."""
        self.since: dict[str, tuple[bool, float]] = {}
        """Condition -> its state and the Unix time since which it has it."""
        self._window = SlidingSums(len(HitTokens._fields), settings.window_s)
        self._ceiling = CeilingCache(settings.ceiling_blocks)
        self._block_tokens = 0.0
        self._batch = RecordBatch(
            self._count, log, lambda served: f"request {served[1].request_id} could not be measured"
        )
        """Requests that are not counted yet. Everything that reads the meters counts them first."""
        self._batch.open(None)
        self._state = state
        self._instances = instances
        self._checks = Checks(settings, state.predictor.exact, state.ledger, instances, events)

    def served(self, request: RequestView, row: Row, sent_s: float, echoed: bool | None) -> None:
        """Count a request that an engine has answered; called after its last byte. Does not raise.

        Args:
            request: as it was routed.
            row: its finished record.
            sent_s: when it was sent to D (monotonic).
            echoed: the answer has the id that was sent in ``x-request-id``; None: such answers have none.
        """
        if self.settings.enabled and row.status == 200 and not row.resumed:
            self._batch.add((request, row, sent_s, time.monotonic(), echoed))

    def _count(self, served: _Served) -> None:
        request, row, sent_s, now_s, echoed = served
        decision, reported, predicted = row.decision, row.actual_cached_tokens, row.predicted_cached_tokens
        if decision is None:
            return
        if echoed is not None:
            self._of(decision.decode_on).answered(echoed)
        if request.exact and request.block_tokens != self._block_tokens:
            self._block_tokens = request.block_tokens
            self._ceiling.clear()
        held, ceiling = self._ceiling.add(request)
        named = row.session_source is not None and row.session_source != PREFIX_SOURCE
        self.session_headers.add(named, request.block_hashes, held)
        prediction = row.prediction
        if reported is None or predicted is None or prediction is None:
            return
        prompt = row.prompt_tokens or request.prompt_tokens
        hits = hit_tokens(prompt, ceiling, best_prediction(decision, predicted), predicted, reported)
        self._window.add(hits, now_s)
        self._of(row.prefill_instance or decision.decode_on).add(_sums(prompt, predicted, reported, prediction), now_s)
        transfer = row.legs.get("transfer")
        if transfer is not None:
            guess_s, taken_s = transfer["predicted_s"], transfer["actual_s"]
            off_s = abs(guess_s - taken_s)
            times = EngineSums(transfers=1, transfer_error_s=off_s, transfer_s=taken_s, transfer_predicted_s=guess_s)
            self._of(decision.decode_on).add(times, now_s)
        if row.prefill_instance is None and prompt - max(predicted, reported) >= 2 * request.block_tokens:
            self._of(decision.decode_on).computed(sent_s, now_s)

    def probed(
        self, instance: Instance, counters: Mapping[str, float], caching: str | None, short: int, now_s: float
    ) -> None:
        """Take a reading of an engine's own figures.

        Args:
            instance: has its running and waiting requests.
            counters: its counters, by the names of ``proxy.meters.engine.COUNTERS``.
            caching: its ``enable_prefix_caching``; None: not reported.
            short: requests in flight there that are on no ledger.
            now_s: monotonic.
        """
        if not self.settings.enabled:
            return
        meter = self.of(instance.name)
        meter.caching_off = caching == "False"
        meter.count(counters, now_s)
        ledger = self._state.ledger.joint_requests(instance.name)
        requests = instance.reported.requests
        if requests is not None:
            meter.readings.append(LoadReading(ledger, requests, short + self.further_sequences))

    def restarted(self, name: str) -> None:
        """Begin again for an engine that restarted."""
        self._batch.settle()
        if name in self.engines:
            self.engines[name].restart()

    def forget(self, name: str) -> None:
        """Drop an instance that has left the fleet."""
        self._batch.settle()
        self.engines.pop(name, None)
        self._checks.forget(name)

    def examine(self, now_s: float) -> None:
        """Examine every condition; call at regular intervals."""
        self._batch.settle()
        if self.settings.enabled:
            away = self._state.offloads_in_flight
            self._checks.examine(self.engines, self.session_headers, away, now_s)

    @property
    def failing(self) -> Mapping[str, Mapping[str, str]]:
        """Condition -> instance (empty: the fleet) -> what was found; every condition is present."""
        return self._checks.failing

    def hits(self, now_s: float) -> HitTokens:
        """Sums over the window."""
        self._batch.settle()
        return HitTokens(*self._window.totals(now_s))

    def total(self) -> HitTokens:
        """Sums since the start."""
        self._batch.settle()
        return HitTokens(*self._window.since_start())

    def of(self, name: str) -> EngineMeter:
        """The meter of an instance."""
        self._batch.settle()
        return self._of(name)

    def _of(self, name: str) -> EngineMeter:
        meter = self.engines.get(name)
        if meter is None:
            meter = self.engines[name] = EngineMeter(self.settings.window_s)
        return meter

    def as_dict(self, now_s: float) -> dict[str, Any]:
        """JSON-ready, as ``GET /meters`` answers."""
        hits = self.hits(now_s)
        return {
            "enabled": self.settings.enabled,
            "window_s": self.settings.window_s,
            "fleet": {
                "window_requests": int(hits.requests),
                "prompt_tokens": int(hits.prompt),
                **hits.shares(),
                "loss": hits.losses(),
                "ceiling_blocks": self._ceiling.blocks,
            },
            "instances": {instance.name: self._row(instance, now_s) for instance in self._instances},
        }

    def trust(self, name: str) -> str:
        """Index that predicts for an instance: exact, partial (exact as a lower bound) or shadow."""
        exact = self._state.predictor.exact
        if not exact.trusted(name):
            return IndexSource.SHADOW.value
        return "partial" if name in exact.partial_instances else IndexSource.EXACT.value

    def _row(self, instance: Instance, now_s: float) -> dict[str, Any]:
        name, meter = instance.name, self.of(instance.name)
        sums = meter.sums(now_s)
        return {
            "window_requests": int(sums.requests),
            "prompt_tokens": int(sums.prompt_tokens),
            "predicted_tokens": int(sums.predicted_tokens),
            "reported_tokens": int(sums.reported_tokens),
            "prediction_error": sums.prediction_error(),
            "index_trust": self.trust(name),
            "ledger_requests": self._state.ledger.requests(name),
            "engine_running": instance.reported.running,
            "engine_waiting": instance.reported.waiting,
            "transfer_error": sums.transfer_error(),
            "engine_counters": {key: int(value) for key, value in sorted(meter.counted.items())},
            "drift": [check for check, found in self.failing.items() if name in found],
        }


def _sums(prompt: int, predicted: int, reported: int, prediction: CachePrediction) -> EngineSums:
    exact = prediction.exact_tokens or 0
    return EngineSums(
        1,
        prompt,
        predicted,
        reported,
        abs(predicted - reported),
        predicted > 0,
        exact > 0,
        exact,
        max(exact - reported, 0),
    )
