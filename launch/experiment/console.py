"""Terminal output of an experiment: a line when a run starts and ends, a progress bar, tables of plan and state."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from launch.experiment.definition.file import ExperimentSettings
from launch.experiment.definition.order import Slot
from launch.experiment.records.expected import in_words
from launch.experiment.records.state import DONE, ExperimentState, RunState
from replayer.records.counted import counted
from replayer.records.runs import RequestRecord

_COLOURS = {
    "done": "green",
    "refused": "red",
    "failed": "red",
    "damaged": "red",
    "interrupted": "yellow",
    "running": "cyan",
}


class ConsoleObserver:
    """Progress of an experiment on a console; a context manager around the run.

    Args:
        console: the console to write to.
        requests: requests of one run, for the bar; None if unknown.
    """

    def __init__(self, console: Console, requests: int | None = None) -> None:
        self._console = console
        self._requests = requests
        self._tasks: dict[int, TaskID] = {}
        self._failed: dict[int, int] = {}
        columns = (TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def started(self, run: RunState, total: int) -> None:
        """Report the start of a run."""
        self._say(f"{run.order + 1}/{total} {run.name}, seed {run.seed}")
        self._failed[run.order] = 0
        self._tasks[run.order] = self._progress.add_task(escape(run.name), total=self._requests)

    def phase(self, run: RunState, phase: str) -> None:
        """Report a run's next phase."""
        self._progress.update(self._tasks[run.order], description=f"{escape(run.name)}: {phase}")

    def recorded(self, run: RunState, record: RequestRecord) -> None:
        """Count a finished request of a live run."""
        self._failed[run.order] += not record.ok
        failed = self._failed[run.order]
        shown = f", {failed} failed" if failed else ""
        description = f"{escape(run.name)}: replaying{shown}"
        self._progress.update(self._tasks[run.order], advance=1, description=description)

    def ended(self, run: RunState, left_s: float | None) -> None:
        """Report the end of a run; the others need about ``left_s`` wall seconds (None: unknown)."""
        self._progress.remove_task(self._tasks.pop(run.order))
        took = "" if run.took_s is None else f", {in_words(run.took_s)}"
        if run.state == DONE:
            left = f"; about {in_words(left_s)} left" if left_s else ""
            self._say(f"    {run.name}: {run.ok}/{run.requests} requests ok{took}{left}")
            for warning in run.warnings:
                self._say(f"    warning: {warning}", style="yellow")
        else:
            self._say(f"    {run.name} {run.state}{took}: {'; '.join(run.reasons)}", style="red")

    def _say(self, text: str, style: str | None = None) -> None:
        self._progress.console.print(f"{time.strftime('%H:%M:%S')} {escape(text)}", style=style, soft_wrap=True)


def plan_table(settings: ExperimentSettings, slots: list[Slot]) -> Table:
    """The runs in the order of execution."""
    table = Table(
        title=escape(f"{settings.name}: {counted(len(slots), 'run')}, {settings.order}"), title_justify="left"
    )
    for name in ("run", "repeat", "seed"):
        table.add_column(name, justify="right")
    for name in ("arm", "policy", "planner", "admission"):
        table.add_column(name, overflow="fold")
    for slot in slots:
        arm = settings.arms[slot.arm]
        label = f"{slot.arm} (baseline)" if slot.arm == settings.baseline_arm else slot.arm
        cells = [str(slot.order + 1), str(slot.repeat), str(slot.seed), label]
        cells += [_with_params(arm.policy.name, arm.policy.params)]
        cells += [_with_params(arm.offload.planner, arm.offload.params)]
        cells += [_with_params(arm.admission.name, arm.admission.params)]
        table.add_row(
            *(escape(cell) for cell in cells), end_section=slot.order % len(settings.arms) == len(settings.arms) - 1
        )
    return table


def state_table(state: ExperimentState, directory: str) -> Table:
    """Progress of an experiment, run by run."""
    shown = state.state
    if state.state == "running" and not state.alive:
        shown = "running, but its runner is gone: continue with --resume"
    table = Table(title=escape(f"{state.name} ({directory}): {shown}"), title_justify="left")
    for name in ("run", "repeat", "seed"):
        table.add_column(name, justify="right")
    table.add_column("arm", overflow="fold")
    table.add_column("state")
    table.add_column("ok", justify="right")
    table.add_column("took", justify="right")
    table.add_column("remarks", overflow="fold")
    for run in sorted(state.runs, key=lambda run: run.order):
        table.add_row(
            str(run.order + 1),
            str(run.repeat),
            str(run.seed),
            escape(run.arm),
            run.state,
            "" if run.requests is None else f"{run.ok}/{run.requests}",
            "" if run.took_s is None else in_words(run.took_s),
            escape("; ".join([*run.reasons, *run.warnings])),
            style=_COLOURS.get(run.state, ""),
        )
    return table


def _with_params(name: str, params: dict[str, object]) -> str:
    shown = ", ".join(f"{key}={value}" for key, value in params.items())
    return f"{name} ({shown})" if shown else name
