"""Drawing the figures as SVG: equal data gives equal bytes with one version of matplotlib."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from bench.docs_figures.data import EXAMPLE, PARTS, POOL_TOKENS, PROMPT_TOKENS, SimulatedLoad
from policies.classes import ClassThresholds
from replayer.report.figures.style import COLOURS, style

_LONG = re.compile(r"(?<=[\s\"(,])-?\d+\.\d{3,}")


def scores(parts: Mapping[str, Mapping[str, float]], chosen: str) -> str:
    """Terms of every instance's score as stacked bars, the lowest sum first named."""
    with style():
        figure = Figure(figsize=(7.2, 2.9))
        axes = figure.add_subplot()
        for position, view in enumerate(EXAMPLE):
            left = 0.0
            for number, part in enumerate(PARTS):
                value = parts[view.instance][part]
                name = part.removesuffix("_s") if position == 0 else None
                axes.barh(position, value, left=left, color=COLOURS[1 + number], height=0.6, label=name)
                left += value
            mark = "  chosen" if view.instance == chosen else ""
            axes.text(left, position, f" {left:.2f} s{mark}", va="center", fontsize=8)
        axes.set_yticks(range(len(EXAMPLE)), [_described(view.instance) for view in EXAMPLE])
        axes.invert_yaxis()
        axes.set_xlim(right=1.25 * max(sum(each.values()) for each in parts.values()))
        axes.set_xlabel(f"score of warm, seconds, for a prompt of {PROMPT_TOKENS:,} tokens; lowest wins")
        axes.legend(fontsize=8, loc="upper right")
        axes.grid(visible=False, axis="y")
        return svg(figure)


def _described(instance: str) -> str:
    view = next(each for each in EXAMPLE if each.instance == instance)
    full = ", pool nearly full" if view.kv_used_tokens > 0.8 * POOL_TOKENS else ""
    return f"{instance}: {view.cached_tokens // 1000}k cached,\n{view.requests} in flight{full}"


def classes(times: Sequence[tuple[int, float]]) -> str:
    """Time of a prefill over its new tokens, with the classes' ranges."""
    limits = ClassThresholds()
    edges = (0, limits.medium_tokens, limits.heavy_tokens, times[-1][0])
    with style():
        figure = Figure(figsize=(7.2, 2.6))
        axes = figure.add_subplot()
        for number, name in enumerate(("WARM", "MEDIUM", "HEAVY")):
            axes.axvspan(edges[number], edges[number + 1], color=COLOURS[(3, 5, 2)[number]], alpha=0.15, linewidth=0)
            axes.text(
                (edges[number] + edges[number + 1]) / 2, 1.02, name, fontsize=8, ha="center", transform=_top(axes)
            )
        axes.plot([tokens for tokens, _ in times], [seconds for _, seconds in times], color=COLOURS[0], linewidth=1.4)
        axes.set(
            xlim=(0, edges[-1]), ylim=(0, None), xlabel="new tokens: prompt less cached", ylabel="prefill, seconds"
        )
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        return svg(figure)


def _top(axes: Any) -> Any:
    return axes.get_xaxis_transform()


def working_set(loads: Sequence[SimulatedLoad], pool_tokens: int) -> str:
    """Contexts at the engines against the KV pools, and held requests, over the time of simulated runs."""
    with style():
        figure = Figure(figsize=(7.2, 4.2))
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        for number, load in enumerate(loads):
            drawn: dict[str, Any] = {"color": COLOURS[2 - number], "linewidth": 1.3}
            label = f"{load.rule}: mean E2E {load.mean_e2e_s:.0f} s, {load.hit_rate:.0%} of prompt tokens cached"
            upper.plot(load.at_s, [tokens / 1e6 for tokens in load.context_tokens], label=label, **drawn)
            lower.plot(load.at_s, load.held, **drawn)
        upper.axhline(pool_tokens / 1e6, color="black", linewidth=0.9, linestyle="--", label="KV pools")
        upper.set(ylabel="contexts in flight,\nmillion tokens", ylim=(0, None))
        lower.set(ylabel="held requests", xlabel="seconds", ylim=(0, None), xlim=(0, None))
        upper.legend(fontsize=8, loc="upper right")
        return svg(figure)


def svg(figure: Figure) -> str:
    """The figure without dates, its coordinates to two decimals of a point, on white for dark pages."""
    figure.patch.set_facecolor("white")
    with style():
        canvas: Any = FigureCanvasSVG(figure)
        buffer = io.StringIO()
        canvas.print_svg(buffer, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = re.sub(r"<metadata>.*?</metadata>\n?", "", buffer.getvalue(), flags=re.DOTALL)
    text = _LONG.sub(lambda number: f"{float(number.group()):.2f}", text)
    return re.sub(r"[ \t]+\n", "\n", text)
