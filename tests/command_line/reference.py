"""The page docs/reference/cli.md; ``python -m tests.command_line.reference`` writes it."""

from __future__ import annotations

from pathlib import Path

from tests.command_line.commands import CommandPage, commands, groups, page
from warmroute import PANELS
from warmroute_names import REMOVED_IN

PATH = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"


def reference() -> str:
    """Markdown: every command with its options, defaults and help."""
    pages = [page(path, command) for path, command in commands()]
    lines = [
        "# Reference: command line",
        "",
        "Generated from the code by `make reference`; `warmroute COMMAND --help` shows the same. Old names of commands",
        f"and options are accepted with a note on standard error until {REMOVED_IN}. `warmroute --install-completion`",
        "installs completion for the current shell.",
    ]
    for panel, names in PANELS.items():
        shown = [one for one in pages if one.path.partition(" ")[0] in names]
        lines += ["", f"## {panel}", "", "| command | what |", "| --- | --- |"]
        lines += [f"| [`{one.path}`](#{_anchor(one.path)}) | {_cell(_first(one.help))} |" for one in shown]
        for name in names:
            if name in groups():
                lines += ["", f"`warmroute {name}`: {groups()[name]}"]
            for one in shown:
                if one.path.partition(" ")[0] == name:
                    lines += ["", *_section(one)]
    return "\n".join(lines) + "\n"


def _section(found: CommandPage) -> list[str]:
    lines = [f"### warmroute {found.path}", "", *found.help.strip().splitlines()]
    if found.rows:
        lines += ["", "| argument or option | default | what |", "| --- | --- | --- |"]
    for row in found.rows:
        names = ", ".join(f"`{name}`" for name in row.names) + (f" `{row.metavar}`" if row.metavar else "")
        lines.append(f"| {_cell(names)} | {_cell(row.default)} | {_cell(row.help)} |")
    return lines


def _anchor(path: str) -> str:
    return f"warmroute-{path.replace(' ', '-')}"


def _first(text: str) -> str:
    return " ".join(text.strip().split("\n\n")[0].split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    """Write the page."""
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(reference(), encoding="utf-8")


if __name__ == "__main__":
    main()
