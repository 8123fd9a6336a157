"""One worker: a proxy on the shared port, in a process that ends with its parent."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import cast

from proxy import logs, memory
from proxy.app import ProxyApp
from proxy.clients.bounds import raise_descriptor_limit
from proxy.gather.place import Place
from proxy.operations.reload import ReloadReport
from proxy.operations.shutdown import ProxyServer
from proxy.server import server_config
from proxy.settings import Settings, SettingsError, load_settings
from proxy.sharing.frames import Ending, Order, Reloaded, Reread, Serving
from proxy.sharing.line import ParentLine, WorkerIdentity
from proxy.tokens.encoder import TokenizerError
from proxy.workers.own_settings import own_settings
from proxy.workers.start import STACKS_SIGNAL, decode_start

log = logging.getLogger("warmroute.workers")

INVALID = 2
"""Exit status of invalid settings."""
_PR_SET_PDEATHSIG = 1


def main(argument: str) -> None:
    """Serve until the parent or a signal ends it; then exit."""
    start = decode_start(argument)
    _end_with_parent(start.parent_pid)
    # Written by the signal handler itself, so also while Python code cannot run.
    faulthandler.register(STACKS_SIGNAL, start.stacks)

    def load() -> Settings:
        settings = load_settings(None if start.config is None else Path(start.config), **start.flags)
        return own_settings(settings, start.worker, start.port, start.admin_port)

    try:
        settings = load()
        logs.configure(settings.log_level, settings.log_format, worker=start.worker)
        raise_descriptor_limit()
        line = ParentLine(socket.socket(fileno=start.descriptor))
        place = Place(WorkerIdentity(start.worker, line, start.clock_offset_s), Path(start.folder))
        config = server_config(settings, place)
    except (SettingsError, TokenizerError) as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(INVALID)
    app = cast(ProxyApp, config.app)
    app.operations.reloader.load = load
    server = ProxyServer(config, app.core, app.operations.reloader.on_hangup)

    def obey(order: Order) -> None:
        if order is Order.RELOAD:
            app.operations.reloader.on_hangup(lambda: line.send(Reread()))
            return
        if order is Order.HURRY or not server.should_exit:
            server.end()
        line.send(Ending(app.core.settings.drain_delay_s + app.core.settings.grace_s))

    def reloaded(report: ReloadReport) -> None:
        line.send(Reloaded(tuple(change.key for change in report.changes if change.live)))

    line.on_order = obey
    line.on_lost = _parent_lost
    app.operations.reloader.on_applied = reloaded
    server.on_listening = lambda: line.send(Serving())
    memory.tune()
    server.run()


def _end_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, however that does."""
    with contextlib.suppress(OSError, AttributeError):  # not Linux: the end of the line remains
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(INVALID)


def _parent_lost() -> None:
    """End at once: a new parent needs the port, and nobody would restart or reload this process."""
    log.error("the parent process is gone: this worker ends")
    os._exit(1)
