"""Connections of commands to a running proxy: its URL, and remedies where it cannot be reached.

Shared by `proxy.console` and `launch.doctor`; imports nothing else of the project but `warmroute_tls`.
"""

from __future__ import annotations

import ssl

import httpx

from warmroute_tls import NO_FILES, RENEW, TlsFiles, out_of_date


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


def unreached_remedy(error: httpx.HTTPError, url: str, option: str, files: TlsFiles = NO_FILES) -> str | None:
    """Remedy for a proxy that cannot be reached at the URL of an option; None if the error names no cause."""
    if out_of_date(error):
        return RENEW
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
        return "if it requires client certificates, --cert-file must be of an authority in its tls.client_ca, and valid"
    return None


def _cut_off(error: BaseException | None) -> bool:
    """The handshake of TLS was cut off: an SSL error behind that of the HTTP library, which asyncio leaves empty."""
    while error is not None and not isinstance(error, ssl.SSLEOFError):
        error = error.__cause__ or error.__context__
    return error is not None
