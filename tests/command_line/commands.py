"""The commands of ``warmroute`` by path, for the tests and the reference page."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import typer
from typer.main import get_command

from warmroute import build

_METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}


class OptionRow(NamedTuple):
    """One argument or option of a command."""

    names: tuple[str, ...]
    metavar: str
    """Empty for a flag."""
    default: str
    """As text; "required" where there is none."""
    help: str
    """Without the sentence on the default."""


class CommandPage(NamedTuple):
    """One command."""

    path: str
    """Such as ``trace synth``."""
    help: str
    rows: list[OptionRow]


@cache
def root() -> Any:
    """The root group as Click sees it."""
    return get_command(build())


def commands(group: Any | None = None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Path and command of every leaf below a group, in the order of help."""
    group = root() if group is None else group
    for name in group.list_commands(typer.Context(group)):
        command = group.commands[name]
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


def groups() -> dict[str, str]:
    """Group of the root -> its help."""
    return {name: command.help for name, command in root().commands.items() if hasattr(command, "commands")}


def option_names(command: Any) -> set[str]:
    """Every spelling of a command's options."""
    return {name for param in command.params for name in (*param.opts, *param.secondary_opts) if name.startswith("-")}


def page(path: tuple[str, ...], command: Any) -> CommandPage:
    """A command with its arguments and options."""
    hints = get_type_hints(command.callback)
    rows = [_row(param, hints[param.name]) for param in command.params if param.name in hints]
    return CommandPage(" ".join(path), command.help or "", rows)


def _row(param: Any, hint: Any) -> OptionRow:
    text, _, stated = (param.help or "").partition(" Default: ")
    kind = _plain(hint)
    is_flag = kind is bool
    if param.required:
        default = "required"
    elif isinstance(param.show_default, str):
        default = param.show_default
    elif stated:
        default = stated.removesuffix(".")
    elif is_flag:
        default = "on" if param.default else "off"
    else:
        default = _value(param.default)
    names = tuple(param.opts)
    if param.param_type_name == "argument":
        names = (param.metavar or param.name.upper(),)
        metavar = ""
    elif is_flag:
        names, metavar = (*names, *param.secondary_opts), ""
    elif isinstance(kind, type) and issubclass(kind, Enum):
        metavar = "|".join(str(one.value) for one in kind)
    else:
        metavar = param.metavar or _METAVARS[kind]
    return OptionRow(names, metavar, default, text)


def _value(default: Any) -> str:
    if default is None or default in {"", ()}:
        return "none"
    return f"`{default.value if isinstance(default, Enum) else default}`"


def _plain(hint: Any) -> Any:
    """The type of one value: without Annotated, None and list."""
    while get_origin(hint) is not None:
        arguments = [one for one in get_args(hint) if one is not type(None)]
        if get_origin(hint) not in {Annotated, Union, list} and not str(get_origin(hint)).endswith("UnionType'>"):
            break
        hint = arguments[0]
    return hint
