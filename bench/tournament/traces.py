"""Which traces take part, what each is called, and which of them come from the same source.

Traces made from one another, or from one collection, share conversations. They are one *family*: constants chosen on
one of them are not held out on another.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path

from bench.tournament.settings import TournamentError, TraceRule
from replayer.traces.loading import LoadOptions, load
from replayer.traces.trace import Trace

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".tar", ".tar.zst", ".tar.gz")
"""Files that may be traces; everything else in the folder is passed over."""


def find_traces(folder: Path, rules: Sequence[TraceRule]) -> dict[str, tuple[Path, TraceRule]]:
    """The traces below a folder by name, each with the rule that says how to read it.

    A file that no rule names is called by its path and is a family of its own. Files whose rule says why they are left
    out are not among them.

    Raises:
        TournamentError: no such folder, no trace in it, or two files of one name.
    """
    if not folder.is_dir():
        raise TournamentError(f"no folder {folder}; give the traces' with --trace-dir or $WARMROUTE_TRACES")
    found: dict[str, tuple[Path, TraceRule]] = {}
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or not path.name.endswith(SUFFIXES):
            continue
        relative = path.relative_to(folder).as_posix()
        rule = _rule_for(relative, rules)
        if rule.left_out:
            continue
        if rule.name in found:
            raise TournamentError(f"{path} and {found[rule.name][0]} would both be called {rule.name!r}; rename one")
        found[rule.name] = (path, rule)
    if not found:
        raise TournamentError(f"no trace in {folder}: expected files ending in {', '.join(SUFFIXES)}")
    return found


def _rule_for(relative: str, rules: Sequence[TraceRule]) -> TraceRule:
    for rule in rules:
        if fnmatch.fnmatchcase(relative, rule.match):
            return rule
    stem = relative
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        if stem.endswith(suffix):
            stem = stem.removesuffix(suffix)
            break
    name = stem.replace("/", "_")
    return TraceRule(match=relative, name=name, family=name)


def load_one(path: Path, rule: TraceRule) -> Trace:
    """Read a trace as its rule says.

    Raises:
        TraceError: names file, line, and what to do.
    """
    return load(path, LoadOptions(sessions=rule.sessions))
