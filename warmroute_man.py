"""The manual page ``warmroute.1``, generated from the command line's own help."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_CODE = re.compile(r"`([^`]+)`")
_ENVIRONMENT = (
    (
        "WARMROUTE_...",
        "Any setting of `warmroute serve`: its name in capitals, sections joined by two underscores, as in "
        "`WARMROUTE_POLICY__NAME=warm`. `warmroute settings` lists them.",
    ),
)
_STATUS = (
    ("0", "Success."),
    ("1", "A check failed, or a comparison did not hold."),
    ("2", "Invalid arguments or settings, an address that cannot be listened on, or a missing extra."),
    ("3", "The listener or the application did not start."),
)


def man_page(root: Any, version: str) -> str:
    """The page in roff, for ``man``.

    Args:
        root: the root group as Click sees it.
        version: of warmroute.
    """
    lines = [
        f'.TH WARMROUTE 1 "" "warmroute {_text(version)}" "User Commands"',
        ".SH NAME",
        rf"warmroute \- {_text(_summary(root))}",
        ".SH SYNOPSIS",
        ".B warmroute",
        r"[\fIOPTIONS\fR] \fICOMMAND\fR [\fIARGS\fR]...",
        ".SH DESCRIPTION",
        *_paragraphs(root.help or ""),
        ".SH OPTIONS",
        *_params(root),
        ".SH COMMANDS",
    ]
    for path, command in _commands(root):
        lines += [f'.SS "warmroute {_text(path)}"', *_paragraphs(command.help or ""), *_params(command)]
    for title, entries in (("ENVIRONMENT", _ENVIRONMENT), ("EXIT STATUS", _STATUS)):
        lines.append(f'.SH "{title}"')
        for name, text in entries:
            lines += [".TP", rf"\fB{_text(name)}\fR", _text(text)]
    return "\n".join(lines) + "\n"


def _commands(group: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Path and command of every leaf, in the order of help."""
    for name in group.list_commands(None):
        command = group.commands[name]
        if getattr(command, "hidden", False):
            continue
        if hasattr(command, "commands"):
            yield from _commands(command, f"{path}{name} ")
        else:
            yield f"{path}{name}", command


def _params(command: Any) -> Iterator[str]:
    for param in command.params:
        if getattr(param, "hidden", False):
            continue
        yield ".TP"
        if param.param_type_name == "argument":
            yield rf"\fI{_text(param.metavar or param.name.upper())}\fR"
        else:
            names = ", ".join(rf"\fB{_text(name)}\fR" for name in (*param.opts, *param.secondary_opts))
            value = "" if param.is_flag else rf" \fI{_text(param.metavar or param.name.upper())}\fR"
            yield names + value
        yield _text(_help(param))


def _help(param: Any) -> str:
    """Help of a parameter with its default, if that is a value to write."""
    text = (param.help or "").strip()
    default = getattr(param.default, "value", param.default)
    shown = isinstance(default, str | int | float) and not isinstance(default, bool) and default != ""
    return f"{text} Default: {default}." if shown and "Default:" not in text else text


def _summary(root: Any) -> str:
    return str(root.help or "").strip().split("\n\n")[0].rstrip(".")


def _paragraphs(text: str) -> Iterator[str]:
    for number, paragraph in enumerate(part for part in text.strip().split("\n\n") if part.strip()):
        if number:
            yield ".PP"
        yield _text(" ".join(paragraph.split()))


def _text(text: str) -> str:
    """One line of roff: escapes, code spans in bold, no line that looks like a request."""
    plain = " ".join(text.split()).replace("\\", r"\e").replace("-", r"\-")
    plain = _CODE.sub(r"\\fB\1\\fR", plain)
    return rf"\&{plain}" if plain.startswith((".", "'")) else plain
