"""Messages of a launcher on standard output, which a fleet outlives."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from rich.table import Table


class Messages:
    """Standard output of `up`. Output that cannot be written, such as `launcher.log` on a full disk, is dropped."""

    def __init__(self) -> None:
        self._console = Console()

    def show(self, what: str | Table, style: str | None = None) -> None:
        """Print a line, as it is, or a table."""
        with suppress(OSError):
            text = escape(what) if isinstance(what, str) else what
            self._console.print(text, style=style, soft_wrap=isinstance(what, str))

    def notify(self, message: str) -> None:
        """Print an event with the time: in a file, which is kept for weeks, as in the proxy's log beside it."""
        now = time.strftime("%H:%M:%S")
        if not self._console.is_terminal:
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self.show(f"{now} {message}", style="yellow")
