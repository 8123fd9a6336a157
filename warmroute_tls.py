"""Certificates for TLS that commands are given: ``--ca-file``, ``--cert-file`` and ``--cert-key-file``."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

CaFile = Annotated[
    Path | None,
    typer.Option(
        "--ca-file",
        help="PEM file with the authority of the server's certificate. Default: the system's.",
        show_default=False,
    ),
]
CertFile = Annotated[
    Path | None,
    typer.Option(
        "--cert-file", help="PEM file with a client certificate, for a server that requires one.", show_default=False
    ),
]
CertKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--cert-key-file", help="PEM file with the key of --cert-file, if it is not there.", show_default=False
    ),
]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files for connections over TLS.

    Attributes:
        ca: the authority of the server's certificate; None: the system's.
        certificate: the certificate to present, with its chain.
        key: its private key; None: in the certificate's file.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None


NO_FILES = TlsFiles()

RENEW = "renew its certificate, or correct the clock of this machine"
"""Remedy for a certificate that is out of date, where neither another authority nor another name helps."""


def out_of_date(error: object) -> bool:
    """True if an error of TLS says that the other side's certificate has expired, or is not valid yet."""
    return any(words in str(error) for words in ("certificate has expired", "certificate is not yet valid"))


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
