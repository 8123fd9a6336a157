"""Sends the requests of a recording, at the same times and instances, to simulated engines in virtual time."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from policies.types import Role
from replayer.records.runs import Latencies, latencies
from sim.core.engine import Engine
from sim.core.sequence import KvTransfer, keyed_request
from sim.core.types import TokenEvent
from sim.fidelity.recording import Recording, Sent
from sim.offline.options import SimOptions
from sim.virtual import VirtualFleet


class ResimulatedRequest(NamedTuple):
    """One request's latencies and cached tokens in the simulation; times are engine seconds."""

    latencies: Latencies
    cached_tokens: int
    """Cached prompt tokens on the engine that computed the prompt: P if the prefill was offloaded."""


class _Run:
    def __init__(self, fleet: VirtualFleet) -> None:
        self.fleet = fleet
        self.outcomes: dict[str, ResimulatedRequest] = {}
        self._sent: dict[str, Sent] = {}
        self._first_s: dict[str, float] = {}
        self._cached: dict[str, int] = {}

    def send(self, number: int, sent: Sent) -> None:
        """Send a request, or its prefill leg if it was offloaded."""
        request_id, prefill = sent.record.request_id, sent.record.prefill_instance
        self._sent[request_id] = sent
        output_key = (1 << 64) + (number << 24)
        if prefill is None:
            request = keyed_request(request_id, sent.keys, sent.prompt_tokens, sent.output_tokens, output_key)
            self.fleet.submit(sent.instance, request)
            return
        transfer = KvTransfer(do_remote_decode=True, transfer_id=request_id)
        leg = keyed_request(f"{request_id}/prefill", sent.keys, sent.prompt_tokens, 1, output_key, transfer)
        self.fleet.submit(prefill, leg)

    def take(self, event: TokenEvent) -> None:
        """Record an engine's event; the end of a prefill leg starts the decode leg."""
        request_id, _, leg = event.request_id.partition("/")
        sent = self._sent[request_id]
        if leg:
            prefill = sent.record.prefill_instance
            self._cached[request_id] = event.cached_tokens
            transfer = KvTransfer(False, True, event.transfer_id, prefill, prefill)
            key = (1 << 96) + (len(self._cached) << 24)
            request = keyed_request(request_id, sent.keys, sent.prompt_tokens, sent.output_tokens, key, transfer)
            self.fleet.submit(sent.instance, request)
            return
        if event.first:
            self._first_s[request_id] = event.time_s
        if event.finish_reason is not None:
            times = latencies(
                scheduled_s=sent.sent_s,
                sent_s=sent.sent_s,
                first_token_s=self._first_s[request_id],
                last_token_s=event.time_s,
                finished_s=event.time_s,
                completion_tokens=sent.output_tokens,
            )
            cached = self._cached.get(request_id, event.cached_tokens)
            self.outcomes[request_id] = ResimulatedRequest(times, cached)


def resimulate(
    recording: Recording, profile: str, transport: str | None = None, pool_tokens: int | None = None
) -> dict[str, ResimulatedRequest]:
    """Results by request id. Each engine gets the profile's pool unless ``pool_tokens`` (tokens) is given.

    Requests are sent at the recorded times whether or not the simulated engines have answered the turn before.

    Raises:
        SimulationError: unknown profile or transport, or a pool too small for its blocks.
    """
    options = SimOptions(profile=profile, pool_tokens=pool_tokens, transport=transport, role=Role.KV_BOTH)
    config, hardware = options.engine(Role.KV_BOTH, recording.block_tokens)
    seconds = hardware.transport(transport).seconds
    engines = {
        name: Engine(replace(config, engine_id=name), hardware.timing, seconds, report_progress=False)
        for name in recording.instances
    }
    run = _Run(VirtualFleet(engines))
    for number, sent in enumerate(recording.sent):
        while news := run.fleet.advance(sent.sent_s):
            for _, event in news:
                run.take(event)
        run.send(number, sent)
    while news := run.fleet.advance():
        for _, event in news:
            run.take(event)
    return run.outcomes
