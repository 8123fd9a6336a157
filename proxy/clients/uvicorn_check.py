"""Start-up check of the parts of uvicorn that the listener uses and that are not uvicorn's public interface."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from types import MappingProxyType
from typing import Any

import uvicorn

SUPPORTED = ">=0.54,<0.55"
"""Versions whose private parts were read and tested; the same bounds are in pyproject.toml."""

_PROTOCOL = "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol"
_METHODS = MappingProxyType(
    {
        _PROTOCOL: (
            *("_start_asgi_task", "_unset_keepalive_if_required", "connection_lost", "connection_made"),
            *("data_received", "on_body", "on_headers_complete", "on_message_complete", "on_response_complete"),
            *("pause_writing", "resume_writing", "send_400_response", "shutdown", "timeout_keep_alive_handler"),
        ),
        "uvicorn.protocols.http.flow_control:FlowControl": ("pause_reading",),
        "uvicorn.server:Server": ("_log_started_message", "capture_signals", "shutdown", "startup"),
    }
)
"""Methods that are overridden or called, by class."""
_ATTRIBUTES = MappingProxyType(
    {
        (_PROTOCOL, ("__init__", "on_message_begin")): (
            *("app", "cycle", "expect_100_continue", "flow", "headers", "loop", "parser", "pipeline"),
            *("server_state", "tasks", "transport", "url"),
        ),
        ("uvicorn.protocols.http.httptools_impl:RequestResponseCycle", ("__init__",)): (
            *("keep_alive", "message_event", "response_complete"),
        ),
        ("uvicorn.server:ServerState", ("__init__",)): ("connections", "default_headers", "tasks"),
        ("uvicorn.server:Server", ("__init__", "startup", "_serve")): (
            *("config", "lifespan", "servers", "server_state", "should_exit", "started"),
        ),
    }
)
"""Attributes that are read or set, by class and the methods that assign them."""


class UnsupportedUvicornError(RuntimeError):
    """The installed uvicorn lacks private parts that the listener uses; the message names them and the fix."""


def check_uvicorn() -> None:
    """Verify that the installed uvicorn has every private name the listener relies on.

    Raises:
        UnsupportedUvicornError: it does not.
    """
    missing = list(_missing())
    if missing:
        raise UnsupportedUvicornError(
            f"uvicorn {uvicorn.__version__} lacks {', '.join(missing)}, which the proxy's listener is built on: "
            f"pip install 'uvicorn{SUPPORTED}'"
        )


def _missing() -> Iterator[str]:
    for path in sorted({*_METHODS, *(path for path, _ in _ATTRIBUTES)}):
        if _class(path) is None:
            yield path.replace(":", ".")
    for path, names in _METHODS.items():
        owner = _class(path)
        yield from (f"{owner.__name__}.{name}" for name in names if owner is not None and not hasattr(owner, name))
    for (path, methods), names in _ATTRIBUTES.items():
        owner = _class(path)
        if owner is not None:
            assigned = {name for method in methods for name in _names_used(getattr(owner, method, None))}
            yield from (f"{owner.__name__}.{name}" for name in names if name not in assigned)


def _class(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name, None)
    except ImportError:
        return None


def _names_used(method: Any) -> tuple[str, ...]:
    """Attribute names in a method's code; an instance cannot be made without a connection."""
    code = getattr(inspect.unwrap(method), "__code__", None) if method is not None else None
    return code.co_names if code is not None else ()
