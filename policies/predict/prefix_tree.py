"""One instance's prefix blocks as a radix tree of runs: look-up, insertion and eviction work on runs, not blocks.

A node is a run of consecutive blocks of one chain; its children continue from its last block. All blocks of a node were
last used by the same insertion, so the nodes in order of last use, each from its tail, give the blocks in order of last
use. Hashes are chained: chains that agree at one depth agree before it, so comparing the last block decides if a whole
run is shared, and bisection finds the shared part.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import ceil, inf
from typing import NamedTuple


class PrefixRun(NamedTuple):
    """A run of a copied tree."""

    continues: int
    """Number of the run that it continues; -1: none."""
    blocks: bytes
    """8 bytes for each."""
    weight: float = 1.0
    """That of each block."""


class _Node:
    __slots__ = ("blocks", "children", "parent", "serial", "weight")

    def __init__(self, blocks: array[int], parent: _Node | None, weight: float) -> None:
        self.blocks = blocks
        """8 bytes per block, and no objects for the garbage collector to traverse."""
        self.weight = weight
        """Of each block, by the last insertion that used them."""
        self.children: dict[int, _Node] = {}
        self.parent = parent
        self.serial = 0


class PrefixTree:
    """Held blocks of one instance; evicts the least recently used first, the tail of a chain before its head.

    A block has the weight of so many of the engine's: a prompt that is known as text has blocks of so many bytes, which
    are more tokens than the engine's blocks have.

    Complexity for a prompt of b blocks whose path has p nodes (one per branch point of conversations): ``match`` O(p +
    log b), ``insert`` O(p) and a copy of the new blocks, eviction O(1) per run. Memory: 8 bytes per block and about 450
    per node.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        """Bound on ``weight``."""
        self.blocks = 0
        """Blocks held."""
        self.weight = 0.0
        """Their weight."""
        self._root = _Node(array("Q"), None, 0.0)
        self.roots = self._root.children
        """First blocks of all held chains."""
        self._by_use: OrderedDict[_Node, None] = OrderedDict()
        """Least recently used first; within one insertion the deepest first, so the first node has no children."""

    def resize(self, capacity: int) -> None:
        """Set the bound and evict down to it."""
        self.capacity = capacity
        self._evict()

    def clear(self) -> None:
        """Drop every block."""
        for node in self._by_use:
            node.parent = None  # break reference cycles, else nodes would live until the next garbage collection
        self._by_use.clear()
        self._root.children.clear()
        self.blocks, self.weight = 0, 0.0

    def match(self, hashes: Sequence[int]) -> int:
        """Longest held prefix, in blocks."""
        children, depth, full = self._root.children, 0, len(hashes)
        while depth < full:
            child = children.get(hashes[depth])
            if child is None:
                break
            blocks = child.blocks
            end = depth + len(blocks)
            if end > full or blocks[-1] != hashes[end - 1]:
                return depth + _common(blocks, hashes, depth)
            children, depth = child.children, end
        return depth

    def insert(self, hashes: Sequence[int], serial: int, weight: float = 1.0) -> int:
        """Make a prompt's blocks the most recently used; returns the number of blocks already held.

        ``weight``: of each block; those already held take it too.
        """
        path: list[_Node] = []
        node, depth, full = self._root, 0, len(hashes)
        while depth < full:
            child = node.children.get(hashes[depth])
            if child is None:
                break
            end = depth + len(child.blocks)
            if end > full or child.blocks[-1] != hashes[end - 1]:
                shared = _common(child.blocks, hashes, depth)
                child, end = self._split(child, shared), depth + shared
            if child.weight != weight:
                self.weight += (weight - child.weight) * len(child.blocks)
                child.weight = weight
            path.append(child)
            node, depth = child, end
        if depth < full:
            new = array("Q", hashes[depth:])
            self.weight += weight * (full - depth)
            if path and not node.children:
                node.blocks.extend(new)
            else:
                child = node.children[hashes[depth]] = _Node(new, node, weight)
                self._by_use[child] = None
                path.append(child)
            self.blocks += full - depth
        for node in reversed(path):
            node.serial = serial
            self._by_use.move_to_end(node)
        if self.weight > self.capacity:
            self._evict()
        return depth

    def retract(self, hashes: Sequence[int], held: int, serial: int) -> None:
        """Remove the blocks that insertion ``serial`` added beyond ``held``, unless a later insertion used them."""
        node, start, depth, full = self._root, 0, 0, len(hashes)
        while depth < full:
            child = node.children.get(hashes[depth])
            if child is None:
                break
            node, start = child, depth
            depth += _common(child.blocks, hashes, depth)
            if depth < start + len(child.blocks):
                break
        # A later use of a block also uses all blocks before it, so the insertion's remaining blocks end in this node.
        if node is not self._root and node.serial == serial:
            self._drop_tail(node, len(node.blocks) - max(0, held - start))

    def runs(self) -> Iterator[PrefixRun]:
        """Yield a copy of the tree.

        The most recently used comes first, and a run after the one it continues, so every beginning of the copy is a
        tree. The tree may change between two steps: blocks that are held throughout are copied, others may be.
        """
        numbers: dict[_Node | None, int] = {}
        for node in list(reversed(self._by_use)):
            # The node may have been split or dropped since; heads of split nodes are not in the list.
            while (first := self._first_not_in(numbers, node)) is not None:
                above = numbers.get(first.parent, -1)
                numbers[first] = len(numbers)
                yield PrefixRun(above, first.blocks.tobytes(), first.weight)

    def restore(self, runs: Iterable[PrefixRun]) -> None:
        """Fill an empty tree from a copy, evicting what exceeds the capacity. O(blocks).

        Raises:
            ValueError: not a copy of a tree; it stays empty.
        """
        nodes = [self._root]
        try:
            for above, packed, weight in runs:
                blocks = array("Q")
                blocks.frombytes(packed)
                if not blocks or not -1 <= above < len(nodes) - 1:
                    raise ValueError("an empty run, or one that continues no earlier one")
                if not 0 < weight < inf:
                    raise ValueError("a run without a weight")
                parent = nodes[above + 1]
                if blocks[0] in parent.children:
                    raise ValueError("two runs with the same first block")
                node = parent.children[blocks[0]] = _Node(blocks, parent, weight)
                self._by_use[node] = None
                self._by_use.move_to_end(node, last=False)
                self.blocks += len(blocks)
                self.weight += weight * len(blocks)
                nodes.append(node)
        except ValueError:
            self.clear()
            raise
        self._evict()

    def _first_not_in(self, numbers: dict[_Node | None, int], node: _Node) -> _Node | None:
        """First held node on the way to ``node`` that has no number; None if there is none."""
        first, each = None, node
        while each is not self._root and each not in numbers:
            if each in self._by_use:
                first = each
            if each.parent is None:
                break
            each = each.parent
        return first

    def _split(self, node: _Node, at: int) -> _Node:
        """Split a node in two; the new one is the head, the old one keeps its place in the order of use."""
        head = _Node(node.blocks[:at], node.parent, node.weight)
        assert node.parent is not None
        node.parent.children[head.blocks[0]] = head
        node.blocks = node.blocks[at:]
        node.parent = head
        head.children[node.blocks[0]] = node
        head.serial = node.serial
        self._by_use[head] = None
        return head

    def _evict(self) -> None:
        while self.weight > self.capacity and self._by_use:
            node = next(iter(self._by_use))
            self._drop_tail(node, ceil((self.weight - self.capacity) / node.weight))

    def _drop_tail(self, node: _Node, count: int) -> None:
        """Drop up to ``count`` blocks from the end of a node without children."""
        if count <= 0:
            return
        size = len(node.blocks)
        if count < size:
            del node.blocks[size - count :]
            self.blocks -= count
            self.weight -= count * node.weight
            return
        assert node.parent is not None
        del node.parent.children[node.blocks[0]]
        del self._by_use[node]
        self.blocks -= size
        # Without blocks exactly nothing, whatever sums of weights were rounded to.
        self.weight = self.weight - size * node.weight if self.blocks else 0.0


def _common(blocks: array[int], hashes: Sequence[int], depth: int) -> int:
    """Number of a node's blocks that match ``hashes`` from ``depth`` on; the first is known to be equal."""
    low, high = 1, min(len(blocks), len(hashes) - depth)
    if blocks[high - 1] == hashes[depth + high - 1]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if blocks[middle - 1] == hashes[depth + middle - 1]:
            low = middle
        else:
            high = middle
    return low


def distinct_blocks(trees: Iterable[PrefixTree]) -> int:
    """Number of blocks that at least one tree holds. O(nodes), plus O(log b) per node that several hold."""
    total = 0
    groups = [[(tree._root, 0) for tree in trees]]
    while groups:
        # All members of a group are at the same point of one chain; advance to where the first ends or branches.
        onward: dict[int, list[tuple[_Node, int]]] = defaultdict(list)
        for node, offset in groups.pop():
            if offset < len(node.blocks):
                onward[node.blocks[offset]].append((node, offset))
            else:
                for first, child in node.children.items():
                    onward[first].append((child, 0))
        for group in onward.values():
            node, offset = group[0]
            run = node.blocks[offset:]
            shared = len(run)
            for other, start in group[1:]:
                shared = min(shared, _common(run, other.blocks[start:], 0))
            total += shared
            groups.append([(node, offset + shared) for node, offset in group])
    return total
