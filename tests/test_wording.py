"""Checks of the house style that a program can make: how docstrings begin, banned words, links between pages."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDERS = ("policies", "proxy", "launch", "replayer", "sim", "bench", "tests")
SOURCES = [ROOT / "warmroute.py", *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
YAML_FILES = sorted((ROOT / "configs").rglob("*.yaml"))
OTHER_TEXTS = [ROOT / "Makefile", *sorted((ROOT / "replayer").rglob("*.j2"))]
HISTORY = {ROOT / "CHANGELOG.md"}
"""Not checked for words: what was released under the words of its day."""

QUESTION = re.compile(r"(What|Whether|How|Where|Why)\b")
ONLY_SEE = re.compile(r"See\b[^\n]*(\n(?!\n)[^\n]*)*\Z")
"""One paragraph that begins with "See"."""

BANNED = {
    "mend": "fix, remedy",
    "mends": "fixes, remedies",
    "mended": "fixed",
    "mending": "fixing",
    "seen off": "drained in the background",
    "anew": "again",
    "for ever": "forever",
    "by whomever": "by any client",
    "in force": "effective",
    "tell": "report, say, distinguish",
    "tells": "reports, says, distinguishes",
    "told": "reported, sent, distinguished",
    "under way": "in progress, in flight",
    "goes on with": "continues, resumes",
    "on paper": "analytically",
    "machine at hand": "this machine",
    "likeness": "compatibility",
    "unlike engines": "incompatible engines",
    "speaks against": "reason",
    "neighbours' formulas": "baselines, other routers' policies",
    "runs of the same thing": "replicates, A/A runs",
    "all the same": "anyway",
}
ALLOWED: dict[str, frozenset[str]] = {
    "tests/test_wording.py": frozenset(BANNED),
}
"""File -> banned words it may have. Keep this short, with the reason beside each entry: this file lists the words."""

_WORDS = re.compile(
    "|".join(rf"\b{re.escape(words)}\b".replace(r"\ ", r"\s+") for words in sorted(BANNED, key=len, reverse=True)),
    re.IGNORECASE,
)
_WORDS_OF_NAME = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_CODE_SPAN = re.compile(r"(`+)(?!`).+?\1", re.DOTALL)
_STRING_OR_COMMENT = re.compile(
    r'''"""(?:\\.|[^\\])*?"""|\'\'\'(?:\\.|[^\\])*?\'\'\'|"(?:\\.|[^\\"])*"|\'(?:\\.|[^\\\'])*\'|#[^\n]*''', re.DOTALL
)
"""Python's own tokenizer needs ten times as long."""
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*$", re.MULTILINE)
_FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


class Prose(NamedTuple):
    """A piece of text for readers."""

    line: int
    """Line of the file at which it begins."""
    text: str


class Finding(NamedTuple):
    """A place that breaks a rule."""

    line: int
    text: str


class Texts(NamedTuple):
    """Texts of a source that several checks read."""

    docstrings: tuple[Prose, ...]
    """Of modules, classes and functions, and those of attributes (a string after an assignment)."""
    strings: tuple[Prose, ...]
    """String literals that have a space: docstrings, messages, help texts; no keys, no names."""
    names: tuple[Prose, ...]
    """Names that it defines, their words separated by spaces: classes, functions, arguments, variables."""


def words_of(name: str) -> str:
    """A name in camel or snake case as words."""
    return " ".join(_WORDS_OF_NAME.findall(name))


@functools.cache
def texts(source: str) -> Texts:
    """The texts of a source, whose tree is not kept: those of all files are a million objects."""
    docstrings: list[Prose] = []
    strings: list[Prose] = []
    names: list[Prose] = []
    nodes: list[ast.AST] = [ast.parse(source)]
    # A million nodes, in the order of `ast.walk`, which with `match` takes three times as long. Constants and names
    # have no children to read.
    for node in nodes:
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str) and " " in node.value:
                strings.append(Prose(node.lineno, node.value))
            continue
        if isinstance(node, ast.Name | ast.Attribute):
            if isinstance(node.ctx, ast.Store):
                name = node.id if isinstance(node, ast.Name) else node.attr
                names.append(Prose(node.lineno, words_of(name)))
            if isinstance(node, ast.Attribute):
                nodes.append(node.value)
            continue
        if isinstance(node, ast.arg):
            names.append(Prose(node.lineno, words_of(node.arg)))
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.append(Prose(node.lineno, words_of(node.name)))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.append(Prose(node.lineno, node.value.value.strip()))
        for field in node._fields:
            held = getattr(node, field)
            if isinstance(held, ast.AST):
                nodes.append(held)
            elif isinstance(held, list):
                nodes += [each for each in held if isinstance(each, ast.AST)]
    return Texts(tuple(docstrings), tuple(strings), tuple(names))


@functools.cache
def comments(source: str) -> tuple[Prose, ...]:
    """Blocks of comments on consecutive lines."""
    return tuple(_comments(source))


def _comments(source: str) -> Iterator[Prose]:
    line, block = 0, ""
    number, counted = 1, 0
    for token in _STRING_OR_COMMENT.finditer(source):
        if token[0].startswith("#"):
            text = token[0].lstrip("# ")
            number, counted = number + source.count("\n", counted, token.start()), token.start()
            if block and number == line + block.count("\n") + 1:
                block += "\n" + text
            else:
                if block:
                    yield Prose(line, block)
                line, block = number, text
    if block:
        yield Prose(line, block)


def yaml_comments(source: str) -> Iterator[Prose]:
    """Comments: a ``#`` at the start of a line or after a space, and the rest of the line."""
    for number, line in enumerate(source.splitlines(), 1):
        if found := re.search(r"(?:^|\s)#(.*)", line):
            yield Prose(number, found[1])


def begins_badly(text: str) -> bool:
    """A docstring that begins like a question, or only points elsewhere."""
    return bool(QUESTION.match(text) or ONLY_SEE.match(text))


def banned(prose: Prose) -> Iterator[Finding]:
    """Banned words of a text, code spans left out."""
    text = _CODE_SPAN.sub(lambda span: "\n" * span[0].count("\n"), prose.text)
    for found in _WORDS.finditer(text):
        yield Finding(prose.line + text.count("\n", 0, found.start()), " ".join(found[0].lower().split()))


def banned_in(path: Path) -> list[Finding]:
    """Banned words of a file, those on its allow-list left out."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        read = texts(text)
        found = {finding for prose in (*read.strings, *comments(text), *read.names) for finding in banned(prose)}
    elif path.suffix == ".yaml":
        found = {finding for prose in yaml_comments(text) for finding in banned(prose)}
    else:
        found = set(banned(Prose(1, text)))
    allowed = ALLOWED.get(path.relative_to(ROOT).as_posix(), frozenset())
    return sorted(finding for finding in found if finding.text not in allowed)


def bad_docstrings_in(path: Path) -> list[Finding]:
    """Docstrings of a file that begin badly."""
    found = texts(path.read_text(encoding="utf-8")).docstrings
    return [Finding(line, text.splitlines()[0]) for line, text in found if begins_badly(text)]


def anchors(page: str) -> set[str]:
    """Anchors that a git host gives the headings of a page."""
    found: Counter[str] = Counter()
    names = set()
    for heading in _HEADING.findall(_FENCE.sub("", page)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        names.add(f"{name}-{found[name]}" if found[name] else name)
        found[name] += 1
    return names


def broken_links_in(path: Path) -> list[Finding]:
    """Links to files that are not there, and to headings that their page does not have."""
    page = _FENCE.sub(lambda block: "\n" * block[0].count("\n"), path.read_text(encoding="utf-8"))
    broken = []
    for found in _LINK.finditer(page):
        target, _, anchor = found[1].partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = (path.parent / target).resolve() if target else path
        known = not anchor or file.suffix != ".md" or (file.exists() and anchor in anchors(file.read_text("utf-8")))
        if not file.exists() or not known:
            broken.append(Finding(page.count("\n", 0, found.start()) + 1, found[1]))
    return broken


def report(files: list[Path], check: Callable[[Path], list[Finding]], remedy: str) -> str:
    """Counts per file, most first, with every place; empty when there is nothing to report."""
    found = {path: findings for path in files if (findings := check(path))}
    total = sum(map(len, found.values()))
    lines = [f"{total} in {len(found)} files: {remedy}"] if found else []
    for path in sorted(found, key=lambda path: (-len(found[path]), path)):
        lines.append(f"{len(found[path]):5}  {path.relative_to(ROOT)}")
        lines += [f"         line {line}: {text}" for line, text in found[path]]
    return "\n".join(lines)


def fail_with(text: str) -> None:
    """Fail with the report alone: pytest would cut it in the middle of an assertion."""
    if text:
        raise AssertionError(text)


def test_docstrings_begin_with_a_noun_phrase_or_an_imperative() -> None:
    fail_with(report(SOURCES, bad_docstrings_in, "begin with a noun phrase or an imperative, and say something"))


def test_no_banned_word() -> None:
    files = [path for path in (*PAGES, *SOURCES, *YAML_FILES, *OTHER_TEXTS) if path not in HISTORY]
    instead = "; ".join(f"{words} -> {better}" for words, better in BANNED.items())
    fail_with(report(files, banned_in, instead))


def test_links_between_pages_resolve() -> None:
    fail_with(report(PAGES, broken_links_in, "the file or its heading is not there"))


def test_the_allow_list_has_no_entry_that_is_not_needed() -> None:
    for name, words in ALLOWED.items():
        text = (ROOT / name).read_text(encoding="utf-8").lower()
        assert [word for word in words if word not in text] == [], name


def test_the_checks_read_all_there_is() -> None:
    for folder in FOLDERS:
        assert [path for path in SOURCES if path.is_relative_to(ROOT / folder)], folder
    assert {"README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/reference/settings.md"} <= {
        path.relative_to(ROOT).as_posix() for path in PAGES
    }
    assert len(YAML_FILES) > 20
    assert len(OTHER_TEXTS) > 3
    sources = [path.read_text(encoding="utf-8") for path in SOURCES]
    assert sum(len(texts(source).docstrings) for source in sources) > 3000
    assert sum(len(comments(source)) for source in sources) > 300
    assert sum(len(_LINK.findall(path.read_text(encoding="utf-8"))) for path in PAGES) > 100


def test_the_checks_find_what_they_look_for(tmp_path: Path) -> None:
    source = '''"""What it is."""
class Thing:
    """Holds a thing."""

    size: int
    """Whether it is
    large."""

    def run(self) -> None:
        """See ``Base.run``."""
        raise ValueError(f"{self} told us `mend` is in
 force")

    def stop(self) -> None:  # never stops for
        # ever
        """See ``run``.

        Raises:
            OSError: never.
        """
        return "anew"
'''.replace("in\n force", "in force")
    found = [text for _, text in texts(source).docstrings]
    assert [begins_badly(text) for text in found if text.startswith(("What", "Whether", "See", "Holds"))].count(
        True
    ) == 3
    words = {finding for prose in (*texts(source).strings, *comments(source)) for finding in banned(prose)}
    assert words == {Finding(11, "told"), Finding(11, "in force"), Finding(13, "for ever")}

    source = "class Told:\n    size: int\n\n    def tellItAnew(self, amended, *, MEND_S): self.goes = under_way = 1\n"
    assert [finding for prose in texts(source).names for finding in banned(prose)] == [
        Finding(1, "told"),
        Finding(4, "tell"),
        Finding(4, "anew"),
        Finding(4, "mend"),
        Finding(4, "under way"),
    ]

    assert [text for _, text in banned(Prose(1, "recommend, amended, `mend`, retold; Mend it,\nall the\nsame"))] == [
        "mend",
        "all the same",
    ]
    assert [one.line for one in yaml_comments("a: 1  # told\nb: '#3'\n# c\n")] == [1, 3]

    page = tmp_path / "page.md"
    page.write_text(
        "# A page: of `code`\n[a](#a-page-of-code) [b](#b) [c](gone.md) [d](page.md#b) [e](https://f.g/#h)\n"
    )
    assert [text for _, text in broken_links_in(page)] == ["#b", "gone.md", "page.md#b"]
