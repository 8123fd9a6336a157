"""Shared fixtures and settings: what every proxy reads is read once per session."""

from __future__ import annotations

import functools
import gc
import logging
import os
import ssl
import sys
from collections.abc import Generator, Iterator
from dataclasses import replace
from importlib.metadata import EntryPoints, entry_points
from types import FunctionType
from typing import Any

import certifi
import pytest
from fastapi import routing
from fastapi._compat.v2 import ModelField, asdict
from fastapi.dependencies.models import Dependant
from fastapi.dependencies.utils import get_dependant, get_typed_return_annotation
from hypothesis import settings

from policies import registry
from proxy.memory import GENERATIONS

# Property tests have no deadline per example: they check behaviour, not the load of the machine.
settings.register_profile("warmroute", deadline=None, max_examples=50)
settings.load_profile("warmroute")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector and leave what was collected out of its later runs: a million objects.

    Later it runs as often as in a proxy (``proxy.memory``): by default it would be a fifth of the time of some tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(*GENERATIONS)
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _entry_points_read_once() -> Iterator[None]:
    """Every proxy looks at what is installed, package by package; two thousand of them need not."""

    @functools.cache
    def installed(group: str, path: tuple[str, ...]) -> EntryPoints:
        return original(group=group)

    def read_once(**query: Any) -> EntryPoints:
        return installed(query["group"], tuple(sys.path))

    original = entry_points
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "entry_points", read_once)
        yield


@pytest.fixture(scope="session", autouse=True)
def _authorities_read_once() -> Iterator[None]:
    """Every proxy and every httpx client reads 150 certificates, mostly to speak plain HTTP."""

    @functools.cache
    def shared(cafile: str | None, _environment: tuple[str | None, ...]) -> ssl.SSLContext:
        return original(cafile=cafile)

    def create_default_context(*purpose: Any, cafile: str | None = None, **more: Any) -> ssl.SSLContext:
        # A context with another file belongs to its test, which may change it.
        if purpose or more or cafile not in {None, certifi.where()}:
            return original(*purpose, cafile=cafile, **more)
        return shared(cafile, (os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")))

    original = ssl.create_default_context
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", create_default_context)
        yield


@pytest.fixture(scope="session", autouse=True)
def _parameters_compiled_once() -> Iterator[None]:
    """Every proxy makes the same 90 validators of parameters: a fifth of the time of a test that starts one.

    A validator is shared where its declaration is the same; processes that tests start make their own.
    """
    made: dict[tuple[Any, ...], ModelField] = {}
    """By what a validator is made of; the first field stays alive, and with it all that its key's text names."""

    def shared(field: ModelField) -> None:
        declared = (field.field_info.annotation, repr(asdict(field.field_info)), repr(field.config))
        try:
            known = made.get(declared)
        except TypeError:  # an annotation that has no hash
            original(field)
            return
        if known is None:
            original(field)
            made[declared] = field
        else:
            field._type_adapter = known._type_adapter

    original = ModelField.__post_init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelField, "__post_init__", shared)
        yield


@pytest.fixture(scope="session", autouse=True)
def _signatures_read_once() -> Iterator[None]:
    """Every proxy has the same 40 endpoints, as new functions of the same code: half the time of declaring them.

    What FastAPI derives from a function is shared with those of the same code, path, annotations and defaults.
    """
    dependants: dict[Any, Dependant] = {}
    returned: dict[Any, Any] = {}
    contexts: dict[Any, Any] = {}

    def declared(call: Any, *more: Any) -> Any:
        """A key for what the signature of ``call`` comes from; None for other callables than plain functions."""
        if not isinstance(call, FunctionType) or call.__dict__:
            return None
        defaults = (*(call.__defaults__ or ()), *(call.__kwdefaults__ or {}).items())
        key = (call.__code__, *call.__annotations__.items(), defaults, *more)
        try:
            hash(key)
        except TypeError:
            return None
        return key

    def dependant_of(*, path: str, call: Any, **more: Any) -> Dependant:
        key = declared(call, path, *more.items())
        if key is None:
            return get_dependant(path=path, call=call, **more)
        if key not in dependants:
            dependants[key] = get_dependant(path=path, call=call, **more)
        known = dependants[key]
        return replace(known, call=call, dependencies=[*known.dependencies])

    def returned_by(call: Any) -> Any:
        key = declared(call)
        if key is None:
            return get_typed_return_annotation(call)
        if key not in returned:
            returned[key] = get_typed_return_annotation(call)
        return returned[key]

    def context_of(call: Any) -> Any:
        if call.__code__ not in contexts:
            contexts[call.__code__] = context_in_file(call)
        return contexts[call.__code__]

    context_in_file = routing._extract_endpoint_context
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "_extract_endpoint_context", context_of)
        patch.setattr(routing, "get_dependant", dependant_of)
        patch.setattr(routing, "get_typed_return_annotation", returned_by)
        yield


@pytest.fixture(autouse=True)
def _log_levels() -> Iterator[None]:
    """The levels that a proxy served in this process has set, or reloaded, do not reach the next test."""
    loggers = [logging.getLogger(name) for name in ("", "uvicorn", "uvicorn.error", "httpx", "httpcore", "asyncio")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)
