"""The documentation site builds without warnings, has every page, and loads nothing from other hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.site.hooks import without_links_outside

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video)\b[^>]*\bsrc=["']?(?:https?:)?//[^>]*>"""
    r"""|<link\b(?=[^>]*\brel=["']?(?:stylesheet|preconnect|icon|preload))[^>]*\bhref=["']?(?:https?:)?//[^>]*>"""
    r"""|(?:@import\s+|url\()["']?(?:https?:)?//[^)]*"""
)
"""Parts of a page that a browser fetches from another host by itself."""


def build(target: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config), "--site-dir", str(target)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    target = tmp_path_factory.mktemp("site")
    done = build(target)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return target


def test_every_page_is_built_and_in_the_navigation(site: Path) -> None:
    index = (site / "index.html").read_text(encoding="utf-8")
    navigation = set(re.findall(r'<a href="?([^">]+?)"? class="?md-nav__link', index))
    for page in DOCS.rglob("*.md"):
        name = page.relative_to(DOCS).with_suffix(".html").as_posix()
        assert (site / name).is_file(), name
        assert name in navigation, name


def test_a_browser_loads_nothing_from_another_host(site: Path) -> None:
    files = [path for path in site.rglob("*") if path.suffix in {".html", ".css"}]
    assert len(files) > 40
    found = {path.name: LOADED.findall(path.read_text(encoding="utf-8")) for path in files}
    assert {name: loads for name, loads in found.items() if loads} == {}
    assert LOADED.search('<script src="https://cdn.example/x.js"></script>')
    assert LOADED.search("@font-face{src:url(//fonts.example/a.woff)}")
    assert LOADED.search('<link rel="stylesheet" href="https://fonts.example/css">')
    assert not LOADED.search('<a href="https://a.example/"></a><link rel="canonical" href="https://a.example/">')


def test_folders_of_results_are_left_out_and_files_that_pages_link_are_there(site: Path) -> None:
    assert (site / "results" / "admission.json").is_file()
    assert [path for path in (site / "results").iterdir() if path.is_dir()] == []
    assert sum(path.stat().st_size for path in site.rglob("*") if path.is_file()) < 20_000_000


def test_broken_links_fail_the_build(tmp_path: Path) -> None:
    config = tmp_path / "mkdocs.yml"
    config.write_text(f"INHERIT: {ROOT / 'mkdocs.yml'}\ndocs_dir: pages\nhooks: []\nnav: [index.md]\n", "utf-8")
    (tmp_path / "pages").mkdir()
    text = "# Page\n\n## One · two\n\n[gone](gone.md) [part](#no-such-heading) [fine](#one--two)\n"
    (tmp_path / "pages" / "index.md").write_text(text, encoding="utf-8")
    done = build(tmp_path / "built", config)
    output = done.stdout + done.stderr
    assert done.returncode != 0
    assert "'gone.md'" in output
    assert "'#no-such-heading'" in output
    assert "one--two" not in output


@pytest.mark.parametrize(
    ("link", "shown"),
    [
        ("[file](../configs/proxy.yaml)", "file (`configs/proxy.yaml`)"),
        ("[`configs/proxy.yaml`](../configs/proxy.yaml)", "`configs/proxy.yaml`"),
        ("[results](results/)", "results (`docs/results`)"),
        ("[page](proxy.md#health)", None),
        ("[here](#health)", None),
        ("[elsewhere](https://a.example/b)", None),
        ("[gone](../configs/gone.yaml)", None),
    ],
)
def test_links_that_leave_the_documentation_become_text(link: str, shown: str | None) -> None:
    assert without_links_outside(link, DOCS, DOCS) == (link if shown is None else shown)
