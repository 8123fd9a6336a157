"""Warnings about full processors."""

from __future__ import annotations

from launch.hardware.processors import ProcessorUse
from replayer.records.validity import calls_invalid


def test_comparisons_recognise_the_warning_that_a_runs_figures_are_invalid() -> None:
    use = ProcessorUse(samples=100, mean=0.97, maximum=1.0, full_share=0.83, own=0.2)
    assert use.warning is not None
    assert calls_invalid(use.warning)
    assert not calls_invalid("51% of the processors were in use before the run started")
