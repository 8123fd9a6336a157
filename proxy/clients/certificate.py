"""Certificate of the listeners, read again when its files change, as when it is renewed."""

from __future__ import annotations

import asyncio
import logging

from proxy.file_version import FileVersion
from proxy.settings import TlsSettings

log = logging.getLogger("warmroute.tls")

LOOK_S = 10.0
"""Seconds between two looks at the files."""


class ListenerCertificate:
    """The TLS context that all listeners of this process share; ``context`` is None for plain HTTP."""

    def __init__(self, settings: TlsSettings) -> None:
        """Read the files. Raises ValueError: one is invalid."""
        self._settings = settings
        self._taken = self._refused = self._versions()
        """State of the files that were read last, and of those that were refused last."""
        self.context = settings.context()

    async def watch(self) -> None:
        """Look at the files every ``LOOK_S`` seconds until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
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
            log.info("TLS: new connections get the certificate that is in %s now", settings.certificate)

    def _versions(self) -> tuple[FileVersion | None, ...]:
        settings = self._settings
        return tuple(FileVersion.of(path) for path in (settings.certificate, settings.key, settings.client_ca) if path)
