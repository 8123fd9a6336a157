"""Options of a comparison, those kept in an experiment, and its result."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import msgspec

from replayer.compare.assumptions import ASSUMED_FLOOR
from replayer.compare.goodput import Slo
from replayer.compare.noise_floor import FloorRow
from replayer.compare.pairing import Pairing
from replayer.compare.statistics.tests import ALPHA, Effect
from replayer.compare.verdict import cell_of, verdict_sentence
from replayer.compare.window import Window
from replayer.records.classes import PlannedClass
from replayer.traces.trace import Trace

_PLAIN = ("clock", "skip_first_s", "skip_last_s", "resamples", "only_class")
_OBJECTIVES = tuple(field.name for field in fields(Slo))


@dataclass(frozen=True)
class CompareOptions:
    """Options of a comparison."""

    resamples: int = 2000
    """Bootstrap resamples."""
    seed: int = 0
    """Of the resamples."""
    force: bool = False
    """Compare runs of different conditions or of warm fleets anyway; the reasons become warnings."""
    skip_first_s: float | None = 0.0
    """Engine seconds left out at the start of the plan; None: the rule of `replayer.compare.window`."""
    skip_last_s: float | None = 0.0
    """Engine seconds left out at the end of the plan; None: the rule of `replayer.compare.window`."""
    clock: str = "sent"
    """Start of TTFT and E2E: "sent" or "scheduled"."""
    slo: Slo = field(default_factory=Slo)
    """Objectives for goodput."""
    assumed_floor: float = ASSUMED_FLOOR
    """Largest difference of two replicates in their times (95 of 100 cases), as a fraction, where there are neither
    repeats nor A/A runs to measure it; 0: runs repeat exactly."""
    only_class: PlannedClass | None = None
    """Compare requests of this class only, by their new tokens in the trace; None: all."""
    trace: Trace | None = None
    """The replayed trace; with it, cache hits are checked request by request (`replayer.compare.freshness`)."""


class KeptSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section ``comparison`` of an experiment, with the defaults of ``warmroute compare``."""

    skip_first_s: float | None = None
    skip_last_s: float | None = None
    resamples: int = 2000
    clock: Literal["sent", "scheduled"] = "sent"
    only_class: PlannedClass | None = None
    slo: Slo = Slo()

    def applied(self, options: CompareOptions, given: Collection[str] = ()) -> CompareOptions:
        """The options with these settings.

        Args:
            options: of the command.
            given: options that override the settings; an objective is named ``slo_`` and its field.
        """
        plain = {name: getattr(self, name) for name in _PLAIN if name not in given}
        slo = {name: getattr(self.slo, name) for name in _OBJECTIVES if f"slo_{name}" not in given}
        return replace(options, slo=replace(options.slo, **slo), **plain)

    def describe(self, given: Collection[str] = ()) -> str:
        """Sentence on the settings that are not the defaults and not overridden; empty without any."""
        usual = KeptSettings()
        pairs = [(name, getattr(self, name), getattr(usual, name), name) for name in _PLAIN]
        pairs += [
            (f"slo_{name}", getattr(self.slo, name), getattr(usual.slo, name), f"slo.{name}") for name in _OBJECTIVES
        ]
        shown = [
            f"{label} {_shown(value)}"
            for name, value, default, label in pairs
            if value != default and name not in given
        ]
        return f"Settings of the experiment: {', '.join(shown)}. Options override them." if shown else ""


def kept_settings(section: Any) -> KeptSettings:
    """The settings from the plain values of an experiment; None gives the defaults.

    Raises:
        msgspec.ValidationError: not such a section.
    """
    return msgspec.convert(section or {}, KeptSettings)


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Comparison:
    """One candidate against the baseline."""

    baseline_label: str
    candidate_label: str
    pairing: Pairing
    sessions: int
    effects: list[Effect]
    resamples: int
    seed: int
    clock: str
    skip_first_s: float
    """Planned engine seconds left out at the start."""
    window: Window
    runs: tuple[int, int]
    """Runs of the baseline and of the candidate."""
    family: int
    """Tests that were corrected together: all judged metrics of all candidates."""
    noise_floor: list[FloorRow]
    """Differences between replicates; empty where there are none."""
    goodput_per_s: dict[str, tuple[float, float]]
    """Goodput metric -> requests per second that met the objectives, baseline and candidate."""
    notes: list[str] = field(default_factory=list)
    """Fine print: conditions that differ, unmatched or failed requests, the window, the noise between runs."""
    warnings: list[str] = field(default_factory=list)
    """Those of the notes that are about the conditions: a forced comparison, another model or version, invalid runs."""
    assumed_noise: float = 0.0
    """The noise floor that is assumed where ``noise_floor`` is empty, as a fraction."""
    only_class: PlannedClass | None = None
    """The only class of requests that was compared; None: all were."""

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        return self.restriction + verdict_sentence(
            self.baseline_label, self.candidate_label, self.effects, noise_known=bool(self.noise_floor)
        )

    @property
    def restriction(self) -> str:
        """The compared class, as the beginning of a sentence; empty where all are compared."""
        return f"{self.only_class} requests only: " if self.only_class else ""

    def as_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        pairing = self.pairing
        return {
            "baseline": self.baseline_label,
            "candidate": self.candidate_label,
            "verdict": self.sentence,
            "runs": {"baseline": self.runs[0], "candidate": self.runs[1]},
            **self._class_as_json(),
            "pairs": len(pairing.keys),
            "pairs_ok_in_both": pairing.both_ok,
            "sessions": self.sessions,
            "failed": {"baseline": pairing.failed_baseline, "candidate": pairing.failed_candidate},
            "unmatched": {"baseline": pairing.unmatched_baseline, "candidate": pairing.unmatched_candidate},
            "skip_first_s": self.skip_first_s,
            "skipped": pairing.skipped,
            "window": {"first_s": self.window.first_s, "last_s": self.window.last_s, "span_s": self.window.span_s},
            "clock": self.clock,
            "resamples": self.resamples,
            "seed": self.seed,
            "correction": "holm",
            "family": self.family,
            "alpha": ALPHA,
            "assumed_noise": self.assumed_noise,
            "effects": [effect.as_json() for effect in self.effects],
            "cells": [cell_of(effect).as_json() for effect in self.effects],
            "noise_floor": [{name: getattr(row, name) for name in row.__slots__} for row in self.noise_floor],
            "goodput_per_s": {
                name: {"baseline": before, "candidate": after} for name, (before, after) in self.goodput_per_s.items()
            },
            "notes": self.notes,
            "warnings": self.warnings,
        }

    def _class_as_json(self) -> dict[str, Any]:
        if self.only_class is None:
            return {}
        requests, others = len(self.pairing.keys), self.pairing.other_classes
        return {"class": {"name": self.only_class.value, "requests": requests, "other_requests": others}}
