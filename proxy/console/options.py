"""Options of the commands that ask a running proxy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_URL = "http://localhost:9090"

UrlOption = Annotated[str, typer.Option("--url", help="URL of the proxy, or of its admin listener (admin.port).")]
KeyOption = Annotated[
    str | None,
    typer.Option("--key", envvar="WARMROUTE_ADMIN_KEY", help="Admin key, if keys.admin is set.", show_default=False),
]
CaOption = Annotated[
    Path | None,
    typer.Option("--ca-file", help="PEM file with the authority of the proxy's certificate.", show_default=False),
]
CertOption = Annotated[
    Path | None,
    typer.Option(
        "--cert-file", help="PEM file with a client certificate, if the proxy has tls.client_ca.", show_default=False
    ),
]
CertKeyOption = Annotated[
    Path | None,
    typer.Option(
        "--cert-key-file", help="PEM file with the key of --cert-file, if it is not there.", show_default=False
    ),
]
