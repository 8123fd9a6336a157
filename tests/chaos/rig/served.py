"""A proxy in a thread of its own, for test tools that call it synchronously."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from proxy.settings import load_settings
from tests.chaos.rig.engine import ChaosEngine
from tests.proxy.conftest import serving

KEY = "a-key-for-tests"
AUTHORIZATION = {"authorization": f"Bearer {KEY}"}


class _Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(self.format(record))


@dataclass
class Served:
    """A running proxy."""

    url: str = ""
    failure: BaseException | None = None
    ready: threading.Event = field(default_factory=threading.Event)
    ending: threading.Event = field(default_factory=threading.Event)
    _errors: _Errors = field(default_factory=_Errors)

    def errors(self) -> list[str]:
        """Log records at level ERROR or above."""
        return self._errors.messages


async def _serve(served: Served) -> None:
    engine = await ChaosEngine().start()
    admin: dict[str, Any] = {"name": "test", "sha256": hashlib.sha256(KEY.encode()).hexdigest()}
    try:
        settings = load_settings(
            None,
            port=0,
            instances=[{"name": "inst-0", "url": engine.url}],
            keys={"admin": [admin]},
            breakdown={"max_followers": 0},  # generated requests wait for the end of an answer
            health={"interval_s": 0.5, "timeout_s": 10.0},
            log_level="error",
        )
        async with serving(settings) as (_, served.url):
            served.ready.set()
            await asyncio.to_thread(served.ending.wait)
    except BaseException as error:
        served.failure = error
        raise
    finally:
        served.ready.set()
        await engine.stop()


@contextmanager
def proxy_in_thread() -> Iterator[Served]:
    """One well-behaved engine and a proxy with one admin key."""
    served = Served()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(served)), name="served")
    logging.getLogger().addHandler(served._errors)
    thread.start()
    try:
        assert served.ready.wait(60)
        assert served.failure is None
        yield served
    finally:
        served.ending.set()
        thread.join(30)
        logging.getLogger().removeHandler(served._errors)
