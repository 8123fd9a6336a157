"""Hooks of mkdocs.yml: navigation of the folders of pages, and links that leave the documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SECTIONS = {"Decisions": "decisions", "Reference": "reference"}
"""Section of the navigation -> folder, all of whose pages it lists."""
REST = "More"
"""Section of pages that the navigation does not name."""

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^( *```.*?^ *```)", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    """Add to the navigation the sections of folders, then every page that is still missing."""
    docs = Path(config.docs_dir)
    nav = list(config.nav)
    named = set(_pages(nav))
    for title, folder in SECTIONS.items():
        pages = sorted(path.relative_to(docs).as_posix() for path in (docs / folder).glob("*.md"))
        nav.append({title: [page for page in pages if page not in named]})
        named.update(pages)
    rest = sorted({path.relative_to(docs).as_posix() for path in docs.rglob("*.md")} - named)
    if rest:
        nav.append({REST: rest})
    config.nav = nav
    return config


def _pages(entries: Any) -> Iterator[str]:
    """Paths that a part of the navigation names."""
    if isinstance(entries, str):
        yield entries
    elif isinstance(entries, dict):
        for value in entries.values():
            yield from _pages(value)
    else:
        for entry in entries:
            yield from _pages(entry)


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Show links to files outside the documentation, and to folders, as text: the site does not have them."""
    docs = Path(config.docs_dir)
    parts = _FENCE.split(markdown)
    folder = (docs / page.file.src_uri).parent
    return "".join(
        part if number % 2 else without_links_outside(part, folder, docs) for number, part in enumerate(parts)
    )


def without_links_outside(text: str, folder: Path, docs: Path) -> str:
    """Markdown whose links from a page in ``folder`` to existing files outside ``docs`` are replaced by their text.

    A link to a file that does not exist stays, so that the build reports it.
    """

    def replaced(found: re.Match[str]) -> str:
        label, target = found[1], found[2].partition("#")[0]
        if not target or re.match(r"[a-z]+:", target):
            return found[0]
        file = (folder / target).resolve()
        outside = not file.is_relative_to(docs.resolve())
        if file.is_dir() or (outside and file.exists()):
            path = file.relative_to(docs.resolve().parent).as_posix()
            return label if path in label else f"{label} (`{path}`)"
        return found[0]

    return _LINK.sub(replaced, text)
