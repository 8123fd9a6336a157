"""Write the figures into docs/images: ``python -m bench.docs_figures``."""

from __future__ import annotations

from pathlib import Path

from bench.docs_figures.figures import figures

FOLDER = Path(__file__).parents[2] / "docs" / "images"


def main() -> None:
    """Draw all figures first, then write them."""
    drawn = figures()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in drawn.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(FOLDER / name)


if __name__ == "__main__":
    main()
