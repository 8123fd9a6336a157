"""The page of the options of ``warmroute report``; ``python -m tests.reference`` writes it."""

from __future__ import annotations

import typer
from typer.main import get_command

from replayer.report.cli import register

_INTRODUCTION = """# Reference: options of `warmroute report`

Generated from the code by `make reference`. `warmroute report --help` explains each. Examples:
[compare](../compare.md).

| option | default |
| --- | --- |
"""


def reference() -> str:
    """Markdown: every option with its default."""
    app = typer.Typer()
    register(app)
    command = get_command(app).commands["report"]  # type: ignore[attr-defined]
    rows = []
    for option in command.params:
        if option.param_type_name != "option":
            continue
        names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
        shown = getattr(option, "show_default", None)
        if isinstance(shown, str):
            default = shown
        elif option.is_flag:
            default = "off"
        else:
            default = "–" if option.default in {None, ""} else f"`{option.default}`"
        rows.append(f"| {names} | {default} |")
    return _INTRODUCTION + "\n".join(rows) + "\n"
