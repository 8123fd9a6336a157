"""Live side of the cost models: the work requested of D and P, measured times, and the learned corrections."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from policies.costs.formulas import Costs, PrefillModel, TransferJob, TransferModel, pair_transport
from policies.costs.short_prefills import ShortPrefills
from policies.costs.short_step import StepFit
from policies.costs.slowness import Slowness
from policies.costs.step_watch import StepWatch, WatchedStream
from policies.costs.transfer_constants import KV_BYTES_PER_TOKEN
from policies.pool import tokens_over
from policies.types import InstanceView, RequestView


class PrefillJob(NamedTuple):
    """One prefill and the state of its instance at the time of the decision."""

    instance: str
    new_tokens: int
    cached_tokens: int
    pending_tokens: int
    prefilling: int
    room: bool = True
    """The KV pool had room for the prompt, so its first token did not wait for blocks."""


class Workload(NamedTuple):
    """Work of one decision on the instances it chose."""

    decode: PrefillJob
    """The prefill that D computes if the request is not offloaded or falls back."""
    prefill: PrefillJob | None
    transfer: TransferJob | None

    @classmethod
    def of(
        cls,
        request: RequestView,
        decode: InstanceView,
        prefill: InstanceView | None,
        offloads_in_flight: int,
        bytes_per_token: float,
    ) -> Workload:
        """Build from the views of the decision; ``offloads_in_flight`` includes this request."""
        job = None
        if prefill is not None:
            others = max(0, offloads_in_flight - 1)
            job = transfer_job(request, prefill, decode, others, bytes_per_token)
        return cls(_prefill_job(request, decode), _prefill_job(request, prefill) if prefill else None, job)


def transfer_job(
    request: RequestView, prefill: InstanceView, decode: InstanceView, others: int, bytes_per_token: float
) -> TransferJob:
    """The transfer of the prompt tokens that D lacks, with the inputs its time depends on."""
    return TransferJob(
        (prefill.instance, decode.instance),
        pair_transport(prefill, decode),
        (request.prompt_tokens - decode.cached_tokens) * bytes_per_token,
        max(prefill.decode_streams, decode.decode_streams),
        others,
    )


def _prefill_job(request: RequestView, view: InstanceView) -> PrefillJob:
    return PrefillJob(
        view.instance,
        request.prompt_tokens - view.cached_tokens,
        view.cached_tokens,
        view.pending_prefill_tokens,
        view.prefilling,
        tokens_over(view, request.prompt_tokens) <= 0,
    )


class CostBook:
    """Owner of the current cost models; learns from measured legs. Single writer: the fleet state's owner."""

    def __init__(
        self,
        prefill: PrefillModel | None = None,
        transfer: TransferModel | None = None,
        bytes_per_token: float = KV_BYTES_PER_TOKEN,
    ) -> None:
        self.prefill = prefill or PrefillModel()
        self.short_prefills = ShortPrefills()
        self.transfer = transfer or TransferModel()
        self.bytes_per_token = bytes_per_token
        self.steps = StepFit()
        self.watch = StepWatch()
        self.slowness = Slowness()
        self._reporting = set[str]()
        """Instances that have reported cached tokens; 0 of another one may mean that it cannot."""

    def at(self, now_s: float, *instances: Iterable[str]) -> Costs:
        """Snapshot of the models for a decision at ``now_s`` among the instances of all groups."""
        short_step, slowness = self.steps.short_step, self.slowness.among(now_s, *instances)
        return Costs(self.prefill, self.transfer, now_s, self.bytes_per_token, short_step, slowness)

    def prefilled(self, job: PrefillJob, seconds: float, *, ordered: bool = False) -> float:
        """Learn from a first token after ``seconds``; returns the predicted seconds.

        A prompt without room in the KV pool waited for blocks for an unknown time, and one that was not computed at
        once in an order of prefills (`policies.costs.order`) for those that overtook it, this proxy's or another's. So
        their times are not samples of a prefill.

        Args:
            job: the prefill.
            seconds: from sending it to its first token.
            ordered: its engine computes by due times.
        """
        measured = self.slowness.measured
        slowness = measured.get(job.instance, 1.0)
        seconds /= slowness
        queue_s = self.prefill.queue_s(job.pending_tokens, job.prefilling)
        expected_s = queue_s + self.prefill.seconds(job.new_tokens, job.cached_tokens)
        predicted_s = slowness * self.short_prefills.predict(job.new_tokens, expected_s)
        if job.room and not (ordered and job.prefilling) and not (measured and job.instance not in measured):
            self.prefill = self.prefill.observe(job.new_tokens, job.cached_tokens, queue_s, seconds)
            self.short_prefills = self.short_prefills.observe(job.new_tokens, expected_s, seconds)
        return predicted_s

    def compare(self, job: PrefillJob, prompt_tokens: int, cached_tokens: int, seconds: float, now_s: float) -> None:
        """Learn how slow the instance is from a first token after ``seconds``, at the end of its answer.

        Only from prefills that waited for no other one.

        Args:
            job: the prefill.
            prompt_tokens: the prompt, as the engine counted it: that of the job may be an estimate.
            cached_tokens: what of it was cached, as the engine reported.
            seconds: from sending it to its first token.
            now_s: time of the end.
        """
        if cached_tokens:
            self._reporting.add(job.instance)
        elif job.instance not in self._reporting:
            cached_tokens = min(job.cached_tokens, prompt_tokens)
        new_tokens = prompt_tokens - cached_tokens
        if job.room and not job.prefilling and new_tokens >= self.prefill.smallest_tokens:
            expected_s = self.prefill.seconds(new_tokens, cached_tokens)
            self.slowness.observe(job.instance, expected_s, seconds, now_s)
            self._recentre()

    def transferred(self, workload: Workload, seconds: float, now_s: float) -> float:
        """Learn from a D leg whose first token took ``seconds``; returns the predicted seconds.

        Where D had more prefill queued than the predicted transfer time, the time is not a sample of the transfer.

        Raises:
            ValueError: the decision had no hand-off.
        """
        job, decode = workload.transfer, workload.decode
        if job is None:
            raise ValueError("the decision had no hand-off")
        predicted_s = self.transfer.predict(job, now_s).seconds
        queue_s = self.prefill.queue_s(decode.pending_tokens, decode.prefilling)
        queue_s *= self.slowness.measured.get(decode.instance, 1.0)
        if queue_s <= predicted_s:
            self.transfer = self.transfer.observe(job, seconds, now_s)
        self.transfer = self.transfer.settled(job.pair, ok=True)
        return max(predicted_s, queue_s)

    def ran_beside(self, job: PrefillJob, now_s: float) -> None:
        """A prefill has ended on its instance, and so ran in steps of the streams there."""
        seconds = self.prefill.formula_s(job.new_tokens, job.cached_tokens) - self.prefill.fixed_s
        self.watch.prefilled(job.instance, job.new_tokens, seconds, now_s)

    def answered(self, stream: WatchedStream, tokens: int, now_s: float) -> None:
        """Learn from the last of a stream's ``tokens`` tokens."""
        self.steps.observe(self.watch.beside(stream, tokens - 1, now_s))

    def handed_over(self, job: TransferJob) -> None:
        """Count a successful hand-off whose first token was not timed."""
        self.transfer = self.transfer.settled(job.pair, ok=True)

    def fell_back(self, job: TransferJob) -> None:
        """Count a hand-off that failed."""
        self.transfer = self.transfer.settled(job.pair, ok=False)

    def forget(self, instance: str) -> None:
        """Drop the learned values of all pairs of an instance that left the fleet, its steps and its slowness."""
        self.transfer = self.transfer.without(instance)
        self.restarted(instance)
        self._reporting.discard(instance)

    def restarted(self, instance: str) -> None:
        """Drop what holds for this engine process only: its steps, and its slowness, as it may have another GPU."""
        self.watch.forget(instance)
        self.slowness.forget(instance)
        self._recentre()

    def _recentre(self) -> None:
        """Keep the model that of the middle instance (`policies.costs.slowness.Slowness.recentre`)."""
        if self.prefill.buckets:
            self.prefill = self.prefill.scaled(self.slowness.recentre())
