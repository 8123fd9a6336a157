"""Settings of security: keys, the admin side, TLS."""

from __future__ import annotations

import re
import ssl
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, StringConstraints, ValidationError, field_validator, model_validator

from proxy.settings.section import Seconds, Section
from warmroute_yaml import load_yaml

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$", to_lower=True)]
KeyLabel = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._@-]{1,64}$")]

_TLS_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
_LOCAL_NETWORKS = ("127.0.0.0/8", "::1/128", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")


class AdminKey(Section):
    """A key for the admin endpoints."""

    name: KeyLabel = Field(description="name of its holder, for logs")
    sha256: Digest = Field(
        description="SHA-256 of the key, in hex; `warmroute key new` and `warmroute key hash` print it"
    )


class ClientKey(AdminKey):
    """A key for the OpenAI endpoints. Its name is the tenant of its requests."""

    max_concurrent: int | None = Field(default=None, ge=1, description="maximum requests in flight; none: unlimited")
    max_sessions: int | None = Field(
        default=None,
        ge=1,
        description="maximum sessions with a request in flight or ended within the last minute; none: unlimited",
    )
    max_requests_per_min: int | None = Field(default=None, ge=1, description="requests per minute; none: unlimited")
    max_tokens_per_min: int | None = Field(
        default=None, ge=1, description="prompt and completion tokens per minute; none: unlimited"
    )
    weight: float = Field(
        default=1.0, ge=0.01, le=100, description="share of the fleet under load, relative to other keys' weights"
    )
    priority: int = Field(
        default=0, ge=-100, le=100, description="waiting requests go ahead of those of keys with a lower one"
    )
    allow_priority: bool = Field(
        default=False, description="accept the body field `priority`, which the engine's scheduler reads"
    )
    names_tenant: bool = Field(
        default=False, description="the key of a trusted front door: its requests' tenant is in fairness.tenant_header"
    )


class KeyLists(Section):
    """Keys of both sides."""

    client: tuple[ClientKey, ...] = Field(
        default=(), description="keys for /v1/*, each {name, sha256, max_concurrent, …}; none: no key is required"
    )
    admin: tuple[AdminKey, ...] = Field(
        default=(), description="keys for the admin endpoints, each {name, sha256}; none: see docs/security.md"
    )

    @model_validator(mode="after")
    def _distinct(self) -> KeyLists:
        both = [*self.client, *self.admin]
        for what, seen in (
            ("name", [f"client {key.name}" for key in self.client] + [f"admin {key.name}" for key in self.admin]),
            ("sha256", [key.sha256 for key in both]),
        ):
            twice = sorted({item for item in seen if seen.count(item) > 1})
            if twice:
                raise ValueError(f"two keys have the same {what}: {', '.join(twice)}")
        return self


class KeySettings(KeyLists):
    """API keys, stored as hashes only."""

    file: Path | None = Field(
        default=None, description="YAML file with more keys (`client:` and `admin:`), read again on a reload"
    )

    @model_validator(mode="after")
    def _readable(self) -> KeySettings:
        self.lists()
        return self

    def lists(self) -> KeyLists:
        """The keys given here and those of the file, which is read again.

        Raises:
            ValueError: the file is missing, is invalid, or has no key at all.
        """
        here = KeyLists(client=self.client, admin=self.admin)
        if self.file is None:
            return here
        try:
            written: Any = load_yaml(self.file.read_text(encoding="utf-8"))
            listed = KeyLists.model_validate({} if written is None else written)
            # An emptied file must not open the proxy to any client.
            if not listed.client and not listed.admin:
                raise ValueError("it has no key under `client:` or `admin:`")
            return KeyLists(client=here.client + listed.client, admin=here.admin + listed.admin)
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(str(part) for part in problem['loc']) or 'keys'}: {problem['msg']}"
                for problem in error.errors(include_input=False)
            )
            raise ValueError(f"keys.file {self.file}: {problems}") from error
        except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError) as error:
            raise ValueError(f"keys.file {self.file}: {error}") from error


class FairnessSettings(Section):
    """Tenants that share the fleet fairly, besides those of client keys."""

    tenant_header: str | None = Field(
        default=None,
        description="request header with the tenant, set by a trusted front door: read from keys with names_tenant, "
        "and from everybody if there are no client keys; none: the key's name is the tenant",
    )

    @field_validator("tenant_header")
    @classmethod
    def _is_a_header(cls, value: str | None) -> str | None:
        if value is not None and not _TOKEN.fullmatch(value.lower()):
            raise ValueError(f"{value!r} is not a header name")
        return value


class AdminSettings(Section):
    """Address and permissions of the admin endpoints."""

    host: str = Field(default="127.0.0.1", description="address of the admin listener")
    port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="port of a separate listener for the admin endpoints; none: they are on the main one, if it is "
        "loopback or has admin keys",
    )
    open_metrics: bool = Field(default=False, description="serve /metrics without a key to any client")
    allowed_hosts: tuple[str, ...] = Field(
        default=(), description="additional names accepted in Host and Origin headers of admin requests without a key"
    )
    allowed_networks: tuple[IPv4Network | IPv6Network, ...] = Field(
        default=tuple(ip_network(network) for network in _LOCAL_NETWORKS),
        description="networks allowed for instances added at run time",
    )

    @field_validator("allowed_hosts")
    @classmethod
    def _lower_case(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name.lower() for name in value)


class TlsSettings(Section):
    """TLS on the proxy's listeners."""

    certificate: Path | None = Field(default=None, description="PEM file with the certificate chain; none: plain HTTP")
    key: Path | None = Field(default=None, description="PEM file with its private key, not encrypted")
    client_ca: Path | None = Field(
        default=None, description="PEM file with the CAs of client certificates; if given, every client needs one"
    )
    min_version: Literal["1.2", "1.3"] = Field(default="1.2", description="oldest TLS version accepted")
    handshake_s: Seconds = Field(default=10.0, description="bound on a client's TLS handshake")

    @model_validator(mode="after")
    def _complete(self) -> TlsSettings:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("tls.certificate and tls.key go together: give both or neither")
        if self.client_ca is not None and self.certificate is None:
            raise ValueError("tls.client_ca: give tls.certificate and tls.key too")
        for name in ("certificate", "key", "client_ca"):
            path: Path | None = getattr(self, name)
            if path is not None and not path.is_file():
                raise ValueError(f"tls.{name}: no file at {path}")
        self.context()
        return self

    def context(self) -> ssl.SSLContext | None:
        """TLS context of a listener, read from the files; None for plain HTTP.

        Raises:
            ValueError: a file is invalid.
        """
        if self.certificate is None or self.key is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = _TLS_VERSIONS[self.min_version]
        context.set_alpn_protocols(["http/1.1"])
        try:
            # An empty password: an encrypted key is an error instead of a prompt on the terminal.
            context.load_cert_chain(self.certificate, self.key, password="")
        except (OSError, ssl.SSLError) as error:
            raise ValueError(
                f"tls.certificate {self.certificate} and tls.key {self.key} are not a PEM certificate with unencrypted "
                f"key: {error}"
            ) from error
        if self.client_ca is not None:
            try:
                context.load_verify_locations(self.client_ca)
            except (OSError, ssl.SSLError) as error:
                raise ValueError(f"tls.client_ca {self.client_ca} contains no PEM certificates: {error}") from error
            context.verify_mode = ssl.CERT_REQUIRED
        return context


_TOKEN = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+")
ALL_HEADERS = "*"
"""Entry of ``forward_headers`` for all headers that ``proxy.access.forwarding`` does not withhold."""
# Hop-by-hop, or written by the proxy itself, or containing a secret.
NEVER_FORWARDED = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "host",
        "content-length",
        "content-type",
        "content-encoding",
        "accept-encoding",
        "expect",
        "x-request-id",
        "authorization",
        "cookie",
        "x-api-key",
        "api-key",
    }
)


def checked_forward_headers(names: tuple[str, ...]) -> tuple[str, ...]:
    """``forward_headers`` in lower case.

    Raises:
        ValueError: a name is not a header name, or must not be forwarded.
    """
    lowered = tuple(dict.fromkeys(name.strip().lower() for name in names))
    for name in lowered:
        if not _TOKEN.fullmatch(name):
            raise ValueError(f"{name!r} is not a header name")
        if name in NEVER_FORWARDED:
            what = "see engine_key_env" if name == "authorization" else "the proxy sets or consumes it"
            raise ValueError(f"{name} cannot be forwarded: {what}")
    return lowered
