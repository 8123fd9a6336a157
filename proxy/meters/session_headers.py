"""Detection of session ids that get lost on the way: clients sent them before, and their conversations go on without.

Requests without an id are normal, so their number proves nothing. Proof is a request without an id whose prompt
continues the whole prompt of one that had an id.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

_CAPACITY = 20_000
_CONTINUED_SHARE = 0.25
"""Share of the requests without an id that must continue a conversation that had one."""


class SessionHeaders:
    """Requests since the last one that named its session. O(1) per request, bounded."""

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._ends: OrderedDict[int, None] = OrderedDict()
        self.unnamed = 0
        """Consecutive requests without an id, the last ones."""
        self.continued = 0
        """Those of them that continue a prompt that had one."""

    def add(self, named: bool, hashes: Sequence[int], held: int) -> None:
        """Count one request: the blocks of its prompt, the first ``held`` of which an earlier prompt had."""
        if not named:
            self.unnamed += 1
            self.continued += 0 < held < len(hashes) and hashes[held - 1] in self._ends
        else:
            self.unnamed = self.continued = 0
        if hashes and (named or (held and hashes[held - 1] in self._ends)):
            self._ends[hashes[-1]] = None
            self._ends.move_to_end(hashes[-1])
            if len(self._ends) > self._capacity:
                self._ends.popitem(last=False)

    def lost(self, least: int) -> bool:
        """True if at least ``least`` requests in a row lack the id, and enough of them had one before."""
        return self.unnamed >= least and self.continued >= _CONTINUED_SHARE * self.unnamed
