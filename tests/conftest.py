"""Shared fixtures and settings: what every proxy reads is read once per session."""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import os
import signal
import socket
import ssl
import sys
import types
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import EntryPoints, entry_points
from typing import Any

import certifi
import pytest
import typer.main
import typer.testing
import typer.utils
from fastapi import routing
from fastapi.datastructures import DefaultPlaceholder
from hypothesis import settings
from pydantic_settings import EnvSettingsSource

import warmroute
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with the marker `first` come first, so that no process of pytest is left alone with one in the end."""
    items.sort(key=lambda item: item.get_closest_marker("first") is None)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Read once what is installed, and report to the first process of pytest without delay.

    Every proxy looks at what is installed, package by package; two thousand of them, and modules that make policies
    when they are collected, need not. The command line is also put together once.
    """
    no_delay(config)

    @functools.cache
    def installed(group: str, path: tuple[str, ...]) -> EntryPoints:
        return original(group=group)

    def read_once(**query: Any) -> EntryPoints:
        return installed(query["group"], tuple(sys.path))

    original, patch = entry_points, pytest.MonkeyPatch()
    patch.setattr(registry, "entry_points", read_once)
    # Before the modules of tests import it.
    patch.setattr(warmroute, "build", functools.cache(warmroute.build))
    config.add_cleanup(patch.undo)


def no_delay(config: pytest.Config) -> None:
    """Set TCP_NODELAY on the socket by which pytest-rerunfailures asks, before each test, how often it has failed.

    It sends what needs no answer last, so without the option the question of the next test waits 40 ms for the
    acknowledgement of that.
    """
    connection = getattr(getattr(config, "failures_db", None), "sock", None)
    if isinstance(connection, socket.socket):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


@contextmanager
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


@contextmanager
def _routes_made_once() -> Iterator[None]:
    """Every proxy makes the same routes and validators of their parameters: a fifth of the time of such a test.

    The state of a route is shared by the endpoints that one ``def`` makes, if their annotations are texts: these are
    evaluated in the globals alone. Processes that tests start make their own.
    """
    made: dict[tuple[Any, ...], tuple[dict[str, Any], dict[str, Any]]] = {}
    """By what a route is made of: its state, and the options, which stay alive, and with them what the key names."""

    def shared(route: Any, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        if not isinstance(endpoint, types.FunctionType) or hasattr(endpoint, "__wrapped__") or endpoint.__kwdefaults__:
            original(route, path, endpoint, **options)
            return
        written, defaults = endpoint.__annotations__, endpoint.__defaults__ or ()
        texts = all(isinstance(each, str) for each in written.values())
        if not texts or not all(each is None or isinstance(each, bool | int | float | str) for each in defaults):
            original(route, path, endpoint, **options)
            return
        own = {"endpoint": endpoint, "dependency_overrides_provider": options["dependency_overrides_provider"]}
        code = (endpoint.__code__, id(endpoint.__globals__), endpoint.__name__, endpoint.__doc__, repr(defaults))
        said = {
            name: (value.value, "default") if isinstance(value, DefaultPlaceholder) else value
            for name, value in options.items()
            if name not in own
        }
        key = (type(route), path, *code, repr(written), repr(said))
        if key not in made:
            before = dict(vars(route))
            original(route, path, endpoint, **options)
            after = vars(route).items()
            made[key] = ({name: value for name, value in after if before.get(name, made) is not value}, said)
            return
        for name, value in made[key][0].items():
            setattr(route, name, value.copy() if isinstance(value, list | dict | set) else value)
        vars(route).update(own, dependant=dataclasses.replace(route.dependant, call=endpoint))

    def line(endpoint: Any) -> Any:
        """FastAPI parses the source of an endpoint at its first request, for its errors of validation."""
        code = getattr(endpoint, "__code__", endpoint)
        if code not in lines:
            lines[code] = of_endpoint(endpoint)
        return lines[code]

    lines: dict[Any, Any] = {}
    original, of_endpoint = routing._populate_api_route_state, routing._extract_endpoint_context
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "_populate_api_route_state", shared)
        patch.setattr(routing, "_extract_endpoint_context", line)
        yield


@contextmanager
def _environment_read_if_it_has_settings() -> Iterator[None]:
    """Every proxy looks for each of its settings among all variables, of which none has one in most tests: 4 ms."""

    def values(source: EnvSettingsSource) -> dict[str, Any]:
        names = tuple(f"{source.env_prefix}{name}".lower() for name in source.settings_cls.model_fields)
        return original(source) if any(each.lower().startswith(names) for each in source.env_vars) else {}

    original = EnvSettingsSource.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EnvSettingsSource, "__call__", values)
        yield


@contextmanager
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


@contextmanager
def _commands_made_once() -> Iterator[None]:
    """Every call of the command line makes all commands with their options again: half of the time of such a test."""
    made: weakref.WeakKeyDictionary[typer.Typer, tuple[tuple[int, int], Any]] = weakref.WeakKeyDictionary()

    def shared(app: typer.Typer) -> Any:
        size = len(app.registered_commands), len(app.registered_groups)
        if app not in made or made[app][0] != size:
            made[app] = size, original(app)
        return made[app][1]

    original = typer.main.get_command
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", shared)
        yield


@pytest.fixture(scope="session", autouse=True)
def _made_once() -> Iterator[None]:
    """One fixture for all of these: pytest looks at each before every test, nine thousand times."""
    with ExitStack() as stack:
        for once in (
            _authorities_read_once,
            _routes_made_once,
            _environment_read_if_it_has_settings,
            _options_read_once,
            _commands_made_once,
        ):
            stack.enter_context(once())
        yield


@pytest.fixture(autouse=True)
def _levels_and_signals() -> Iterator[None]:
    """Levels of logs and the blocked SIGHUP of a proxy that began in this process do not reach the next test."""
    loggers = [logging.getLogger(name) for name in ("", "uvicorn", "uvicorn.error", "httpx", "httpcore", "asyncio")]
    before, blocked = [logger.level for logger in loggers], signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    for logger, level in zip(loggers, before, strict=True):
        if logger.level != level:  # to set one looks at every logger there is
            logger.setLevel(level)
