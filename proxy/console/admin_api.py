"""Admin endpoints of a running proxy, as its own commands read them."""

from __future__ import annotations

from types import TracebackType
from typing import Any, TypeVar

import httpx
import msgspec

from proxy.connecting import checked_url, unreached_remedy
from warmroute_tls import NO_FILES, TlsFiles, tls_context

_Kind = TypeVar("_Kind")


class NoAnswerError(Exception):
    """A proxy that does not answer, or refuses; the message has the remedy."""


class AdminApi:
    """Client of one proxy's admin endpoints; a context manager.

    Args:
        url: of the proxy, or of its admin listener.
        key: admin key; None: none is sent.
        files: certificates for TLS.
        timeout_s: bound on connecting, and on each wait for data.

    Raises:
        NoAnswerError: the URL, the key or a file cannot be used.
    """

    def __init__(self, url: str, key: str | None, files: TlsFiles = NO_FILES, timeout_s: float = 10.0) -> None:
        if key and not (key.isascii() and key.isprintable()):  # the HTTP library's error would show it
            raise NoAnswerError(
                "the admin key has a line break or another character that no header can carry: "
                "correct --key or WARMROUTE_ADMIN_KEY"
            )
        headers = {"authorization": f"Bearer {key}"} if key else {}
        try:
            self.url = checked_url(url, "--url").rstrip("/")
            context = tls_context(files)
        except ValueError as error:
            raise NoAnswerError(str(error)) from error
        self._files = files
        self._client = httpx.Client(
            base_url=self.url, headers=headers, timeout=timeout_s, trust_env=False, verify=context
        )

    def __enter__(self) -> AdminApi:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def get(self, path: str, **query: str | int | float) -> dict[str, Any]:
        """The JSON object of a path; 503 of ``/ready`` counts as an answer.

        Raises:
            NoAnswerError: no answer, an error, or no JSON object.
        """
        return self.read(path, dict[str, Any], **query)

    def read(self, path: str, kind: type[_Kind], **query: str | int | float) -> _Kind:
        """The JSON of a path as a type that msgspec knows, like ``get``."""
        try:
            answer = self._client.get(path, params=query)
        except httpx.HTTPError as error:
            remedy = unreached_remedy(error, self.url, "--url", self._files) or "is the proxy running? --url names it"
            raise NoAnswerError(f"no answer from {self.url} ({error or type(error).__name__}): {remedy}") from error
        if answer.is_error and not (path == "/ready" and answer.status_code == 503):
            raise NoAnswerError(f"{self.url}{path}: {answer.status_code} {_message(answer)}{_remedy(answer)}")
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise NoAnswerError(f"{self.url}{path} is not a proxy's: {error}") from error


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.reason_phrase


def _remedy(answer: httpx.Response) -> str:
    if answer.status_code == 401:
        return "; give an admin key with --key or in WARMROUTE_ADMIN_KEY"
    if answer.status_code == 404 and _message(answer) == answer.reason_phrase:
        return "; is a warmroute proxy there? --url names it"
    return ""
