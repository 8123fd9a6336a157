"""Command lines of ``warmroute`` in documents, the Makefile, shell scripts and comments of configuration files."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.command_line.commands import option_names

ROOT = Path(__file__).parents[2]
FILES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "Makefile",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "bench").rglob("*.sh")),
    *sorted((ROOT / "configs").rglob("*.yaml")),
]

_FENCE = re.compile(r"^ *```([^\n]*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(`+)(?!`)(.+?)\1", re.DOTALL)
_PROGRAM = re.compile(r"(?:^|(?<=[\s;|&(]))(?:\$\s+)?(?:[\w./$()-]*/)?warmroute(?= |$)")
_PLACEHOLDER = re.compile(r"[A-Z_.]+|…|\.\.\.")
_NUMBER = re.compile(r"-[\d.]+")


class CommandLine(NamedTuple):
    """One command line of a file."""

    file: str
    words: tuple[str, ...]
    """After the program's name."""


def command_lines(path: Path) -> Iterator[CommandLine]:
    """Command lines of a file: in Markdown those in code, elsewhere those on lines of their own."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    name = path.relative_to(ROOT).as_posix()
    if path.suffix != ".md":
        for line in text.splitlines():
            yield from _of_line(line.lstrip("# \t") if path.suffix == ".yaml" else line, name)
            for span in _SPAN.finditer(line):
                yield from _of_line(span[2], name)
        return
    for block in _FENCE.finditer(text):
        for line in block[2].splitlines():
            if block[1] != "console" or line.lstrip().startswith("$"):  # the other lines are output
                yield from _of_line(line, name)
    outside = _FENCE.sub("", text)
    for line in re.findall(r"^ {4}.*", outside, re.MULTILINE):
        yield from _of_line(line, name)
    for span in _SPAN.finditer(outside):
        yield from _of_line(" ".join(span[2].split()), name)


def _of_line(line: str, file: str) -> Iterator[CommandLine]:
    for found in _PROGRAM.finditer(line):
        before = line[: found.start()].strip()
        if before and before[-1] not in "$;|&(":
            continue  # a word of a sentence or of a diagram
        words = _words(line[found.end() :])
        if words:
            yield CommandLine(file, words)


def _words(text: str) -> tuple[str, ...]:
    """The words up to the end of the command: a comment, a pipe, a redirection."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|;&<>()")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    words: list[str] = []
    try:
        for word in lexer:
            if set(word) <= set("|;&<>()"):
                break
            words.append(word)
    except ValueError:
        return tuple(text.split())  # an apostrophe: a sentence
    return tuple(words)


def problem(line: CommandLine, root: Any) -> str | None:
    """Reason for which a command line would be refused: an unknown command or option, too many arguments. None: it is
    accepted.
    """
    command, words = root, list(line.words)
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        word = words.pop(0)
        if _PLACEHOLDER.fullmatch(word):
            return None
        if word not in command.commands:
            return f"{line.file}: `warmroute {' '.join(line.words)}`: no command {word!r}"
        command = command.commands[word]
    known = option_names(command) | {"--help"}
    for word in words:
        if word == "--":
            break
        name = word.partition("=")[0]
        if name.startswith("-") and name != "-" and not _NUMBER.fullmatch(name) and name not in known:
            return f"{line.file}: `warmroute {' '.join(line.words)}`: no option {name}"
    given = _arguments(command, words)
    if len(given) > _most_arguments(command):
        return f"{line.file}: `warmroute {' '.join(line.words)}`: no argument {given[-1]!r}"
    return None


def _arguments(command: Any, words: list[str]) -> list[str]:
    """The words that are neither options nor their values."""
    valued = {name for param in command.params if not getattr(param, "is_flag", False) for name in param.opts}
    arguments: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in valued:
            next(rest, None)
        elif word != "…" and (not word.startswith("-") or word == "-" or _NUMBER.fullmatch(word)):
            arguments.append(word)
    return arguments


def _most_arguments(command: Any) -> float:
    counts = [param.nargs for param in command.params if param.param_type_name == "argument"]
    return math.inf if -1 in counts or hasattr(command, "commands") else sum(counts)
