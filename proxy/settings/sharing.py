"""Settings of the state that replicas of the proxy share."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

from proxy.settings.environment import checked_secret, secret_from
from proxy.settings.section import Seconds, Section

_NAME = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_SCHEMES = ("redis", "rediss", "unix")


class SharingSettings(Section):
    """State shared with the other replicas in front of the same fleet."""

    url: str | None = Field(
        default=None,
        description="Redis or Valkey: redis://HOST:PORT/DB, rediss:// with TLS, or unix:///PATH; none: nothing is "
        "shared. Needs the extra redis",
    )
    password_env: str | None = Field(default=None, description="environment variable with the store's password")
    password: SecretStr | None = Field(
        default=None, description="the password itself; password_env keeps it out of files"
    )
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,64}$")] = Field(
        default="warmroute", description="beginning of every key in the store; the same for all replicas of one fleet"
    )
    replica: str | None = Field(
        default=None, description="name of this replica, unique among them; none: host name and process id"
    )
    ttl_s: Annotated[float, Field(ge=0.5, le=60)] = Field(
        default=3.0, description="time without news after which the load of a replica is forgotten"
    )
    publish_interval_s: Annotated[float, Field(ge=0.01, le=5)] = Field(
        default=0.05, description="shortest time between two reports of this replica's changes"
    )
    parts: bool = Field(
        default=True,
        description="each replica places new work on a part of the fleet of its own, if it has eight instances or more "
        "for each replica",
    )
    timeout_s: Seconds = Field(default=1.0, description="bound on one exchange with the store")
    start_s: float = Field(
        default=3.0, ge=0, description="time that the start of the proxy waits for the shared state to be read"
    )

    @field_validator("url")
    @classmethod
    def _store_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        if parts.scheme not in _SCHEMES or not (parts.hostname or (parts.scheme == "unix" and parts.path)):
            raise ValueError("give redis://HOST:PORT/DB, rediss://HOST:PORT/DB or unix:///PATH")
        if parts.password is not None:
            raise ValueError("the URL must not contain a password: give sharing.password_env")
        return value

    @field_validator("replica")
    @classmethod
    def _plain_name(cls, value: str | None) -> str | None:
        if value is not None and not _NAME.fullmatch(value):
            raise ValueError("give at most 64 letters, digits and . _ : -")
        return value

    @field_validator("password")
    @classmethod
    def _plain_secret(cls, value: SecretStr | None) -> SecretStr | None:
        return None if value is None else checked_secret(value, "sharing.password")

    @model_validator(mode="after")
    def _fits(self) -> SharingSettings:
        if self.password is not None and self.password_env is not None:
            raise ValueError("password and password_env: give one of them")
        if self.publish_interval_s > self.ttl_s / 4:
            raise ValueError("publish_interval_s must be at most a quarter of ttl_s")
        self.store_password()
        return self

    def store_password(self) -> SecretStr | None:
        """The store's password; None: it has none. Raises ValueError if the environment variable is not set."""
        if self.password is not None or self.password_env is None:
            return self.password
        return secret_from(self.password_env, "password_env", "the store's password")
