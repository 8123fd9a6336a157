"""Time that a step with a short prefill takes longer than one without, learned from the streams beside it.

A stream's answer takes longer by every step that has another request's prefill in it. A least-squares fit over answers
separates that from the steps that only decode.
"""

from __future__ import annotations

from math import inf, isfinite, sqrt
from typing import NamedTuple

SHORT_TOKENS = 512
"""Most new tokens of a step that counts as short: what they add beside the step itself is a few milliseconds."""
LEAST_TOKENS = 8
"""Shorter answers are no samples."""
_BATCH = 32
"""Answers that are added together."""
_KEPT = 0.999**_BATCH
"""Weight of what is known when they are: the last thousand answers count."""
_LEAST_ANSWERS = 13 * _BATCH
_LEAST_WEIGHT = 0.8 * _LEAST_ANSWERS
"""That their weights add up to."""
_SIGMAS = 4.0
"""Standard errors of the bound: answers that overlap in time are not independent."""
_KNOWN_SIGMA = 0.0025
"""Standard error below which an estimate counts. A fit of few short steps beside many long ones has a larger one, and
may be far off.
"""
_SHORT = 2
"""Place of the short steps in ``BesideStream.columns``."""


class BesideStream(NamedTuple):
    """Steps in which a stream's answer was generated, first token excluded."""

    seconds: float
    """From its first token to its last."""
    tokens: int
    stream_tokens: float
    """``tokens`` times the mean number of streams on the instance."""
    short: int
    """Steps with other requests' prefills of at most ``SHORT_TOKENS`` together."""
    long: int
    """Steps with more of them."""
    prefill_s: float
    """Seconds of the prefills in both, by the formula."""

    @property
    def columns(self) -> tuple[float, ...]:
        """Terms of the fit."""
        return (self.tokens, self.stream_tokens, self.short, self.long, self.prefill_s)


_COLUMNS = len(BesideStream._fields) - 1
_SUMS = _COLUMNS * (_COLUMNS + 1) // 2 + _COLUMNS + 1


class ShortStep(NamedTuple):
    """Learned seconds that a step with a short prefill takes longer."""

    seconds: float
    sigma: float
    """Standard error of ``seconds``; infinite while nothing is known."""

    @property
    def known(self) -> bool:
        """True if ``seconds`` is precise enough to be used."""
        return self.sigma < _KNOWN_SIGMA

    def instead_of(self, assumed_s: float) -> float:
        """``assumed_s``, or the learned time where that is surely less than half of it."""
        if self.known and self.seconds + _SIGMAS * self.sigma < assumed_s / 2:
            return max(0.0, self.seconds)
        return assumed_s


UNKNOWN_STEP = ShortStep(0.0, inf)


class StepSums(NamedTuple):
    """Sums of a `StepFit`, from which another one can start."""

    sums: tuple[float, ...]
    """Weighted sums of the products of any two columns, of each with ``seconds``, and of ``seconds`` squared."""
    weight: float
    """Of all answers together; less than their number, as old ones fade out."""
    answers: int
    """Number of answers added."""

    def check(self) -> None:
        """Raise ValueError for values that no answers lead to."""
        least = _LEAST_WEIGHT if self.answers >= _LEAST_ANSWERS else 0
        usable = len(self.sums) == _SUMS and least <= self.weight <= self.answers
        if not usable or not all(isfinite(each) and each >= 0 for each in self.sums):
            raise ValueError(f"no sums of answers: {self}")


class StepFit:
    """Least squares of ``seconds = a tokens + b stream_tokens + c short + d long + e prefill_s``; ``c`` is wanted.

    The variance of an answer's time grows with its tokens, so it weighs 1 / tokens. Old answers fade out. Answers are
    added in batches, which takes a third of the time.
    """

    __slots__ = ("_waiting", "short_step", "sums")

    def __init__(self) -> None:
        self.sums = StepSums((0.0,) * _SUMS, 0.0, 0)
        """Of the answers in full batches."""
        self._waiting: list[BesideStream] = []
        self.short_step = UNKNOWN_STEP
        """Estimated after every batch from the thirteenth on."""

    @property
    def answers(self) -> int:
        """Number of answers learned from."""
        return self.sums.answers + len(self._waiting)

    def start(self, sums: StepSums) -> None:
        """Continue from the sums of another fit, forgetting one's own."""
        self._waiting.clear()
        self.sums = sums
        self.short_step = self._estimate() if sums.answers >= _LEAST_ANSWERS else UNKNOWN_STEP

    def observe(self, beside: BesideStream) -> None:
        """Learn from an answer; those of fewer than ``LEAST_TOKENS`` tokens are left out."""
        if beside.tokens < LEAST_TOKENS or beside.seconds <= 0:
            return
        self._waiting.append(beside)
        if len(self._waiting) == _BATCH:
            products = zip(*[_products(each) for each in self._waiting], strict=True)
            self._waiting.clear()
            known, weight, answers = self.sums
            sums = tuple([_KEPT * before + sum(added) for before, added in zip(known, products, strict=True)])
            self.sums = StepSums(sums, _KEPT * weight + _BATCH, answers + _BATCH)
            if self.sums.answers >= _LEAST_ANSWERS:
                self.short_step = self._estimate()

    def _estimate(self) -> ShortStep:
        """The coefficient of ``short`` and its standard error, by a Cholesky factorisation."""
        sums = iter(self.sums.sums)
        products = [[0.0] * _COLUMNS for _ in range(_COLUMNS)]
        for row in range(_COLUMNS):
            for column in range(row, _COLUMNS):
                products[row][column] = products[column][row] = next(sums)
        times = [next(sums) for _ in range(_COLUMNS)]
        squares = next(sums)
        for at in range(_COLUMNS):  # columns that are multiples of each other, or zero, do not stop it
            products[at][at] += 1e-6 * products[at][at] + 1e-12
        unit = [float(at == _SHORT) for at in range(_COLUMNS)]
        lower = _cholesky(products)
        fitted, inverse = _solved(lower, times), _solved(lower, unit)
        left = squares - sum([coefficient * time for coefficient, time in zip(fitted, times, strict=True)])
        variance = max(0.0, left) / (self.sums.weight - _COLUMNS) * inverse[_SHORT]
        return ShortStep(fitted[_SHORT], sqrt(variance))


def _products(beside: BesideStream) -> tuple[float, ...]:
    """1 / tokens times the product of each two columns, of each with the time, and of the time squared."""
    seconds, tokens, streams, short, long, prefill_s = beside
    each_s, stream, few, many = seconds / tokens, streams / tokens, short / tokens, long / tokens
    return (
        tokens,
        streams,
        short,
        long,
        prefill_s,
        stream * streams,
        stream * short,
        stream * long,
        stream * prefill_s,
        few * short,
        few * long,
        few * prefill_s,
        many * long,
        many * prefill_s,
        prefill_s / tokens * prefill_s,
        seconds,
        each_s * streams,
        each_s * short,
        each_s * long,
        each_s * prefill_s,
        each_s * seconds,
    )


def _cholesky(matrix: list[list[float]]) -> list[list[float]]:
    lower = [[0.0] * len(matrix) for _ in matrix]
    for row, values in enumerate(matrix):
        for column in range(row + 1):
            rest = values[column] - sum([lower[row][at] * lower[column][at] for at in range(column)])
            lower[row][column] = sqrt(max(rest, 1e-18)) if row == column else rest / lower[column][column]
    return lower


def _solved(lower: list[list[float]], right: list[float]) -> list[float]:
    """Solution ``x`` of ``lower · lowerᵀ · x = right``."""
    half: list[float] = []
    for row, values in enumerate(lower):
        half.append((right[row] - sum([values[at] * half[at] for at in range(row)])) / values[row])
    found = [0.0] * len(lower)
    for row in reversed(range(len(lower))):
        rest = half[row] - sum([lower[at][row] * found[at] for at in range(row + 1, len(lower))])
        found[row] = rest / lower[row][row]
    return found
