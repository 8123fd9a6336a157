"""The pages of docs/reference and the functions that generate them; ``python -m tests.reference`` writes them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from launch.doctor import report as doctor
from launch.doctor.checks import all_checks
from launch.experiment.definition import reference as experiment_file
from launch.fleet import reference as fleet_file
from proxy.settings import reference as settings
from tests.chaos.rig import matrix_table
from tests.command_line import reference as command_line
from tests.policies.pages import reference as policies
from tests.proxy.metrics import reference as metrics
from tests.replayer.report import options_reference as report_options

FOLDER = Path(__file__).parents[1] / "docs" / "reference"

PAGES: Mapping[str, Callable[[], str]] = {
    "cli.md": command_line.reference,
    "settings.md": settings.reference,
    "fleet-file.md": fleet_file.reference,
    "experiment-file.md": experiment_file.reference,
    "metrics.md": metrics.reference,
    "policies.md": policies.reference,
    "report.md": report_options.reference,
    "doctor.md": lambda: doctor.reference(all_checks()),
    "failure-matrix.md": matrix_table.reference,
}


def main() -> None:
    """Generate every page first, so that an error leaves all files as they were; then write them."""
    pages = {name: generate() for name, generate in PAGES.items()}
    for name, text in pages.items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
