"""Connections of commands to a running proxy: URL, certificates, and remedies where it cannot be reached.

Shared by `proxy.console` and `launch.doctor`; imports nothing else of the project.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import httpx


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files for connections over TLS.

    Attributes:
        ca: the authority of the proxy's certificate; None: the system's.
        certificate: the certificate to present, with its chain.
        key: its private key; None: in the certificate's file.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None


NO_FILES = TlsFiles()


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


def tls_context(files: TlsFiles = NO_FILES) -> ssl.SSLContext:
    """Trust in the authorities of the files, without one in the system's, and the certificate to present.

    Raises:
        ValueError: a file cannot be used.
    """
    try:
        context = ssl.create_default_context(cafile=None if files.ca is None else str(files.ca))
    except OSError as error:
        raise ValueError(f"--ca-file {files.ca}: {error.strerror or error}") from error
    if files.certificate is None:
        if files.key is not None:
            raise ValueError("--cert-key-file is the key of --cert-file: give that too")
        return context
    for option, path in (("--cert-file", files.certificate), ("--cert-key-file", files.key)):
        try:
            if path is not None:
                path.open("rb").close()
        except OSError as error:  # the error of reading both does not have the name
            raise ValueError(f"{option} {path}: {error.strerror}") from error
    try:
        context.load_cert_chain(files.certificate, files.key, password="")
    except (OSError, ValueError) as error:
        key = f" and --cert-key-file {files.key} are" if files.key else " is"
        add = "" if files.key else " (or give its key with --cert-key-file)"
        raise ValueError(
            f"--cert-file {files.certificate}{key} not a PEM certificate with its unencrypted private key{add}: {error}"
        ) from error
    return context


def unreached_remedy(error: httpx.HTTPError, url: str, option: str, files: TlsFiles = NO_FILES) -> str | None:
    """Remedy for a proxy that cannot be reached at the URL of an option; None if the error names no cause."""
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return f"give the authority of its certificate with --ca-file, and in {option} a name that the certificate has"
    if "WRONG_VERSION_NUMBER" in str(error):
        return f"if it serves plain HTTP, begin {option} with http://"
    # Without its client certificate a handshake of TLS 1.3 has ended and the first read fails; one of 1.2 is cut off.
    if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError) or _cut_off(error):
        if url.startswith("http://"):
            return f"if it serves HTTPS, begin {option} with https://"
        if files.certificate is None:
            return "if it requires client certificates (tls.client_ca), give one with --cert-file and --cert-key-file"
        return "if it requires client certificates, --cert-file must be of an authority in its tls.client_ca"
    return None


def _cut_off(error: BaseException | None) -> bool:
    """The handshake of TLS was cut off: an SSL error behind that of the HTTP library, which asyncio leaves empty."""
    while error is not None and not isinstance(error, ssl.SSLEOFError):
        error = error.__cause__ or error.__context__
    return error is not None
