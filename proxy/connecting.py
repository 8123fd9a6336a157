"""Connections of commands to a running proxy: URL, authorities, and remedies where it cannot be reached.

Shared by `proxy.console` and `launch.doctor`; imports nothing else of the project.
"""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx


def checked_url(url: str, option: str) -> str:
    """The URL of a proxy. Raises ValueError: it is none, with the option that it was given by."""
    try:
        parsed = httpx.URL(url)
        parsed.host.encode("idna")  # as the connection does, where the error would end the command
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ValueError(f"{option} {url}: {error}") from error
    if parsed.scheme not in {"http", "https"} or not parsed.host:
        raise ValueError(f"{option} {url}: give a URL that begins with http:// or https://, as http://127.0.0.1:9090")
    return url


def trusting(ca_file: Path | None) -> ssl.SSLContext:
    """Trust in the authorities of a PEM file alone, without one in the system's.

    Raises:
        ValueError: the file cannot be used.
    """
    try:
        return ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
    except OSError as error:
        raise ValueError(f"--ca-file {ca_file}: {error.strerror or error}") from error


def unreached_remedy(error: httpx.HTTPError, url: str, option: str) -> str | None:
    """Remedy for a proxy that cannot be reached at the URL of an option; None if the error names no cause."""
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return f"give the authority of its certificate with --ca-file, and in {option} a name that the certificate has"
    if "WRONG_VERSION_NUMBER" in str(error):
        return f"if it serves plain HTTP, begin {option} with http://"
    if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError):
        if url.startswith("http://"):
            return f"if it serves HTTPS, begin {option} with https://"
        return "if it requires client certificates (tls.client_ca), ask it with another client: this command has none"
    return None
