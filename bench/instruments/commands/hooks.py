"""``warmroute measure hooks``: the hooks that time the stages of each KV transfer inside vLLM's Mooncake connector."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from bench.analysis.output import Json, Sheet, show, stop

if TYPE_CHECKING:
    from launch.transfer_hooks.install import HooksReport

VARIABLE = "WARMROUTE_TRANSFER_RECORDS"
"""Environment variable of the engines: the file in which the hooks record transfers."""

Python = Annotated[str, typer.Option("--python", help="Python of the engines: the one that has vLLM.")]


def application() -> typer.Typer:
    """The group with its commands."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, help="Hooks in the KV connector: install, remove.")
    app.callback()(_group)
    app.command("apply")(apply)
    app.command("revert")(revert)
    app.command("verify")(verify)
    return app


def _group() -> None:
    """Hooks that time the stages of each KV transfer inside vLLM's Mooncake connector."""


def apply(python: Python, as_json: Json = False) -> None:
    """Install the hooks beside vLLM; refused for versions of vLLM that they were not made for.

    No file of vLLM changes. Engines started afterwards record their transfers if WARMROUTE_TRANSFER_RECORDS names a
    file (`up --set env.WARMROUTE_TRANSFER_RECORDS=FILE`), and are not affected without it.
    """
    from launch.transfer_hooks import install

    _reported(install.apply, python, as_json)


def revert(python: Python, as_json: Json = False) -> None:
    """Remove the hooks. Engines that run keep theirs until they are restarted."""
    from launch.transfer_hooks import install

    _reported(install.revert, python, as_json)


def verify(python: Python, as_json: Json = False) -> None:
    """Print the SHA-256 of each file that moves KV, and if the hooks are applied."""
    from launch.transfer_hooks import install

    _reported(install.verify, python, as_json)


def _reported(work: Callable[[str], HooksReport], python: str, as_json: bool) -> None:
    from launch.engines.vllm import resolve_python
    from launch.transfer_hooks.install import HooksError

    try:
        found = work(resolve_python(python))
    except HooksError as error:
        stop(error)
    versions = [f"{name} {version}" for name, version in {"vllm": found.vllm or "unknown", **found.mooncake}.items()]
    sheet = Sheet(
        f"Transfer path of {found.python}",
        ("file", "SHA-256"),
        [*found.files.items(), ("all", found.digest)],
        left=2,
        notes=[
            f"{', '.join(versions)}; hooks: {found.hooks}",
            f"the hooks are made for this connector (vLLM {found.made_for})"
            if found.made_for
            else "the hooks are not made for this connector",
        ],
    )
    show(found, [sheet], as_json=as_json, as_markdown=False)
