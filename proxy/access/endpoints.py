"""Paths of all endpoints and their methods, for requests that no endpoint can answer."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from starlette.routing import compile_path

from proxy.paths import first_part


class Endpoints:
    """Endpoints as registered. Without any, and if one may begin with anything, every path may be an endpoint's.

    Args:
        registered: path, with parameters in braces, and methods of each; a path may come several times.
    """

    def __init__(self, registered: Iterable[tuple[str, Collection[str]]] = ()) -> None:
        known = [(path, frozenset(methods)) for path, methods in registered]
        self._patterns = [(compile_path(path)[0], methods) for path, methods in known]
        parts = frozenset(first_part(path) for path, _ in known)
        self._first_parts = None if any(not part or "{" in part for part in parts) else parts or None

    def may_have(self, path: str) -> bool:
        """False if no endpoint's path begins as this one; compared without regard to case and to slashes at the end."""
        return self._first_parts is None or first_part(path) in self._first_parts

    def methods(self, path: str) -> tuple[str, ...]:
        """Methods of a path, sorted; empty if no endpoint has the path."""
        return tuple(
            sorted(frozenset().union(*(methods for pattern, methods in self._patterns if pattern.match(path))))
        )
