"""Command ``top``: the fleet and its last decisions, in a terminal."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from proxy.console.options import DEFAULT_URL, KeyOption, UrlOption
from warmroute_tls import CaFile, CertFile, CertKeyFile, TlsFiles

if TYPE_CHECKING:
    from proxy.console.admin_api import AdminApi
    from proxy.console.figures import FleetFigures, RecentRows, TopPage

_ANSWER_S = 3.0
_PAGE_ROWS = 200
_PAGES = 10
"""Pages read for one frame, at most: a row is 3 KB with 8 instances, 20 KB with 64."""


def top(
    url: UrlOption = DEFAULT_URL,
    key: KeyOption = None,
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    cert_key_file: CertKeyFile = None,
    interval_s: Annotated[float, typer.Option(min=0.2, max=3600, help="Seconds between two frames.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit; so it does without a terminal.")] = (
        False
    ),
) -> None:
    """Show the fleet of a running proxy: load, KV use, hit rate, latency, last decisions.

    `q` quits. Rates, hit rates and latencies are those of requests that ended within the last minute; under much load
    of the last seconds, as many as are shown. While the proxy does not answer, the last figures stay, with the reason
    above them.

    Exit status 0: shown; 2: with --once, the proxy did not answer.
    """
    from rich.console import Console

    from proxy.console.admin_api import AdminApi, NoAnswerError
    from proxy.console.figures import RecentRows
    from proxy.console.frames import frame

    console = Console()
    try:
        with AdminApi(url, key, TlsFiles(ca_file, cert_file, cert_key_file), _ANSWER_S) as api:
            if once or not console.is_terminal:
                console.print(frame(poll(api, RecentRows()), url, None, None, console.width))
            else:
                _live(api, interval_s)
    except NoAnswerError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error


def poll(api: AdminApi, recent: RecentRows) -> FleetFigures:
    """The figures of now.

    Raises:
        NoAnswerError: the proxy does not answer.
    """
    from proxy.console.figures import TopAnswers, figures_of

    page = _read_rows(api, recent)
    answers = TopAnswers(
        api.get("/instances").get("instances") or (),
        api.get("/stats"),
        api.get("/ready", verbose="true").get("conditions") or (),
        page,
    )
    return figures_of(answers, recent, page.unix_s or time.time())


def _read_rows(api: AdminApi, recent: RecentRows) -> TopPage:
    """Bring the rows up to date; returns the last page, with the proxy's time."""
    from proxy.console.figures import WINDOW_S, TopPage

    def read(**cursor: int) -> TopPage:
        return api.read("/breakdown", TopPage, limit=_PAGE_ROWS, **cursor)

    for _ in range(_PAGES):
        if recent.cursor is None:
            break
        page = read(after=recent.cursor)
        recent.add(page, _PAGE_ROWS)
        if not recent.behind:
            return page
    recent.skip()
    newest = page = read()
    recent.add(newest, _PAGE_ROWS)
    for _ in range(_PAGES - 1):
        before = page.next.get("before")
        if before is None or recent.span_s(newest.unix_s or time.time()) >= WINDOW_S:
            break
        page = read(before=before)
        recent.add_older(page, _PAGE_ROWS)
    return newest


def _live(api: AdminApi, interval_s: float) -> None:
    """Draw frames until ``q`` or Ctrl-C."""
    from rich.live import Live

    from proxy.console.admin_api import NoAnswerError
    from proxy.console.figures import RecentRows
    from proxy.console.frames import frame

    recent = RecentRows()
    figures: FleetFigures | None = None
    with contextlib.suppress(KeyboardInterrupt), _keys() as pressed, Live(screen=True, auto_refresh=False) as live:
        while True:
            problem = None
            try:
                figures = poll(api, recent)
            except NoAnswerError as error:
                problem = str(error)
            live.update(frame(figures, api.url, problem, live.console.height, live.console.width), refresh=True)
            if pressed(interval_s) in {"q", "Q"}:
                return


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Function that waits for a key for some seconds and returns it, or an empty text."""
    if not sys.stdin.isatty():
        yield _rest
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield _key
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _rest(most_s: float) -> str:
    time.sleep(most_s)
    return ""


def _key(most_s: float) -> str:
    ready, _, _ = select.select([sys.stdin], [], [], most_s)
    if not ready:
        return ""
    # A terminal that is gone is ready forever.
    return os.read(sys.stdin.fileno(), 1).decode("latin-1") or "q"
