"""Two hardware profiles against the same recordings of real engines: which one is closer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from sim.fidelity.comparison import METRICS, QUANTILES, LatencyComparison, compare
from sim.fidelity.recording import Recording
from sim.fidelity.resimulate import resimulate
from sim.fit_report import profile_yaml
from sim.hardware import HardwareProfile, load_profile

PROFILES = ("h200", "h200-nvlink-128")
_PREFILL = (
    *("frontend_s", "frontend_token_s", "prefill_s", "prefill_token_s", "prefill_context_s", "prefill_floor_s"),
    "mixed_stream_s",
)


def profile_table(groups: Mapping[str, Sequence[Recording]], profiles: Mapping[str, str]) -> str:
    """A Markdown table: for each group of recordings and metric the medians over its recordings.

    ``profiles`` are names or paths by the name in the table.
    """
    named = " / ".join(profiles)
    lines = [
        f"| recordings, {named} | metric | p50 | p90 | p99 | half within | rank |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, recordings in groups.items():
        compared = [
            [compare(each, resimulate(each, profile, each.note.transport)).metrics for each in recordings]
            for profile in profiles.values()
        ]
        for place, metric in enumerate(METRICS):
            found = [[metrics[place] for metrics in of_profile] for of_profile in compared]
            errors = [
                " / ".join(f"{median(each.ratios[at] for each in of_profile) - 1:+.0%}" for of_profile in found)
                for at in range(len(QUANTILES))
            ]
            within = " / ".join(f"{_typical(of_profile):.2f}" for of_profile in found)
            rank = " / ".join(f"{median(each.rank_correlation for each in of_profile):.2f}" for of_profile in found)
            label = f"{name} ({len(recordings)})"
            lines.append(f"| {label} | {metric.upper()} | {' | '.join(errors)} | x {within} | {rank} |")
    return "\n".join(lines)


def _typical(found: list[LatencyComparison]) -> float:
    return median(each.typical_factor for each in found)


def parts(folder: Path) -> dict[str, str]:
    """``h200``, and with one part of the refit each, as paths of profiles written to ``folder``, by name."""
    base, refit = map(load_profile, PROFILES)
    changed: dict[str, dict[str, Any]] = {
        "context": {"step": {"decode_context_s": refit.step.decode_context_s}},
        "prefill": {"step": {name: getattr(refit.step, name) for name in _PREFILL}},
        "transfers": {"transports": refit.model_dump()["transports"], "default_transport": refit.default_transport},
    }
    found = {base.name: base.name}
    for name, values in changed.items():
        plain = base.model_dump()
        step = plain["step"] | values.pop("step", {})
        path = folder / f"{name}.yaml"
        path.write_text(profile_yaml(HardwareProfile.model_validate(plain | values | {"step": step})), encoding="utf-8")
        found[name] = str(path)
    return found


def part_table(groups: Mapping[str, Sequence[Recording]]) -> str:
    """`profile_table` of ``h200`` with one part of the refit each."""
    with TemporaryDirectory() as folder:
        return profile_table(groups, parts(Path(folder)))
