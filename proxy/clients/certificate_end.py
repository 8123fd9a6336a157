"""End of validity of certificates in PEM files, read from their DER: Python's ``ssl`` reads verified ones only."""

from __future__ import annotations

import binascii
import re
import ssl
from datetime import UTC, datetime
from pathlib import Path

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_CONTEXT_0, _INTEGER, _SEQUENCE, _UTC_TIME, _GENERALIZED_TIME = 0xA0, 0x02, 0x30, 0x17, 0x18


def chain_end_unix_s(path: Path) -> float | None:
    """The earliest end of validity of the certificates in a file, in Unix seconds; None if it cannot be read.

    An intermediate certificate that has expired ends the chain as the server's own does.
    """
    try:
        found = _PEM.findall(path.read_text("utf-8", errors="replace"))
        return min((_not_after(ssl.PEM_cert_to_DER_cert(each)).timestamp() for each in found), default=None)
    except (OSError, ValueError, IndexError, binascii.Error):
        return None


def _not_after(der: bytes) -> datetime:
    """``validity.notAfter`` (RFC 5280, 4.1). Raises ValueError or IndexError: not a certificate."""
    certificate, _ = _value(der, _SEQUENCE)
    rest, _ = _value(certificate, _SEQUENCE)
    if rest[0] == _CONTEXT_0:  # version
        _, rest = _value(rest, _CONTEXT_0)
    for tag in (_INTEGER, _SEQUENCE, _SEQUENCE):  # serial number, signature, issuer
        _, rest = _value(rest, tag)
    validity, _ = _value(rest, _SEQUENCE)
    _, last = _value(validity, validity[0])
    text, _ = _value(last, last[0])
    if last[0] == _UTC_TIME:  # two digits, from 50 on of the last century
        text = (b"19" if text >= b"50" else b"20") + text
    elif last[0] != _GENERALIZED_TIME:
        raise ValueError("no time")
    return datetime.strptime(text.decode("ascii"), "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)


def _value(der: bytes, tag: int) -> tuple[bytes, bytes]:
    """Content of the first element, and what follows it. Raises ValueError: another tag, or too short."""
    if der[0] != tag:
        raise ValueError(f"tag {der[0]:#x} instead of {tag:#x}")
    length, begin = der[1], 2
    if length & 0x80:
        begin += length & 0x7F
        length = int.from_bytes(der[2:begin], "big")
    if begin + length > len(der):
        raise ValueError("too short")
    return der[begin : begin + length], der[begin + length :]
