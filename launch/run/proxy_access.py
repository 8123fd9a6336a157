"""The launcher's access to the proxy it starts: scheme, certificate, and an admin key of its own.

The key exists in the launcher's memory only; the proxy's settings file gets its SHA-256. The proxy's certificate is
trusted as it is in its file, whatever name it is for: the launcher connects to the address, often loopback. When the
file changes, the new one is trusted beside those before, as the proxy takes it some seconds later.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
import ssl
from pathlib import Path
from typing import Any

import httpx
import yaml

from launch.fleet.file import FleetFile
from launch.run.files import replace_file, required
from proxy.file_version import FileVersion
from proxy.settings import TlsSettings

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_TIMEOUT_S = 2.0


class ProxyAccess:
    """Addresses and credentials for the proxy of one fleet."""

    def __init__(self, fleet: FleetFile) -> None:
        self.admin_url = fleet.admin_url()
        self._tls = fleet.proxy_tls()
        self._name = f"launcher-{secrets.token_hex(4)}"
        self._key = f"wr-{secrets.token_urlsafe(32)}" if fleet.admin_needs_key() else None
        self._context: ssl.SSLContext | None = None
        self._read: FileVersion | None = None
        """The certificate's file as it was read."""

    def write_config(self, config: dict[str, Any], path: Path) -> None:
        """Write the proxy's settings as its process reads them, `with_key`, for the owner only: they may have secrets.

        Raises:
            StartError: the file cannot be written.
        """
        with required():
            replace_file(path, yaml.safe_dump(self.with_key(config), sort_keys=False).encode(), private=True)

    def with_key(self, config: dict[str, Any]) -> dict[str, Any]:
        """The proxy's settings, with the hash of the launcher's key where its admin side needs one."""
        if self._key is None:
            return config
        entry = {"name": self._name, "sha256": hashlib.sha256(self._key.encode()).hexdigest()}
        keys = config.get("keys") or {}
        return {**config, "keys": {**keys, "admin": [*(keys.get("admin") or ()), entry]}}

    def read_certificate(self) -> None:
        """Trust the certificate that is in the file now; to be called whenever the proxy starts.

        Raises:
            ValueError: the file is not readable, or has no certificate.
        """
        if self._tls is None:
            return
        assert self._tls.certificate is not None
        self._read = FileVersion.of(self._tls.certificate)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        # Only the first one, the proxy's own: others that its issuer signed are not accepted.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        _trust(context, self._tls)
        self._context = context

    def client(self, timeout_s: float = _TIMEOUT_S) -> httpx.AsyncClient:
        """A client for the proxy alone: it sends the key with every request, and uses no proxy of the environment."""
        self._look()
        return httpx.AsyncClient(
            timeout=timeout_s,
            headers={} if self._key is None else {"authorization": f"Bearer {self._key}"},
            verify=self._context or False,  # without a context nothing is sent over TLS
            trust_env=False,
        )

    def _look(self) -> None:
        """Trust the certificate in the file too if that has changed."""
        if self._context is None or self._tls is None or self._tls.certificate is None:
            return
        version = FileVersion.of(self._tls.certificate)
        if version is not None and version != self._read:
            with contextlib.suppress(ValueError):  # half written: the next client looks again
                _trust(self._context, self._tls)
                self._read = version


def _trust(context: ssl.SSLContext, tls: TlsSettings) -> None:
    """Add the first certificate of the file. Raises ValueError: it is not readable, or has none."""
    assert tls.certificate is not None
    try:
        found = _PEM.search(tls.certificate.read_text(encoding="utf-8"))
        if found is None:
            raise ValueError("it contains no certificate")
        context.load_verify_locations(cadata=found[0])
        if tls.client_ca is not None:
            # The one certificate that the launcher has; `tls.client_ca` must have signed it for clients too.
            context.load_cert_chain(tls.certificate, tls.key, password="")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"proxy.tls.certificate {tls.certificate}: {error}") from error
