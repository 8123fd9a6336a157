"""All figures by file name."""

from __future__ import annotations

from bench.docs_figures import data, draw
from bench.docs_figures.stale import stale_views
from bench.staleness.curves import read
from policies.routing.warm import Warm


def figures() -> dict[str, str]:
    """File name -> SVG text."""
    pools = data.FLEET.instances * (data.FLEET.pool_tokens or 0)
    return {
        "routing-scores.svg": draw.scores(data.score_parts(), data.decision(Warm()).decode_on),
        "request-classes.svg": draw.classes(data.prefill_times()),
        "working-set.svg": draw.working_set(data.loads(), pools),
        "stale-views.svg": stale_views(read()),
    }
