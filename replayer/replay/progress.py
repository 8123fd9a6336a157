"""Display of a replay: the offered load before it, a progress bar during it (on a terminal only)."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from replayer.records.counted import counted
from replayer.records.runs import RequestRecord
from replayer.replay.plan import Plan
from replayer.replay.tables import offered_table


class ReplayProgress:
    """Callbacks for `replayer.replay.replay.replay_trace`. Use as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("replay"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[failed]} failed"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("replay", total=None, failed=0)
        self._failed = 0

    def start(self, plan: Plan, recorded: int) -> None:
        """Print the offered load and set up the bar."""
        self._console.print(offered_table(plan.offered))
        if recorded:
            self._console.print(
                f"resuming: {counted(recorded, 'request')} recorded; "
                "the engines' caches are not those of an unbroken run",
                markup=False,
                soft_wrap=True,
            )
        self._progress.update(self._task, total=plan.requests, completed=recorded)

    def advance(self, record: RequestRecord) -> None:
        """Count one record."""
        self._failed += not record.ok
        self._progress.update(self._task, advance=1, failed=self._failed)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
