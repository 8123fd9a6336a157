"""``python stub_proxy.py PORT FILE``: a proxy that is ready, and whose GET /instances returns the contents of FILE.

Each such answer adds a byte to FILE.answers.
"""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    """Answers every request with the file."""

    def do_GET(self) -> None:
        body = Path(sys.argv[2]).read_bytes()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        if self.path == "/instances":
            with Path(f"{sys.argv[2]}.answers").open("a", encoding="ascii") as answers:
                answers.write(".")

    def log_message(self, *arguments: object) -> None:
        """No log."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
