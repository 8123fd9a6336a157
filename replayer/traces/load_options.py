"""Options of the commands that load a trace: the loader's errors name them, so each such command has all of them."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class TimeUnit(StrEnum):
    """Unit of a trace's timestamps."""

    AUTO = "auto"
    S = "s"
    MS = "ms"
    US = "us"


class Sessions(StrEnum):
    """Source of sessions when a trace has none."""

    DERIVED = "derived"
    SINGLE = "single"


class Chain(StrEnum):
    """Treatment of ids that are not chained."""

    REPAIR = "repair"
    KEEP = "keep"
    ERROR = "error"


BlockTokens = Annotated[
    int | None, typer.Option(min=1, help="Tokens per hash id. Default: detected from the lengths.", show_default=False)
]
Unit = Annotated[
    TimeUnit, typer.Option(help="Unit of timestamps; auto: the format's own, refused if the rate is implausible.")
]
SessionsOption = Annotated[
    Sessions, typer.Option(help="Traces without sessions (Mooncake): derive by prefix chaining, or one per request.")
]
ChainOption = Annotated[Chain, typer.Option(help="Hash ids that follow different parents: renumber, keep or refuse.")]
AllowDeltas = Annotated[
    bool, typer.Option("--allow-deltas", help="Accept prompts that do not repeat their session's history.")
]
