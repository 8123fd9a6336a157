"""Comparison settings kept in an experiment: the defaults of a comparison of its folder."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, replace
from typing import Any, Literal

import msgspec

from replayer.compare.comparison import CompareOptions
from replayer.compare.goodput import Slo

_PLAIN = ("clock", "skip_first_s", "skip_last_s", "resamples")
_OBJECTIVES = tuple(field.name for field in fields(Slo))


class KeptSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section ``comparison`` of an experiment, with the defaults of ``warmroute compare``."""

    skip_first_s: float | None = None
    skip_last_s: float | None = None
    resamples: int = 2000
    clock: Literal["sent", "scheduled"] = "sent"
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
