"""The benchmark of shadow decisions measures everything that is built in."""

from __future__ import annotations

from bench.shadow import rows
from policies.registry import BUILT_IN


def test_every_built_in_part_is_measured() -> None:
    measured = rows(3, 10)
    names = {name for part, name, _ in measured if part not in {"whole", "live"}}
    assert names >= {name for group in BUILT_IN.values() for name in group}
    assert len(measured) == len(names) + 3
    assert all(cost > 0 for _, _, cost in measured)
