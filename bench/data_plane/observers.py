"""Observers of the stack ``warmroute-observed``: a collector of traces, and a viewer of its dashboard."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Annotated

import httpx
import typer

app = typer.Typer(add_completion=False)


class _Collector(BaseHTTPRequestHandler):
    """Reads every trace that is posted and answers 200."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: a line for each batch would be work."""


@app.command()
def collect(port: Annotated[int, typer.Argument(help="Port for OTLP over HTTP.")]) -> None:
    """Accept traces until killed."""
    ThreadingHTTPServer(("127.0.0.1", port), _Collector).serve_forever()


@app.command()
def watch(url: Annotated[str, typer.Argument(help="Address of the proxy.")]) -> None:
    """Read the dashboard's feed until killed. Raises httpx.HTTPError if there is none, or it ends."""
    with httpx.stream("GET", f"{url}/ui/feed", timeout=30, trust_env=False) as answer:
        answer.raise_for_status()
        for _ in answer.iter_raw():
            pass


if __name__ == "__main__":
    app()
