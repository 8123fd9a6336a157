"""Options that the instruments share, and the frame in which each runs: check, measure, write the record, print."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from bench.analysis.output import stop

if TYPE_CHECKING:
    from bench.instruments.prompts import Prompts
    from bench.instruments.record import InstrumentRecord
    from bench.instruments.targets import Targets

T = TypeVar("T")

FleetArgument = Annotated[
    Path | None,
    typer.Argument(metavar="[FLEET]", help="Fleet file whose engines are running, or a shipped one's name."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Key of the fleet file, as given to `up`. Repeatable.", show_default=False
    ),
]
Urls = Annotated[
    list[str] | None,
    typer.Option("--url", help="Base URL of an engine, instead of a fleet file. Repeatable.", show_default=False),
]
Model = Annotated[
    str | None, typer.Option(help="Model to request. Default: the first that the engine names.", show_default=False)
]
ApiKeyEnv = Annotated[
    str | None,
    typer.Option(help="Environment variable with the engines' API key. Default: no key.", show_default=False),
]
TokenLow = Annotated[int, typer.Option(min=0, help="Smallest token id in prompts.")]
TokenHigh = Annotated[int, typer.Option(min=1, help="One more than the largest token id in prompts.")]
TimeoutS = Annotated[float, typer.Option(min=1, help="Bound on one request, seconds.")]
Seed = Annotated[int, typer.Option(help="Seed of the prompts.")]
KvBytesPerToken = Annotated[
    int | None,
    typer.Option(min=1, help="KV of one token, bytes. Default: from the model's dimensions.", show_default=False),
]
Streams = Annotated[str, typer.Option(help="Decoding streams, comma-separated.")]
ContextTokens = Annotated[int, typer.Option(min=1, help="Prompt of each decoding stream, tokens.")]
Repeats = Annotated[int, typer.Option(min=1, help="Repeats of every point.")]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="File for the record (JSON). Default: none is written.", show_default=False),
]
Hardware = Annotated[str, typer.Option(help="The engines' hardware, for the record.")]


def chosen_targets(fleet: Path | None, overrides: list[str] | None, urls: list[str] | None) -> Targets:
    """The engines that the options name; ends the command if they name none."""
    from bench.instruments.engine import InstrumentError
    from bench.instruments.targets import targets_of

    try:
        return targets_of(fleet, overrides or (), urls or ())
    except InstrumentError as error:
        stop(error)


def kv_bytes_of(given: int | None, targets: Targets) -> int:
    """KV of one token in bytes, as given or by the model's dimensions; ends the command if neither is known."""
    size = given or targets.kv_bytes_per_token
    if size is None:
        stop("the model's dimensions are not known: give --kv-bytes-per-token (layers x 2 x KV heads x width x bytes)")
    return size


def prompts_of(low: int, high: int, seed: int) -> Prompts:
    """The source of prompts; ends the command if the range is empty."""
    from bench.instruments.prompts import Prompts, TokenRange

    if low >= high:
        stop("--token-low must be below --token-high")
    return Prompts(TokenRange(low, high), seed)


def api_key_from(variable: str | None) -> str | None:
    """The key in an environment variable; ends the command if the variable is not set."""
    if variable is None:
        return None
    value = os.environ.get(variable)
    if not value:
        stop(f"--api-key-env: {variable} is not set")
    if not (value.isascii() and value.isprintable()):
        stop(f"--api-key-env: {variable} has a line break or another character that no header can carry")
    return value


def measured(work: Coroutine[None, None, T]) -> T:
    """Run a measurement; its errors end the command with exit code 2, Ctrl-C with 130."""
    from bench.instruments.engine import InstrumentError

    try:
        return asyncio.run(work)
    except InstrumentError as error:
        stop(error)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def fitting(wanted: int, context_tokens: int, longest: int | None) -> int:
    """As many of the ``wanted`` output tokens as fit into an engine's longest sequence with the context."""
    return wanted if longest is None else max(2, min(wanted, longest - context_tokens - 1))


def refuse_longer(option: str, tokens: int, longest: int | None) -> None:
    """Check a prompt's length before anything is measured; ``longest`` is the engine's longest sequence, if known.

    Raises:
        InstrumentError: the prompt leaves no room for one token of output.
    """
    from bench.instruments.engine import InstrumentError

    if longest is not None and tokens >= longest:
        raise InstrumentError(
            f"{option} {tokens}: the engine takes {longest} tokens at most (max_model_len), of which one is output; "
            f"give {longest - 1} or less"
        )


def progress(text: str) -> None:
    """One line about the next step, on standard error."""
    typer.echo(text, err=True)


def refuse_overwriting(output: Path, path: Path) -> None:
    """End the command if the output is a file that it reads."""
    from replayer.records.outputs import OverwritesInputError, refuse_inputs

    try:
        refuse_inputs(output, [path])
    except OverwritesInputError as error:
        stop(str(error))


def written(output: Path | None, record: InstrumentRecord) -> None:
    """Write a record where one is wanted; ends the command if it cannot be written."""
    from bench.instruments.record import write_record

    if output is None:
        return
    try:
        write_record(output, record)
    except OSError as error:
        stop(f"cannot write {output}: {error.strerror}; give another --output")
    typer.echo(f"record: {output}", err=True)
