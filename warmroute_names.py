"""Old names of commands and options: still accepted, each with one line on standard error that has the new name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from typer.core import TyperGroup

REMOVED_IN = "0.3"
"""Version without the old names."""

COMMANDS: Mapping[str, str] = {
    "synth": "trace synth",
    "sample": "trace sample",
    "repeat": "trace repeat",
    "engine": "sim engine",
    "fit": "sim fit",
    "fidelity": "sim fidelity",
}
"""Old command of the root -> group and command."""

SUGGESTIONS: Mapping[str, str] = {
    **dict.fromkeys(("bench", "benchmark", "load", "loadtest", "load-test", "loadgen"), "replay"),
    **dict.fromkeys(("proxy", "router", "route", "run", "start", "server", "gateway"), "serve"),
    **dict.fromkeys(("check", "validate", "lint"), "serve --check"),
    **dict.fromkeys(("config", "configure", "options"), "settings"),
    **dict.fromkeys(("launch", "fleet", "engines"), "up"),
    **dict.fromkeys(("stop", "kill", "shutdown"), "down"),
    **dict.fromkeys(("ps", "ls", "list", "instances"), "status"),
    **dict.fromkeys(("diagnose", "troubleshoot"), "doctor"),
    **dict.fromkeys(("gpus", "gpu"), "telemetry"),
    **dict.fromkeys(("quickstart", "try", "example"), "demo"),
    **dict.fromkeys(("diff", "ab"), "compare"),
    **dict.fromkeys(("plot", "graph", "html"), "report"),
    **dict.fromkeys(("analyze", "analysis"), "analyse"),
    **dict.fromkeys(("generate", "synthesize", "workload"), "trace synth"),
}
"""Word that is no command -> the command that does what is likely meant."""

_PACE = {"--time-scale": "--arrival-speed", "--think-scale": "--think-speed", "--idle-gap-cap": "--idle-gap-cap-s"}

OPTIONS: Mapping[str, Mapping[str, str]] = {
    "replay": {**_PACE, "--clock-scale": "--engine-speed", "--timeout": "--timeout-s"},
    "simulate": {**_PACE, "--breakdown": "--breakdown-output"},
    "demo": {"--clock-scale": "--engine-speed", "--run-dir": "--output"},
    "telemetry": {"--out": "--output", "--interval": "--interval-s"},
    "summary": {"--warm-below": "--medium-from-tokens", "--heavy-from": "--heavy-from-tokens"},
    "trace synth": {"--rate": "--rate-per-s", "--duration": "--duration-s"},
    "sim engine": {"--time-scale": "--engine-speed"},
    # A flag became an option with a value: the folder that the flag stood for.
    "sim fit": {"--write": f"--output={Path(__file__).parent / 'configs' / 'hardware'}"},
    "analyse workload": {"--bin": "--bin-s", "--medium": "--medium-from-tokens", "--heavy": "--heavy-from-tokens"},
    "analyse roofline": {"--chunks": "--chunk-tokens", "--contexts": "--context-tokens"},
    "analyse kv-wall": {"--rate": "--rate-per-s", "--time-scale": "--arrival-speed", "--sizes": "--request-tokens"},
    "analyse pd-cost": {"--tokens": "--prompt-tokens", "--single-decode": "--single-decode-s"},
}
"""Command by its current name -> old option -> new option."""


def current(arguments: Sequence[str], note: Callable[[str], None]) -> list[str]:
    """A command line with every old name replaced.

    Args:
        arguments: command line without the program's name.
        note: called with one sentence for each old name that was replaced.
    """
    words = list(arguments)
    if words and (command := COMMANDS.get(words[0])):
        note(_sentence(f"warmroute {words[0]}", f"warmroute {command}"))
        words[:1] = command.split()
    for length in (1, 2):
        if renamed := OPTIONS.get(" ".join(words[:length])):
            return [*words[:length], *_options(words[length:], renamed, note)]
    return words


def suggestion(word: str) -> str | None:
    """Sentence with the command for a word that is none; None if there is no suggestion."""
    meant = SUGGESTIONS.get(word.lower())
    return None if meant is None else f"No such command '{word}'. Did you mean `warmroute {meant}`?"


def _options(words: Sequence[str], renamed: Mapping[str, str], note: Callable[[str], None]) -> list[str]:
    end = words.index("--") if "--" in words else len(words)
    found = []
    for word in words[:end]:
        name, equals, value = word.partition("=")
        if new := renamed.get(name):
            note(_sentence(name, new))
        found.append(f"{new or name}{equals}{value}")
    return [*found, *words[end:]]


def _sentence(old: str, new: str) -> str:
    return f"`{old}` is now `{new}`; the old name will be removed in {REMOVED_IN}"


def _to_stderr(sentence: str) -> None:
    print(sentence, file=sys.stderr)


class RenamedGroup(TyperGroup):
    """Command group that replaces old names before its command line is parsed, so that help never shows them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line; shell completion prints no notes."""
        quiet = bool(ctx.resilient_parsing)
        return super().parse_args(ctx, current(args, (lambda _: None) if quiet else _to_stderr))
