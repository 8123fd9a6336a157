"""Seeded resamples of whole sessions, and the quantiles and sums of requests in each of them.

Requests of one session share their history and their instance, so they are not independent; whole sessions are drawn
with replacement instead (cluster bootstrap: Davison & Hinkley, "Bootstrap Methods and their Application", 1997, ch. 3).
Every run of every arm is evaluated on the *same* drawn sessions, which makes a comparison paired.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

_CHUNK_CELLS = 2_000_000
"""Requests x resamples held at once: a few arrays of this size stay in the processor's cache hierarchy and memory."""


class SessionBootstrap:
    """Seeded resamples of sessions, shared by every metric, run and arm of a comparison.

    Args:
        session_of: shape (N,), session number 0..sessions-1 of each request.
        sessions: number of distinct sessions.
        resamples: number of resamples B.
        seed: seed of the draws; the same seed gives the same resamples.
    """

    def __init__(self, session_of: IntArray, sessions: int, *, resamples: int = 2000, seed: int = 0) -> None:
        if sessions < 1 or resamples < 1:
            raise ValueError("a bootstrap needs at least one session and one resample")
        self.session_of = session_of
        self.sessions = sessions
        self.resamples = resamples
        generator = np.random.default_rng(seed)
        self.counts: NDArray[np.float32] = np.empty((sessions, resamples), dtype=np.float32).T
        """Shape (B, sessions): how often each session was drawn. Small whole numbers, exact in single precision."""
        step = max(1, _CHUNK_CELLS // sessions)
        for start in range(0, resamples, step):
            rows = min(step, resamples - start)
            drawn = generator.integers(sessions, size=(rows, sessions)) + np.arange(rows)[:, None] * sessions
            flat = np.bincount(drawn.ravel(), minlength=rows * sessions)
            self.counts[start : start + rows] = flat.reshape(rows, sessions)

    def quantiles(self, values: FloatArray, keep: BoolArray, quantiles: FloatArray) -> FloatArray:
        """Quantiles of the kept values in every resample, equal to ``numpy.quantile`` (linear) of the drawn requests.

        Args:
            values: shape (N,).
            keep: shape (N,), which requests count.
            quantiles: shape (Q,), each 0..1.

        Returns:
            Shape (B, Q); NaN where a resample drew no kept request.
        """
        result = np.full((self.resamples, len(quantiles)), np.nan)
        if keep.any():
            ordered = _Ordered(values[keep], self.session_of[keep], self.sessions)
            step = max(1, _CHUNK_CELLS // max(ordered.blocks, ordered.width))
            for start in range(0, self.resamples, step):
                result[start : start + step] = ordered.quantiles(self.counts[start : start + step], quantiles)
        return result

    def sums(self, values: FloatArray, keep: BoolArray) -> FloatArray:
        """Sum of the kept values in every resample: shape (B,)."""
        per_session = np.bincount(self.session_of[keep], weights=values[keep], minlength=self.sessions)
        # Not a product of matrices: that would first copy all counts in double precision.
        return np.asarray(np.einsum("s,sb->b", per_session, self.counts.T), dtype=np.float64)

    def sessions_in(self, keep: BoolArray) -> int:
        """Number of sessions that the kept requests, shape (N,), come from."""
        return int(np.count_nonzero(np.bincount(self.session_of[keep], minlength=self.sessions)))

    def effective_sessions(self, keep: BoolArray) -> float:
        """Sessions that would carry as much information if all were equally long: (sum n)^2 / sum n^2, 0 for none.

        A few long sessions among many short ones are nearly the whole of a quantile; their sampling error is that of a
        small sample (Carter, Schnepel & Steigerwald, "Asymptotic behavior of a t-test robust to cluster
        heterogeneity", 2017).
        """
        sizes = np.bincount(self.session_of[keep], minlength=self.sessions).astype(np.float64)
        squares = float(np.sum(sizes**2))
        return float(np.sum(sizes)) ** 2 / squares if squares else 0.0


class _Ordered:
    """Values in order, cut into blocks of about the square root of their number.

    How many drawn requests lie in each block is one product with a sparse matrix of requests per block and session;
    only the block that holds a quantile is looked at request by request. That takes a tenth of the time of cumulative
    sums over all requests. (A dense product would start BLAS threads, which cost more than they bring here.)
    """

    def __init__(self, values: FloatArray, session_of: IntArray, sessions: int) -> None:
        order = np.argsort(values, kind="stable")
        size = len(values)
        self.width = max(1, int(np.sqrt(size)))
        self.blocks = -(-size // self.width)
        self._values = values[order]
        # Filled up with a request of no session (number -1) that is never drawn.
        padded = np.full(self.blocks * self.width, -1, dtype=np.int64)
        padded[:size] = session_of[order]
        self._sessions = padded.reshape(self.blocks, self.width)
        place = (np.arange(size) // self.width, session_of[order])
        self._held = csr_array((np.ones(size, dtype=np.float32), place), shape=(self.blocks, sessions))
        """Requests of each session in each block."""

    def quantiles(self, counts: NDArray[np.float32], quantiles: FloatArray) -> FloatArray:
        """Shape (rows, sessions) of multiplicities and (Q,) in, shape (rows, Q) out; NaN in rows without a request."""
        through = np.cumsum(self._held @ counts.T, axis=0, dtype=np.float64)
        totals = through[-1]
        last = np.maximum(totals - 1, 0)
        position = last * quantiles[:, None]
        lower = np.floor(position)
        at_lower, at_upper = self._at(lower, np.minimum(lower + 1, last), counts, through)
        mixed = at_lower + (position - lower) * (at_upper - at_lower)
        return np.where(totals > 0, mixed, np.nan).T

    def _at(
        self, lower: FloatArray, upper: FloatArray, counts: NDArray[np.float32], through: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """The drawn values of ranks (0 is the smallest) and of the same or next ranks, in each row: shape (Q, rows)."""
        rows = np.broadcast_to(np.arange(lower.shape[-1]), lower.shape)
        block = np.zeros(lower.shape, dtype=np.int64)
        for so_far in through[:-1]:
            block += so_far <= lower
        inside = self._inside(block, rows, counts)
        before = np.where(block > 0, through[block - 1, rows], 0.0)
        at_lower = self._value(block, inside, lower - before)
        at_upper = self._value(block, inside, upper - before)
        # Few of the next ranks lie in a later block.
        later = np.nonzero(upper >= through[block, rows])
        if len(later[0]):
            wanted, row = upper[later], rows[later]
            block = (through[:-1, row] <= wanted).sum(axis=0)
            before = np.where(block > 0, through[block - 1, row], 0.0)
            at_upper[later] = self._value(block, self._inside(block, row, counts), wanted - before)
        return at_lower, at_upper

    def _inside(self, block: IntArray, rows: IntArray, counts: NDArray[np.float32]) -> NDArray[np.float32]:
        """Drawn requests of a block up to each of its requests, in some rows: one axis more."""
        sessions = self._sessions[block]
        drawn: NDArray[np.float32] = np.where(sessions >= 0, counts[rows[..., None], sessions], np.float32(0))
        return drawn.cumsum(axis=-1)

    def _value(self, block: IntArray, inside: NDArray[np.float32], rank: FloatArray) -> FloatArray:
        index = (inside <= rank[..., None]).sum(axis=-1)
        found = self._values[np.minimum(block * self.width + index, len(self._values) - 1)]
        return np.asarray(found, dtype=np.float64)
