"""Shared fixtures and settings: what every proxy reads is read once per session."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import os
import signal
import ssl
import sys
import types
import weakref
from collections.abc import Callable, Generator, Iterator
from importlib.metadata import EntryPoints, entry_points
from typing import Any

import certifi
import pytest
import typer.main
import typer.utils
from fastapi._compat.v2 import ModelField, asdict
from fastapi.dependencies import utils as dependencies
from hypothesis import settings

from policies import registry
from proxy.memory import GENERATIONS

# Property tests have no deadline per example: they check behaviour, not the load of the machine.
settings.register_profile("warmroute", deadline=None, max_examples=50)
settings.load_profile("warmroute")


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A job in the background of a script ignores Ctrl-C, and so would the commands that the tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)


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


def pytest_configure(config: pytest.Config) -> None:
    """Every proxy looks at what is installed, package by package; two thousand of them, and modules that make policies
    when they are collected, need not."""

    @functools.cache
    def installed(group: str, path: tuple[str, ...]) -> EntryPoints:
        return original(group=group)

    def read_once(**query: Any) -> EntryPoints:
        return installed(query["group"], tuple(sys.path))

    original, patch = entry_points, pytest.MonkeyPatch()
    patch.setattr(registry, "entry_points", read_once)
    config.add_cleanup(patch.undo)


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
    """Every proxy evaluates the annotations of the same endpoints: a tenth of the time of a test that starts one.

    A signature is shared by the functions that one ``def`` makes, if their annotations are texts: these are evaluated
    in the globals alone.
    """
    made: dict[tuple[Any, ...], inspect.Signature] = {}

    def shared(call: Callable[..., Any]) -> inspect.Signature:
        if not isinstance(call, types.FunctionType) or hasattr(call, "__wrapped__") or call.__kwdefaults__:
            return original(call)
        written, defaults = call.__annotations__, call.__defaults__ or ()
        texts = all(isinstance(each, str) for each in written.values())
        if not texts or not all(each is None or isinstance(each, bool | int | float | str) for each in defaults):
            return original(call)
        key = (call.__code__, id(call.__globals__), tuple(written.items()), *map(repr, defaults))
        if key not in made:
            made[key] = original(call)
        return made[key]

    original = dependencies._get_signature
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dependencies, "_get_signature", shared)
        yield


@pytest.fixture(scope="session", autouse=True)
def _options_read_once() -> Iterator[None]:
    """Every call of the command line evaluates the options of all commands, thrice: a tenth of a second."""
    made: weakref.WeakKeyDictionary[Callable[..., Any], dict[str, Any]] = weakref.WeakKeyDictionary()

    def shared(command: Callable[..., Any]) -> dict[str, Any]:
        if not isinstance(command, types.FunctionType):
            return original(command)
        if command not in made:
            made[command] = original(command)
        return made[command]

    original = typer.utils.get_params_from_function
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_params_from_function", shared)
        yield


@pytest.fixture(autouse=True)
def _log_levels() -> Iterator[None]:
    """The levels that a proxy served in this process has set, or reloaded, do not reach the next test."""
    loggers = [logging.getLogger(name) for name in ("", "uvicorn", "uvicorn.error", "httpx", "httpcore", "asyncio")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)
