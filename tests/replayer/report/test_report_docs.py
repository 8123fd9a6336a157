"""The options in docs/reports.md are those of the command."""

from __future__ import annotations

from pathlib import Path

import typer
from typer.main import get_command

from replayer.report.cli import register

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reports.md"


def options_table() -> str:
    """Every option of ``warmroute report`` with its default, as Markdown."""
    app = typer.Typer()
    register(app)
    command = get_command(app).commands["report"]  # type: ignore[attr-defined]
    rows = ["| option | default |", "| --- | --- |"]
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
    return "\n".join(rows) + "\n"


def test_the_page_has_the_options_of_the_command() -> None:
    assert options_table() in PAGE.read_text()


def test_the_page_tells_the_limits_the_code_has() -> None:
    from replayer.report import load_over_time, turns
    from replayer.report.figures import fleet as figures_fleet
    from replayer.report.figures import latency as figures_latency

    page = PAGE.read_text()
    assert f"at most {load_over_time.BINS} intervals" in page
    assert f"more than {figures_fleet._MAX_ROWS}\ninstances" in page
    assert (
        f"thinned to {figures_latency._MAX_POINTS} points by rank and scatters to {figures_latency._MAX_DOTS}" in page
    )
    assert f"fewer than {turns.MIN_REQUESTS} sessions" in page


if __name__ == "__main__":
    print(options_table())
