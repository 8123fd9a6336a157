"""Mean E2E and hit rate over the age of what replicas know of each other, from the kept results."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from bench.docs_figures.draw import svg
from bench.staleness.cells import StalenessReport
from bench.staleness.curves import Curve, curves, mean
from replayer.report.figures.style import COLOURS, style


def stale_views(report: StalenessReport) -> str:
    """One line for each policy: over its own figure behind one replica above, the hit rate below."""
    made = [curve for curve in curves(report) if len(curve.delays_s) > 1]
    delays = sorted({delay_s for curve in made for delay_s in curve.delays_s})
    places = {delay_s: place + 1 for place, delay_s in enumerate(delays)}
    policies = list(dict.fromkeys(curve.policy for curve in made))
    with style():
        figure = Figure(figsize=(7.2, 5.6))
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        for curve in made:
            drawn: dict[str, Any] = {"color": COLOURS[policies.index(curve.policy) % len(COLOURS)], "linewidth": 1.3}
            drawn["linestyle"] = "--" if curve.variant.parts else ":" if not curve.variant.events else "-"
            at = [0, *[places[delay_s] for delay_s in curve.delays_s]]
            middle, low, high = zip((1.0, 1.0, 1.0), *_factors(curve), strict=True)
            upper.plot(at, middle, label=f"{curve.policy}{curve.variant.words}", marker="o", markersize=3, **drawn)
            upper.fill_between(at, low, high, color=drawn["color"], alpha=0.12, linewidth=0)
            groups = [curve.alone, *[curve.at[delay_s] for delay_s in curve.delays_s]]
            hits = [100 * mean(each.hit_rate for each in group) for group in groups]
            lower.plot(at, hits, marker="o", markersize=3, **drawn)
        upper.set(ylabel="mean E2E over that\nbehind one replica", ylim=(0, None))
        upper.axhline(1.0, color="black", linewidth=0.6)
        upper.legend(fontsize=7.5, loc="upper left")
        ages = [f"{delay_s * 1e3:g} ms" if delay_s < 1 else f"{delay_s:g} s" for delay_s in delays]
        lower.set_xticks(range(len(ages) + 1), ["one replica", *ages])
        lower.set(ylabel="hit rate, %", ylim=(0, None))
        lower.set_xlabel(f"age of what {report.load.replicas} replicas know of each other")
        return svg(figure)


def _factors(curve: Curve) -> list[tuple[float, float, float]]:
    return [curve.factor(delay_s, "e2e_mean_s") for delay_s in curve.delays_s]
