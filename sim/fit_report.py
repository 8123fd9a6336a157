"""Output of a fit: the profile as YAML, its residuals as a terminal table or as Markdown."""

from __future__ import annotations

import yaml

from sim.fit import Fit, Residual
from sim.hardware import HardwareProfile


def profile_yaml(profile: HardwareProfile, command: str | None = None) -> str:
    """The profile as written to configs/hardware, with a header that names its source.

    ``command`` made it, by default ``warmroute sim fit``.
    """
    name = profile.name
    command = command or f"warmroute sim fit {name} -o configs/hardware"
    header = f"# Written by `{command}` from {name}_points.yaml: edit the points, not this file.\n"
    return header + yaml.dump(
        _plain(profile.model_dump(exclude_none=True)),
        sort_keys=False,
        width=110,
        Dumper=_PairsInline,
        allow_unicode=True,
    )


class _PairsInline(yaml.SafeDumper):
    """Lists of two numbers on one line."""

    def represent_sequence(self, tag: str, sequence: object, flow_style: bool | None = None) -> yaml.SequenceNode:
        inline = isinstance(sequence, list) and len(sequence) == 2 and all(isinstance(each, float) for each in sequence)
        return super().represent_sequence(tag, sequence, flow_style=inline)  # type: ignore[arg-type]


def _plain(value: object) -> object:
    """Tuples as lists: YAML has no tuples."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def summary(fit: Fit) -> str:
    """One line: number of points that count, the median and the worst relative error."""
    counted = sum(not each.note for each in fit.residuals)
    worst = fit.worst
    return (
        f"{fit.profile.name}: {counted} points, median error {fit.median_error:.1%}, "
        f"worst {worst.error:+.1%} ({worst.kind}, {worst.label})"
    )


def rows(fit: Fit) -> list[tuple[str, str, str, str, str, str]]:
    """Kind, point, measured, model, error, note of every point, as text."""
    return [
        (each.kind, each.label, _seconds(each.measured_s), _seconds(each.model_s), f"{each.error:+.1%}", each.note)
        for each in fit.residuals
    ]


def markdown(fit: Fit) -> str:
    """The residual table for a page of documentation."""
    lines = ["| what | point | measured | model | error | note |", "| --- | --- | ---: | ---: | ---: | --- |"]
    lines += ["| " + " | ".join(row) + " |" for row in rows(fit)]
    return "\n".join(lines)


def by_kind(residuals: tuple[Residual, ...]) -> dict[str, tuple[int, float, float]]:
    """Per kind of point that counts: number of points, median and worst absolute relative error."""
    kinds: dict[str, list[float]] = {}
    for each in residuals:
        if not each.note:
            kinds.setdefault(each.kind, []).append(abs(each.error))
    return {kind: (len(errors), sorted(errors)[len(errors) // 2], max(errors)) for kind, errors in kinds.items()}


def _seconds(value: float) -> str:
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"
