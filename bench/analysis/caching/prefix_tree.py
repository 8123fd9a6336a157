"""A trace's prompts as a tree of block runs: the runs are cut where a prompt ends or two prompts diverge.

Every request that uses one block of a run uses all of them, so a cache policy that orders blocks by their use can treat
a run as one unit. A trace has about one run for each request, whatever the prompts' lengths.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from replayer.traces.trace import Trace, TraceRequest


class RunTree(msgspec.Struct, frozen=True):
    """The runs of a trace and every request's path through them."""

    run_blocks: list[int]
    """Blocks of each run."""
    depths: list[int]
    """Number of runs above each run."""
    paths: list[list[int]]
    """For each request the runs of its full blocks, from the root down."""
    block_tokens: int

    @property
    def distinct_tokens(self) -> int:
        """Tokens of all distinct full blocks: the final content of an unlimited cache."""
        return sum(self.run_blocks) * self.block_tokens

    def parents(self) -> list[int]:
        """The run above each run; -1 for the first of a prompt."""
        above = [-1] * len(self.run_blocks)
        for path in self.paths:
            for upper, lower in pairwise(path):
                above[lower] = upper
        return above


class _Branch(msgspec.Struct):
    """Blocks that one request was the first to have: depths ``start`` to ``end`` below ``parent``'s block at start."""

    parent: int
    start: int
    end: int
    cuts: list[int]
    """Depths at which it is cut, increasing; ``end`` included."""


def build(trace: Trace) -> RunTree:
    """The tree of a trace with chained ids (the loader's default).

    Time O(distinct blocks + requests x log blocks): a prompt's known part is found by bisection.
    """
    owner: dict[int, int] = {}
    branches: list[_Branch] = []
    ends: list[tuple[int, int]] = []
    for request in trace.requests:
        ends.append(_insert(request, trace.block_tokens, owner, branches))
    first_run, run_blocks, depths = _number_runs(branches)
    paths = [_path(branch, depth, branches, first_run) for branch, depth in ends]
    return RunTree(run_blocks, depths, paths, trace.block_tokens)


def _insert(
    request: TraceRequest, block_tokens: int, owner: dict[int, int], branches: list[_Branch]
) -> tuple[int, int]:
    """Add a request's blocks; returns the branch and depth it ends at."""
    ids: Sequence[int] = request.hash_ids
    full = request.full_blocks(block_tokens)
    known, unknown = 0, full + 1
    while unknown - known > 1:
        middle = (known + unknown) // 2
        if ids[middle - 1] in owner:
            known = middle
        else:
            unknown = middle
    above = owner[ids[known - 1]] if known else -1
    if above >= 0:
        _cut(branches[above], known)
    if known == full:
        return above, known
    branches.append(_Branch(above, known, full, [full]))
    new = len(branches) - 1
    owner.update(dict.fromkeys(ids[known:full], new))
    return new, full


def _cut(branch: _Branch, depth: int) -> None:
    position = bisect_left(branch.cuts, depth)
    if branch.cuts[position] != depth:
        insort(branch.cuts, depth)


def _number_runs(branches: list[_Branch]) -> tuple[list[int], list[int], list[int]]:
    """Number of each branch's first run, blocks of every run, runs above every run."""
    first_run: list[int] = []
    run_blocks: list[int] = []
    depths: list[int] = []
    for branch in branches:
        first_run.append(len(run_blocks))
        above = 0
        if branch.parent >= 0:
            parent = branches[branch.parent]
            above = depths[first_run[branch.parent] + bisect_left(parent.cuts, branch.start)] + 1
        start = branch.start
        for index, end in enumerate(branch.cuts):
            run_blocks.append(end - start)
            depths.append(above + index)
            start = end
    return first_run, run_blocks, depths


def _path(branch: int, depth: int, branches: list[_Branch], first_run: list[int]) -> list[int]:
    path: list[int] = []
    while branch >= 0:
        runs = bisect_left(branches[branch].cuts, depth) + 1
        path.extend(range(first_run[branch] + runs - 1, first_run[branch] - 1, -1))
        branch, depth = branches[branch].parent, branches[branch].start
    path.reverse()
    return path
