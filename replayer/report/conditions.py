"""Conditions of a page's figures: headers, machine and versions, proof of freshness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from replayer.records.counted import counted
from replayer.records.readable import DASH
from replayer.report.inputs import OneRun

Condition = tuple[str, list[str]]
"""Name, and one value when all arms agree, one for each arm otherwise."""
_PACKAGES = ("vllm", "torch", "numpy", "scipy", "uvloop", "httptools", "aiohttp")


@dataclass(frozen=True)
class Freshness:
    """Proof that one run began with empty engines."""

    label: str
    repeat: str
    file: str
    state: str
    """"fresh", "not fresh" or "no proof"."""
    why: str


def conditions(arms: Mapping[str, Sequence[OneRun]]) -> list[Condition]:
    """Every field of the runs' headers; where the repeats of an arm differ, all of their values."""
    columns = [[_flat(one.run.header) for one in runs] for runs in arms.values()]
    names = list(dict.fromkeys(name for runs in columns for flat in runs for name in flat))
    rows = []
    for name in names:
        values = [", ".join(dict.fromkeys(flat.get(name, DASH) for flat in runs)) for runs in columns]
        rows.append((name, values[:1] if len(set(values)) == 1 else values))
    return rows


def _flat(header: object) -> dict[str, str]:
    plain = msgspec.to_builtins(header)
    values = {name: value for name, value in plain.items() if not isinstance(value, dict) and name != "kind"}
    for group in ("offered", "options"):
        values |= {f"{group}.{name}": value for name, value in plain.get(group, {}).items()}
    return {name: text(value) for name, value in values.items()}


def freshness(arms: Mapping[str, Sequence[OneRun]]) -> list[Freshness]:
    """One row for each run; empty when no run has a proof beside it and none is expected."""
    rows = [_freshness(label, one) for label, runs in arms.items() for one in runs]
    return rows if any(row.state != "no proof" for row in rows) else []


def _freshness(label: str, one: OneRun) -> Freshness:
    file = "" if one.path is None else str(one.path)
    if one.fresh is None:
        return Freshness(label, one.repeat, file, "no proof", "no fresh.json beside the run")
    if one.fresh.get("kind") == "simulated":
        return Freshness(label, one.repeat, file, "fresh", text(one.fresh.get("reason") or "simulated"))
    engines = [engine for engine in one.fresh.get("engines") or [] if isinstance(engine, dict)]
    gpus: Any = one.fresh.get("gpus") or {}
    problems = [
        f"{engine.get('instance', 'an engine')}: {problem}"
        for engine in engines
        for problem in engine.get("problems") or []
    ]
    if gpus.get("status") == "foreign":
        problems.append("other processes compute on the fleet's GPUs")
    if not engines:
        problems.append("the proof names no engine")
    if problems:
        return Freshness(label, one.repeat, file, "not fresh", "; ".join(problems))
    proof = f"{counted(len(engines), 'engine')} started for this run, caches and counters empty"
    proof += f"; GPUs: {gpus['status']}" if gpus.get("status") else ""
    return Freshness(label, one.repeat, file, "fresh", proof)


def machine(environment: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """An experiment's environment.json in a few lines; empty without one."""
    if environment is None:
        return []
    software, hardware, clocks = (_part(environment, name) for name in ("software", "hardware", "clocks"))
    git, gpus = _part(software, "git"), _part(hardware, "gpus")
    packages = _part(software, "packages")
    memory = hardware.get("memory_bytes")
    rows: list[tuple[str, Any]] = [
        ("machine", hardware.get("hostname")),
        ("processor", hardware.get("cpu")),
        ("processors (usable)", f"{text(hardware.get('processors'))} ({text(hardware.get('usable_processors'))})"),
        ("memory", f"{memory / 2**30:.1f} GiB" if isinstance(memory, int | float) else None),
        ("frequency governor", hardware.get("governor")),
        ("GPUs", _gpus(gpus)),
        ("GPU driver", gpus.get("driver_version")),
        ("system", environment.get("system")),
        ("kernel", environment.get("kernel")),
        ("clock", clocks.get("source")),
        ("Python", software.get("python")),
        ("warmroute", software.get("warmroute")),
        ("git commit", git.get("commit") and f"{git['commit']}{' with local changes' if git.get('dirty') else ''}"),
        ("packages", ", ".join(f"{name} {packages[name]}" for name in _PACKAGES if name in packages)),
        ("engines", "; ".join(text(one) for one in software.get("engines") or [])),
        *((f"SHA-256, {name}", value) for name, value in _part(environment, "files").items()),
        *((f"variable {name}", value) for name, value in _part(environment, "variables").items()),
        ("command", " ".join(map(str, environment.get("command") or []))),
    ]
    return [(name, text(value)) for name, value in rows if value not in {None, ""}]


def _gpus(gpus: Mapping[str, Any]) -> str:
    found = gpus.get("gpus") or []
    if not found:
        return f"none ({gpus.get('reason')})" if gpus.get("reason") else "none"
    names = [str(one.get("name", "GPU")) if isinstance(one, dict) else str(one) for one in found]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _part(whole: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = whole.get(name)
    return part if isinstance(part, dict) else {}


def text(value: Any) -> str:
    """A value of a header or a JSON file for reading; a dash for none."""
    if isinstance(value, float):
        return f"{value:.6g}" if abs(value) < 1e6 else f"{value:.3f}"
    if isinstance(value, list | dict):
        return msgspec.json.encode(value).decode() if value else DASH
    return DASH if value is None or value == "" else str(value)
