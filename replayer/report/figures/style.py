"""Common parts of a report's figures: style, colours that print, output inline or as files."""

from __future__ import annotations

import html
import io
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "warmroute",
    # Labels come from files: a `$` in one must not be taken for mathematics.
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.axisbelow": True,
    "hatch.linewidth": 0.6,
    "figure.constrained_layout.use": True,
}
# Okabe & Ito's palette (safe for colour-blind readers), with line styles and hatches as a second sign in print.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
_LINES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (7, 2)))
# Straight lines only: a hatch of dots or circles is 200 kB of SVG.
_HATCHES = ("", "////", "||||", "\\\\\\\\", "xxxx", "----", "++++", "//")
_FILLS = ("#4d4d4d", "#e6e6e6", "#b3b3b3", "#ffffff", "#cccccc", "#f2f2f2", "#999999", "#d9d9d9")
MARKERS = ("o", "s", "^", "D", "v", "x", "+", "*")
SMALL = (4.6, 2.7)
"""Inches of a figure of which two stand side by side in print."""
WIDE = 9.6
"""Inches of a figure as wide as the page."""
_PNG_DPI = 160


@dataclass(frozen=True, eq=False)
class Drawing:
    """A finished figure."""

    name: str
    """File name without suffix."""
    description: str
    """For those who cannot see it."""
    figure: Figure
    caption: str = ""

    def inline(self) -> str:
        """As an ``<svg>`` element: no prolog, no metadata, ids made unique, no reference to anything outside."""
        text = self._svg
        text = text[text.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        head, rest = text.split(">", 1)
        head = _NAMESPACES.sub("", head)
        # Ids are unique within one figure only; several share a page.
        prefix = f"f{zlib.crc32(f'{self.name} {text}'.encode()):08x}-"
        rest = _IDENTIFIER.sub(lambda match: f"{match.group(1)}{prefix}{match.group(2)}", rest)
        label = html.escape(printable(self.description), quote=True)
        return f'{head} role="img" aria-label="{label}"><title>{label}</title>{_TAG.sub(_shorten, rest)}'

    def save(self, directory: str | Path, name: str = "") -> list[Path]:
        """Write ``NAME.png`` and ``NAME.svg``; returns their paths."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        vector, raster = directory / f"{name or self.name}.svg", directory / f"{name or self.name}.png"
        vector.write_text(self._svg, encoding="utf-8")
        with matplotlib.rc_context(_STYLE):
            canvas: Any = FigureCanvasAgg(self.figure)
            self.figure.set_dpi(_PNG_DPI)
            canvas.print_png(raster)
        return [raster, vector]

    @cached_property
    def _svg(self) -> str:
        buffer = io.StringIO()
        metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
        with matplotlib.rc_context(_STYLE):
            canvas: Any = FigureCanvasSVG(self.figure)
            canvas.print_svg(buffer, metadata=metadata)
            # Where everything lies is known now; finding it is most of the time of drawing.
            self.figure.set_layout_engine("none")
        return buffer.getvalue()


_IDENTIFIER = re.compile(r'(\bid="|url\(#|href="#)([^")]+)')
_NAMESPACES = re.compile(r' xmlns(:\w+)?="[^"]*"')
_TAG = re.compile(r"<[^>]+>")
_LONG = re.compile(r"-?\d+\.\d{3,}")


def _shorten(tag: re.Match[str]) -> str:
    """A tag with its coordinates to two decimals of a point, 1/7,200 inch: half the size. Text is not touched."""
    return _LONG.sub(lambda number: f"{float(number.group()):.2f}", tag.group())


def style() -> Any:
    """The context in which figures are made."""
    return matplotlib.rc_context(_STYLE)


def logarithmic(axes: Any, which: str) -> None:
    """A logarithmic axis labelled 0.1, 0.2, 0.5, 1: matplotlib's own labels are mathematics, which is switched off."""
    axes.set(**{f"{which}scale": "log"})
    axis = getattr(axes, f"{which}axis")
    low, high = axis.get_view_interval()
    subs = (1.0, 2.0, 5.0) if high < 1000 * max(low, 1e-12) else (1.0,)
    axis.set_major_locator(LogLocator(subs=subs, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def line(position: int) -> dict[str, Any]:
    """Colour and line style of an arm."""
    return {
        "color": COLOURS[position % len(COLOURS)],
        "linestyle": _LINES[position % len(_LINES)],
        "linewidth": 1.4,
    }


def bar(position: int) -> dict[str, Any]:
    """Fill and hatch of an arm, or of a part: distinguishable without colour."""
    return {
        "facecolor": _FILLS[position % len(_FILLS)],
        "hatch": _HATCHES[position % len(_HATCHES)],
        "edgecolor": "black",
        "linewidth": 0.6,
    }


def printable(text: str) -> str:
    """Text that matplotlib and XML both take: control characters out; a leading underscore would hide a label."""
    clean = "".join(character if character.isprintable() else "�" for character in text)
    return f" {clean}" if clean.startswith("_") else clean


def slug(*words: str) -> str:
    """A file name of words that may hold anything; different words may give the same one."""
    return "-".join(part for word in words if (part := re.sub(r"[^\w.]+", "_", word).strip("._"))) or "figure"


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key that puts inst-2 before inst-10."""
    return tuple(
        (0, int(part), "") if part.isascii() and part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)
    )


def short_name(instance: str) -> str:
    """The number at the end of an instance's name, or the name."""
    found = re.search(r"(\d+)$", instance)
    return found.group(1) if found else instance


def save_all(drawings: Iterable[Drawing], directory: str | Path) -> list[Path]:
    """Write every figure as PNG and SVG; equal names get a number. Returns the paths.

    Raises:
        OSError: the directory cannot be written.
    """
    seen: dict[str, int] = {}
    paths = []
    for drawing in drawings:
        seen[drawing.name] = count = seen.get(drawing.name, 0) + 1
        paths += drawing.save(directory, drawing.name if count == 1 else f"{drawing.name}-{count}")
    return paths
