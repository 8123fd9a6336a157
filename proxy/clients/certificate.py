"""Certificate of the listeners, read again when its files change, as when it is renewed."""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime

from proxy.clients.certificate_end import chain_end_unix_s
from proxy.file_version import FileVersion
from proxy.settings import TlsSettings

log = logging.getLogger("warmroute.tls")

LOOK_S = 10.0
"""Seconds between two looks at the files."""
_DAY_S = 86_400
_WARN_DAYS = 14
"""Days before the end of a certificate from which on a warning is logged, as the alert rule has them."""


class ListenerCertificate:
    """The TLS context that all listeners of this process share; ``context`` is None for plain HTTP."""

    def __init__(self, settings: TlsSettings) -> None:
        """Read the files. Raises ValueError: one is invalid."""
        self._settings = settings
        self._taken = self._refused = self._versions()
        """State of the files that were read last, and of those that were refused last."""
        self.context = settings.context()
        self.ends_unix_s = self._end()
        """End of validity of the certificate that is used, or of its chain; None: plain HTTP, or unknown."""
        self._warned: tuple[float, int] | None = None
        """End and days left of the last warning."""

    async def watch(self) -> None:
        """Look at the files every ``LOOK_S`` seconds until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Read the files again if they have changed, and warn once a day of a certificate near or after its end."""
        self._read_again()
        self._warn_of_end()

    def _read_again(self) -> None:
        """Read the files again if they have changed: handshakes from now on get the new certificate.

        Files that are invalid, or of which only one is renewed so far, change nothing; each state of them is logged
        once. Certificates of ``client_ca`` are added; those that it no longer has stay.
        """
        versions = self._versions()
        if self.context is None or versions == self._taken:
            return
        known, self._refused = versions == self._refused, versions
        settings = self._settings
        try:
            settings.context()  # checks all files: a context in use must not get a part of them
            assert settings.certificate is not None
            self.context.load_cert_chain(settings.certificate, settings.key, password="")
            if settings.client_ca is not None:
                self.context.load_verify_locations(settings.client_ca)
        except (OSError, ValueError) as error:
            # Tried again at every look: a file may become readable without a change of its content.
            if not known:
                log.warning("TLS continues with the certificate that was read before: %s", error)
        else:
            self._taken = versions
            self.ends_unix_s = self._end()
            log.info("TLS: new connections get the certificate that is in %s now", settings.certificate)

    def _end(self) -> float | None:
        path = self._settings.certificate
        return None if path is None else chain_end_unix_s(path)

    def _warn_of_end(self) -> None:
        end = self.ends_unix_s
        if end is None:
            return
        days = int((end - time.time()) // _DAY_S)
        if days >= _WARN_DAYS or self._warned == (end, days):
            return
        self._warned = (end, days)
        at = datetime.fromtimestamp(end, UTC).isoformat(timespec="seconds")
        state = f"expires in {days} day(s)" if days >= 0 else "has expired: clients refuse it"
        log.warning("TLS: the certificate in %s %s (%s); renew it in its file", self._settings.certificate, state, at)

    def _versions(self) -> tuple[FileVersion | None, ...]:
        settings = self._settings
        return tuple(FileVersion.of(path) for path in (settings.certificate, settings.key, settings.client_ca) if path)
