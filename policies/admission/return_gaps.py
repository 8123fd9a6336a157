"""Returns of sessions: their share, when they come, and how long a session must be kept for nearly all of them."""

from __future__ import annotations

BUCKETS = 32
ENOUGH = 0.95
"""Share of the returns that come while the session is kept."""
LEAST_RETURNS = 8
"""Returns before which nothing is concluded."""
_LARGEST = 1e9
"""Weight of the newest return at which all weights are scaled down."""


class ReturnGaps:
    """Histogram of the gaps, in seconds, below the longest that counts; the latest count most. Single writer."""

    def __init__(self, longest_s: float, return_share: float = 1.0) -> None:
        self.longest_s = longest_s
        """Sessions are never kept longer."""
        self.return_share = return_share
        """Share of turns that another of the same session follows while it is kept, lately. Begins at 1: what is not
        known yet may return.
        """
        self.keep_s = longest_s
        """Time to keep a session: within it ``ENOUGH`` of the returns came, and up to two buckets more."""
        self._buckets = [0.0] * BUCKETS
        self._total = 0.0
        self._gaps_s = 0.0
        """Weighted sum of the gaps."""
        self._place = 0
        """The bucket up to which ``ENOUGH`` of the total lies."""
        self._up_to_place = 0.0
        """Sum of the buckets up to that one, itself included."""
        self._weight = 1.0
        self._returns = 0

    def add(self, gap_s: float, memory: int) -> None:
        """A session has returned after ``gap_s``; each return counts 1 / ``memory`` less than the next.

        O(1) amortised: the place moves by a bucket or two.
        """
        if not 0.0 <= gap_s < self.longest_s:
            return
        self._weight = weight = self._weight * (1.0 + 1.0 / memory)
        if weight > _LARGEST:
            self._scale_down()
            weight = self._weight
        buckets, place, bucket = self._buckets, self._place, int(gap_s / self.longest_s * BUCKETS)
        buckets[bucket] += weight
        self._total = total = self._total + weight
        self._gaps_s += weight * gap_s
        up_to = self._up_to_place
        if bucket <= place:
            self._up_to_place = up_to = up_to + weight
        self._returns += 1
        # Mostly the place stays.
        if self._returns > LEAST_RETURNS and up_to - buckets[place] < ENOUGH * total <= up_to:
            return
        if self._returns >= LEAST_RETURNS:
            self._look()

    @property
    def mean_s(self) -> float:
        """Mean gap of the returns; before the first, the longest that counts."""
        return self._gaps_s / self._total if self._total else self.longest_s

    def followed(self, memory: int) -> None:
        """A turn that another one has followed while its session was kept; weighted as in ``add``."""
        self.return_share += (1.0 - self.return_share) / memory

    def not_followed(self, memory: int) -> None:
        """A turn whose session was kept to the end."""
        self.return_share -= self.return_share / memory

    def _look(self) -> None:
        buckets, place, up_to, enough = self._buckets, self._place, self._up_to_place, ENOUGH * self._total
        while up_to < enough and place < BUCKETS - 1:
            place += 1
            up_to += buckets[place]
        while place and up_to - buckets[place] >= enough:
            up_to -= buckets[place]
            place -= 1
        self._place, self._up_to_place = place, up_to
        self.keep_s = self.longest_s * min(1.0, (place + 2) / BUCKETS)

    def _scale_down(self) -> None:
        self._buckets = [each / self._weight for each in self._buckets]
        self._gaps_s /= self._weight
        self._weight = 1.0
        self._total = sum(self._buckets)
        self._up_to_place = sum(self._buckets[: self._place + 1])
