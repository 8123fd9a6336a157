"""The ``warmroute`` command line: one Typer application put together from each folder's own commands."""

from __future__ import annotations

import base64
import errno
import hashlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from warmroute_man import man_page
from warmroute_names import RenamedGroup, suggestion

if TYPE_CHECKING:
    from launch.doctor.facts import HandOffTest
    from launch.fleet.file import FleetFile

__version__ = "0.1.0"

PANELS: Mapping[str, tuple[str, ...]] = {
    "Serve": ("serve", "settings", "key", "top", "explain", "man"),
    "Fleet": ("up", "down", "status", "doctor", "telemetry"),
    "Measure": ("demo", "replay", "simulate", "experiment", "measure", "calibrate", "trace", "sim"),
    "Analyse": ("summary", "compare", "report", "analyse"),
}
"""Help panel -> its commands and groups, in the order in which help shows them."""

PACKAGES = ("policies", "proxy", "launch", "replayer", "sim", "bench", "configs")
"""Import names of this distribution; other distributions have some of them too."""
EXTRAS: Mapping[str, str] = MappingProxyType(
    {
        "aiohttp": "lab",
        "jinja2": "lab",
        "matplotlib": "lab",
        "pynvml": "lab",
        "scipy": "lab",
        "zstandard": "lab",
        "ray": "ray",
        "tokenizers": "tokenizer",
    }
)
"""Modules that only some commands import, and the extra that installs each."""

_HOME = Path(__file__).resolve().parent
_EXIT = 2
_VALIDATION = "Value error, "
"""Before Typer's own text, where it has the value validated by Pydantic (0.29)."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REMEDY = (
    "install warmroute into an environment of its own (`uv tool install warmroute`, `pipx install warmroute`, or a "
    "fresh virtual environment), and check PYTHONPATH"
)


class ForeignPackageError(RuntimeError):
    """Another distribution's package is found under one of our import names; the message says where, and the fix."""


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"warmroute {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Cache-aware serving proxy and elastic prefill/decode router for agentic LLM traffic."""


class _Root(RenamedGroup):
    """The root group: commands in the order of the panels."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for names in PANELS.values() for name in names]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command; a word for which another command exists ends with that command's name."""
        if args and args[0] not in self.commands and (sentence := suggestion(args[0])):
            ctx.fail(sentence)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; wrong values of its options are reported without the words of Typer's own validation."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix(_VALIDATION)
            raise


def _man(context: typer.Context) -> None:
    """Print the manual page `warmroute.1`, generated from this help.

    `warmroute man > ~/.local/share/man/man1/warmroute.1` installs it for `man warmroute`.
    """
    typer.echo(man_page(context.find_root().command, __version__), nl=False)


def _hand_offs(fleet: FleetFile, source: str) -> list[HandOffTest]:
    """The hand-offs of ``doctor --deep``; what they import is not needed before."""
    from bench.instruments.self_test import hand_offs

    return hand_offs(fleet, source)


def build() -> typer.Typer:
    """The root application with every folder's commands."""
    from bench.analysis.cli import register as register_analysis
    from bench.instruments.cli import register as register_instruments
    from launch.cli import register as register_launch
    from proxy.cli import register as register_proxy
    from replayer.cli import register as register_replayer
    from sim.cli import register as register_sim

    # Markdown: paragraphs of help are wrapped to the terminal.
    app = typer.Typer(cls=_Root, no_args_is_help=True, pretty_exceptions_show_locals=False, rich_markup_mode="markdown")
    app.callback()(_options)
    for register in (
        register_proxy,
        register_replayer,
        partial(register_launch, hand_offs=_hand_offs),
        register_sim,
        register_instruments,
        register_analysis,
    ):
        register(app)
    app.command("man")(_man)
    panel_of = {name: panel for panel, names in PANELS.items() for name in names}
    for command in app.registered_commands:
        command.rich_help_panel = panel_of[str(command.name or getattr(command.callback, "__name__", ""))]
    for group in app.registered_groups:
        group.rich_help_panel = panel_of[str(group.name)]
    return app


def check_packages(home: Path = _HOME) -> None:
    """Verify that every import name of ours leads to our files.

    ``proxy.py`` installs a package ``proxy``, ROS one named ``launch``: earlier on the path they hide ours, and in the
    same folder they overwrite it.

    Args:
        home: folder that our packages are in.

    Raises:
        ForeignPackageError: another file is found, or none.
    """
    recorded = _recorded_digests(home)
    for name in PACKAGES:
        ours = home / name / "__init__.py"
        spec = importlib.util.find_spec(name)
        places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
        found = next((Path(place) for place in places if place), None)
        if found is None:
            raise ForeignPackageError(f"`import {name}` finds nothing; warmroute's {ours} is missing: {_REMEDY}")
        if found.resolve() != ours:
            raise ForeignPackageError(f"`import {name}` finds {found} instead of warmroute's {ours}: {_REMEDY}")
        if recorded.get(name, "") not in {"", _digest(ours)}:
            raise ForeignPackageError(f"another distribution has overwritten warmroute's {ours}: {_REMEDY}")


def _recorded_digests(home: Path) -> dict[str, str]:
    """Digest of each package's ``__init__.py`` as installed; empty in a source tree or an editable installation."""
    try:
        installed = distribution("warmroute")
    except PackageNotFoundError:
        return {}
    if Path(str(installed.locate_file("warmroute.py"))).resolve() != home / "warmroute.py":
        return {}
    found = {}
    for line in (installed.read_text("RECORD") or "").splitlines():
        path, _, rest = line.partition(",sha256=")
        if path.endswith("/__init__.py") and path.count("/") == 1:
            found[path.partition("/")[0]] = rest.partition(",")[0]
    return found


def _digest(path: Path) -> str:
    """As in RECORD: base64 without padding, for URLs."""
    return base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()


def _keep_the_current_folder_out() -> None:
    """Start child processes (``python -m sim``) on our files even where the current folder has, say, a ``sim.py``."""
    os.environ["PYTHONSAFEPATH"] = "1"
    if Path(sys.path[0]).resolve() == _HOME:  # a source tree found by its folder alone: children find it by name
        paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(_HOME), *paths]))


def main() -> None:
    """Console entry point."""
    if not sys.stdout.isatty():
        # Output that is not a terminal has no width: tables must not be cut to 80 columns.
        os.environ.setdefault("COLUMNS", "140")
    _keep_the_current_folder_out()
    try:
        check_packages()
        build()()
    except ForeignPackageError as error:
        _stop(str(error))
    except OSError as error:
        # Commands report errors of their files; those of the standard output have no name.
        if error.errno not in _FULL or error.filename is not None:
            raise
        _stop(f"the standard output cannot be written: {error.strerror}")
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRAS:
            raise
        _stop(f"this command needs {module}, which is not installed: pip install 'warmroute[{EXTRAS[module]}]'")


def _stop(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(_EXIT)


if __name__ == "__main__":
    main()
