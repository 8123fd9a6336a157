"""Effective configuration of a started process tree: environment and flags, read back from the kernel.

Variables can be lost between the launcher and an engine's child process (a wrapper, a spawn method, a renamed process).
Such an engine serves, but with another configuration than the one measured.
"""

from __future__ import annotations

import os

import psutil

from launch.engines.commands import ProcessSpec
from launch.run.processes import ManagedProcess

_ADJUSTED_BELOW = frozenset({"CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"})
"""vLLM narrows these itself for its worker processes."""
_RENAMED = "VLLM::"


def effective_config_problems(process: ManagedProcess) -> list[str]:
    """Sentences on missing or different settings; processes that end meanwhile or cannot be read are left out."""
    tree = process.tree()
    problems: dict[str, None] = {}
    for place, found in enumerate(tree):
        try:
            received, title = found.environ(), found.cmdline()
        except (psutil.Error, OSError):
            continue
        if not received:
            continue
        who = process.spec.name if place == 0 else f"{process.spec.name}'s child process {_short(title)} ({found.pid})"
        for problem in _environment_problems(process.spec, received, own=place == 0):
            problems[f"{who} {problem}"] = None
        if place == 0 and not _same_command(process.spec.command, title):
            problems[f"{who} runs with other arguments than given: {' '.join(title)}"] = None
    return list(problems)


def _environment_problems(spec: ProcessSpec, received: dict[str, str], *, own: bool) -> list[str]:
    problems = []
    for name, directories in spec.search_paths.items():
        first = ":".join(directories)
        if not f"{received.get(name, '')}:".startswith(f"{first}:"):
            problems.append(f"has {name}={received.get(name)!r}, which does not begin with {first}")
    for name, value in spec.environment.items():
        if name in spec.search_paths:
            continue
        if name not in received:
            problems.append(f"did not receive {name}")
        elif received[name] != value and (own or name not in _ADJUSTED_BELOW):
            problems.append(f"has {name}={received[name]!r}, not {value!r}")
    problems += [
        f"has {name}, which must be absent"
        for name in spec.drop_environment
        if name in received and name not in spec.environment
    ]
    return problems


def _same_command(command: tuple[str, ...], title: list[str]) -> bool:
    # A script's interpreter precedes it, so compare from the end; a renamed process has lost its arguments.
    if not title or title[0].startswith(_RENAMED):
        return True
    given = list(command[1:])
    return not given or title[-len(given) :] == given


def _short(title: list[str]) -> str:
    return os.path.basename(title[0]) if title and title[0] else "(unnamed)"
