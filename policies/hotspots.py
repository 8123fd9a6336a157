"""Arrival shares and streaks of prefix classes, for LMetric's hotspot detector (arXiv 2603.15202)."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from policies.types import HotspotView


class HotspotTracker:
    """Counts of the prefix classes of the last ``window`` requests; a class is its first ``class_blocks`` blocks.

    The *streak* of a class counts consecutive requests of that class that went to a holder while the class was alarmed;
    any other outcome ends it. Memory is bounded by the window.
    """

    def __init__(self, class_blocks: int = 4, window: int = 1000) -> None:
        if class_blocks < 1 or window < 1:
            raise ValueError(f"class_blocks and window must be at least 1, got {class_blocks} and {window}")
        self.class_blocks = class_blocks
        self._window = window
        self._recent: deque[int] = deque()
        self._counts: Counter[int] = Counter()
        self._streaks: dict[int, int] = {}

    def class_of(self, hashes: Sequence[int]) -> int | None:
        """Key of a prompt's class; None if the prompt has no full block."""
        return hashes[min(self.class_blocks, len(hashes)) - 1] if hashes else None

    def view(self, hashes: Sequence[int]) -> HotspotView:
        """Class figures for an arriving request, itself included."""
        key = self.class_of(hashes)
        if key is None:
            return HotspotView()
        seen = len(self._recent)
        return HotspotView((self._counts.get(key, 0) + 1) / (seen + 1), self._streaks.get(key, 0), seen + 1)

    def record(self, hashes: Sequence[int], to_holder: bool, alarmed: bool) -> None:
        """Count a routed request and extend or end the streak of its class."""
        key = self.class_of(hashes)
        if key is None:
            return
        self._recent.append(key)
        self._counts[key] = self._counts.get(key, 0) + 1
        if alarmed and to_holder:
            self._streaks[key] = self._streaks.get(key, 0) + 1
        else:
            self._streaks.pop(key, None)
        while len(self._recent) > self._window:
            old = self._recent.popleft()
            self._counts[old] -= 1
            if not self._counts[old]:
                del self._counts[old]
                self._streaks.pop(old, None)


def is_hotspot(share: float, holders: int, others: int) -> bool:
    """The paper's condition: x / (1 - x) > |M| / |others|, x the share of the class and M its holders."""
    if not holders or not others:
        return False
    return share * others > holders * (1.0 - share)
