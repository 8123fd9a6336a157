"""Roofline of prefill and decode: least times of a model's steps at a GPU's peaks (Williams et al., CACM 2009).

Time of a step >= max(FLOPs / peak FLOPs, bytes / peak bandwidth). FLOPs: the layers' matrices for every token,
attention over what precedes it, the output layer once for each sampled token. Bytes: the weights a step touches (of a
mixture of experts those its tokens choose, taken as at random), keys and values read and written. Left out, so the
floor is low: activations, kernel launches, softmax and norms, routing, repeated reads, and communication between GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from bench.analysis.architecture import Architecture
from bench.analysis.sheets import GpuSheet


class Precision(NamedTuple):
    """Bits of a weight and of a value of the KV cache: 16 or 8."""

    weight_bits: int = 16
    kv_bits: int = 16

    @property
    def weight_bytes(self) -> float:
        return self.weight_bits / 8

    @property
    def kv_bytes(self) -> float:
        return self.kv_bits / 8


class StepWork(NamedTuple):
    """Least work of one step: FLOPs and bytes."""

    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        """FLOPs for each byte of memory traffic."""
        return self.flops / self.bytes


class Machine(NamedTuple):
    """Peaks of ``gpus`` GPUs that share a model evenly; their communication is not counted."""

    flops_per_s: float
    bytes_per_s: float

    @property
    def ridge(self) -> float:
        """FLOPs per byte from which arithmetic is the limit."""
        return self.flops_per_s / self.bytes_per_s

    def seconds(self, work: StepWork) -> float:
        """The least time of a step."""
        return max(work.flops / self.flops_per_s, work.bytes / self.bytes_per_s)

    def attainable(self, intensity: float) -> float:
        """FLOPs per second that work of this intensity can reach."""
        return min(self.flops_per_s, intensity * self.bytes_per_s)


def machine(gpu: GpuSheet, precision: Precision, gpus: int = 1) -> Machine:
    """Peaks for a precision.

    Raises:
        AnalysisError: the GPU's sheet has no peak for it.
    """
    return Machine(gpus * gpu.flops_per_s(precision.weight_bits), gpus * gpu.bytes_per_s)


def prefill_step(model: Architecture, precision: Precision, new: int, context: int, sampled: int = 1) -> StepWork:
    """One chunk of ``new`` prompt tokens after ``context`` tokens; ``sampled`` tokens go through the output layer."""
    weights = model.touched_parameters(new) + (model.head_parameters if sampled else 0)
    kv_tokens = context + 2 * new
    """The chunk's KV is written once; it and everything before it are read once."""
    return StepWork(
        flops=new * model.layer_flops_per_token()
        + 2.0 * sampled * model.head_parameters
        + model.attention_flops(new, context),
        bytes=weights * precision.weight_bytes + kv_tokens * model.kv_bytes_per_token(precision.kv_bytes),
    )


def decode_step(model: Architecture, precision: Precision, streams: int, context: int) -> StepWork:
    """One token for each of ``streams`` with ``context`` tokens each."""
    weights = model.touched_parameters(streams) + model.head_parameters
    return StepWork(
        flops=streams
        * (model.layer_flops_per_token() + 2.0 * model.head_parameters + model.attention_flops(1, context)),
        bytes=weights * precision.weight_bytes + streams * (context + 1) * model.kv_bytes_per_token(precision.kv_bytes),
    )


def prefill_steps(
    model: Architecture, precision: Precision, new: int, cached: int = 0, chunk_tokens: int = 8192
) -> list[StepWork]:
    """The chunks of a prompt of ``new`` tokens after ``cached`` ones; the last one samples a token."""
    steps = []
    for done in range(0, new, chunk_tokens):
        count = min(chunk_tokens, new - done)
        last = done + count == new
        steps.append(prefill_step(model, precision, count, cached + done, sampled=1 if last else 0))
    return steps


def prefill_s(
    model: Architecture, precision: Precision, on: Machine, new: int, cached: int = 0, chunk_tokens: int = 8192
) -> float:
    """Least time to compute a prompt of ``new`` tokens after ``cached`` ones, in chunks of the step's token budget."""
    return sum(on.seconds(step) for step in prefill_steps(model, precision, new, cached, chunk_tokens))


def decode_s(model: Architecture, precision: Precision, on: Machine, streams: int, context: int) -> float:
    """Least time of a decode step, which is the least TPOT."""
    return on.seconds(decode_step(model, precision, streams, context))


class MeasuredTime(msgspec.Struct, frozen=True, kw_only=True):
    """One measured time against the roofline's floor."""

    kind: str
    """``prefill``, ``prefill among N decodes`` or ``decode``."""
    point: str
    floor_s: float
    measured_s: float
    gflops: float
    intensity: float
    """FLOPs over bytes of all its steps."""

    @property
    def efficiency(self) -> float:
        """Floor over measured: the share of the peak that was reached."""
        return self.floor_s / self.measured_s


def measured(kind: str, point: str, steps: Sequence[StepWork], seconds: float, on: Machine) -> MeasuredTime:
    """A measured time against the floor of its steps."""
    flops = sum(step.flops for step in steps)
    return MeasuredTime(
        kind=kind,
        point=point,
        floor_s=sum(on.seconds(step) for step in steps),
        measured_s=seconds,
        gflops=flops / 1e9,
        intensity=flops / sum(step.bytes for step in steps),
    )


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """One step's work and floor."""

    kind: str
    tokens: int
    """Prompt tokens of a chunk, or streams of a decode step."""
    context: int
    gflops: float
    gbytes: float
    intensity: float
    limit: str
    """``compute`` or ``memory``."""
    floor_s: float
    tflops_ceiling: float
    fits: bool
    """True if weights and these tokens' KV are within the memory that the driver reports."""


class Roofline(msgspec.Struct, frozen=True, kw_only=True):
    """Result of ``analyse roofline``."""

    model: str
    gpu: str
    gpus: int
    weight_bits: int
    kv_bits: int
    parameters: int
    active_parameters: float
    """Parameters that one token is multiplied with, output layer included."""
    weight_bytes: float
    kv_bytes_per_token: float
    layer_flops_per_token: float
    peak_tflops: float
    peak_tb_per_s: float
    ridge: float
    chunk_tokens: int
    steps: list[StepRow]
    compute_bound_chunk: int | None
    """Smallest chunk (context 0, powers of two refined) limited by arithmetic; None: none up to a million."""
    profile: str | None
    measured: list[MeasuredTime]


def step_row(kind: str, tokens: int, context: int, work: StepWork, on: Machine, *, fits: bool) -> StepRow:
    """A table's row of a step."""
    return StepRow(
        kind=kind,
        tokens=tokens,
        context=context,
        gflops=work.flops / 1e9,
        gbytes=work.bytes / 1e9,
        intensity=work.intensity,
        limit="compute" if work.intensity >= on.ridge else "memory",
        floor_s=on.seconds(work),
        tflops_ceiling=on.attainable(work.intensity) / 1e12,
        fits=fits,
    )


def compute_bound_chunk(model: Architecture, precision: Precision, on: Machine) -> int | None:
    """Smallest prefill chunk without context that arithmetic limits, by bisection; None: none up to a million."""
    low, high = 0, 1 << 20
    if prefill_step(model, precision, high, 0).intensity < on.ridge:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if prefill_step(model, precision, middle, 0).intensity >= on.ridge:
            high = middle
        else:
            low = middle
    return high
