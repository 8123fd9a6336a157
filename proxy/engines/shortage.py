"""Connection failures that are this process's own: it is out of descriptors, ports or memory. No engine is at fault."""

from __future__ import annotations

import errno
import os
import socket

_OWN = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOMEM, errno.ENOBUFS})
_DEEPEST = 10
"""Bound on the causes looked at; httpx over anyio nests four."""


def own_shortage(error: BaseException) -> str | None:
    """The shortage behind a failed connection, as text; None if it is the engine's or the network's failure."""
    reasons: list[BaseException] = [error]
    for _ in range(_DEEPEST):
        if not reasons:
            return None
        reason = reasons.pop()
        if isinstance(reason, OSError) and reason.errno in _OWN:
            return os.strerror(reason.errno)
        if isinstance(reason, socket.gaierror) and not _can_open():  # its error is "unknown name" or "try again"
            return os.strerror(errno.EMFILE)
        if isinstance(reason, BaseExceptionGroup):
            reasons += reason.exceptions[:_DEEPEST]
        reasons += [each for each in (reason.__cause__ or reason.__context__,) if each is not None]
    return None


def _can_open() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno not in _OWN
    return True
