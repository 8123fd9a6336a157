"""The traces that take part, with their names and families.

Traces derived from one another, or from one collection, share conversations. They form one *family*: constants chosen
on one of them are not held out on another.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path

from bench.tournament.settings import TournamentError, TraceRule
from replayer.traces.loading import LoadOptions, load
from replayer.traces.trace import Trace

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".tar", ".tar.zst", ".tar.gz")
"""Files that may be traces; all other files in the folder are ignored."""


def find_traces(folder: Path, rules: Sequence[TraceRule]) -> dict[str, tuple[Path, TraceRule]]:
    """The traces below a folder by name, each with the rule by which to read it.

    A file without a rule is named by its path and is its own family. Files whose rule has ``left_out`` are not
    included.

    Raises:
        TournamentError: no such folder, no trace in it, or two files of one name.
    """
    if not folder.is_dir():
        raise TournamentError(f"no folder {folder}; give the folder of traces with --trace-dir or $WARMROUTE_TRACES")
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
    """Read a trace according to its rule.

    Raises:
        TraceError: names file, line, and what to do.
    """
    return load(path, LoadOptions(sessions=rule.sessions))
