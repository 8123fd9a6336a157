"""Options of the commands that ask a running proxy."""

from __future__ import annotations

from typing import Annotated

import typer

DEFAULT_URL = "http://localhost:9090"

UrlOption = Annotated[str, typer.Option("--url", help="URL of the proxy, or of its admin listener (admin.port).")]
KeyOption = Annotated[
    str | None,
    typer.Option("--key", envvar="WARMROUTE_ADMIN_KEY", help="Admin key, if keys.admin is set.", show_default=False),
]
