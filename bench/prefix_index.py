"""Cost of the prefix index in one routing decision: hash, match, insert, and bytes per block held.

``python -m bench.prefix_index [--output FILE.json]`` builds an index of 8 instances that hold 125,000 blocks each
(1,000,000 in all), then times, one call at a time,

* ``match`` of an 88,000-token prompt (p90 of an agentic trace; 1,375 blocks of 64) in five situations; all but the last
take another prompt every time, because in production the entries of one prompt are not in the processor's cache, *
``insert`` of that prompt, new and already held, at the bound, so that every new block evicts one, * hashing of 88,000
token ids and of 130 KB of text,

and measures the resident memory of 1,000,000 held blocks in a separate process. Times are wall-clock
percentiles over ``--repeats`` calls after a tenth as many for warming up, with the garbage collector on, as in the
proxy. No test asserts these times; the tests count operations instead (``tests/policies``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter_ns
from typing import Annotated, Any, NamedTuple

import numpy as np
import psutil
import typer
from rich.console import Console
from rich.table import Table

from bench.figures.machine import machine
from bench.figures.result_file import writable
from policies.predict.blocks import hash_byte_blocks, hash_token_blocks, root_hash
from policies.predict.prefix_index import PrefixIndex

TARGET_MATCH_US = 300.0
TEXT_BYTES = 130_000
FIRST_FILLER = 1_000_000
"""Prompts from this number on fill the index; those below it are looked up."""


class Timing(NamedTuple):
    """One row of the result: wall-clock microseconds per call."""

    what: str
    p50_us: float
    p99_us: float
    calls: int


class Memory(NamedTuple):
    """Resident memory of an index, hash integers included."""

    held_blocks: int
    rss_bytes: int

    @property
    def bytes_per_held_block(self) -> float:
        """Resident bytes divided by (block, holder) pairs."""
        return self.rss_bytes / self.held_blocks


def prompt(number: int, blocks: int) -> list[int]:
    """Chained hashes of a prompt that shares no block with one of another number; new integers on every call."""
    return hash_byte_blocks(bytes(blocks * 4), 4, root_hash("bench", str(number)))


def filled_index(instances: int, blocks_each: int, prompt_blocks: int) -> PrefixIndex:
    """An index at its bound: every instance holds ``blocks_each`` blocks of its own prompts."""
    index = PrefixIndex(blocks_each)
    numbers = count(FIRST_FILLER)
    for i in range(instances):
        index.add_instance(f"inst-{i}")
        while index.blocks(f"inst-{i}") < blocks_each:
            index.insert(f"inst-{i}", prompt(next(numbers), prompt_blocks))
    return index


def timed(what: str, call: Callable[[Any], object], arguments: list[Any]) -> Timing:
    """Time ``call`` once per argument; the first tenth warms up and is not counted."""
    times_ns = []
    for argument in arguments:
        start_ns = perf_counter_ns()
        call(argument)
        times_ns.append(perf_counter_ns() - start_ns)
    counted = np.asarray(times_ns[len(times_ns) // 10 :], dtype=np.float64) / 1e3
    p50_us, p99_us = np.percentile(counted, [50, 99])
    return Timing(what, float(p50_us), float(p99_us), len(counted))


def measure_times(
    instances: int, blocks_each: int, prompt_tokens: int, block_tokens: int, text_block_bytes: int, repeats: int
) -> list[Timing]:
    """All rows but memory. Prompts rotate, so that their entries are not all in the processor's cache."""
    blocks = prompt_tokens // block_tokens
    index = filled_index(instances, blocks_each, blocks)
    few = max(20, repeats // 10)
    rotation = max(1, blocks_each // 2 // blocks)
    asked = [prompt(number, blocks) for number in range(rotation)]
    calls = [asked[call % rotation] for call in range(repeats)]

    def insert_everywhere(depth: Callable[[int], int]) -> None:
        for number in range(rotation):
            for i in range(instances):
                index.insert(f"inst-{i}", prompt(number, blocks)[: depth(i)])

    rows = [timed("match: held by no instance", index.match, calls)]
    insert_everywhere(lambda i: blocks if i == 0 else 0)
    rows.append(timed("match: held by one instance", index.match, calls))
    insert_everywhere(lambda i: blocks - i * blocks // instances)
    rows.append(timed(f"match: held to {instances} different depths", index.match, calls))
    insert_everywhere(lambda i: blocks)
    rows.append(timed(f"match: held by all {instances} instances", index.match, calls))
    rows.append(timed("match: the same prompt repeatedly", index.match, calls[:1] * repeats))
    rows.append(timed("insert: already held", lambda hashes: index.insert("inst-0", hashes), calls))
    fresh = [prompt(number, blocks) for number in range(rotation, rotation + few)]
    rows.append(timed("insert: all new, at the bound", lambda hashes: index.insert("inst-0", hashes), fresh))
    ids = np.random.default_rng(0).integers(0, 150_000, prompt_tokens).tolist()
    rows.append(timed(f"hash: {prompt_tokens:,} token ids", lambda i: hash_token_blocks(i, block_tokens), [ids] * few))
    text = os.urandom(TEXT_BYTES)
    what = f"hash: {TEXT_BYTES // 1000} KB of text in blocks of {text_block_bytes} B"
    rows.append(timed(what, lambda data: hash_byte_blocks(data, text_block_bytes), [text] * repeats))
    return rows


def measure_memory(instances: int, blocks_each: int, prompt_blocks: int) -> Memory:
    """Resident memory that a filled index adds to this process; run it in a fresh one."""
    process = psutil.Process()
    before_bytes = process.memory_info().rss
    index = filled_index(instances, blocks_each, prompt_blocks)
    held = sum(index.blocks(f"inst-{i}") for i in range(instances))
    return Memory(held, process.memory_info().rss - before_bytes)


def main(
    instances: Annotated[int, typer.Option(min=1, help="Instances of the fleet.")] = 8,
    held_blocks: Annotated[int, typer.Option(min=1, help="Blocks held by all instances together.")] = 1_000_000,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of the prompt that is looked up.")] = 88_000,
    block_tokens: Annotated[int, typer.Option(min=1, help="Token ids per prefix block.")] = 64,
    text_block_bytes: Annotated[int, typer.Option(min=1, help="Bytes per prefix block of a text prompt.")] = 1024,
    repeats: Annotated[int, typer.Option(min=20, help="Calls per row; a tenth of it for slow rows.")] = 2_000,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", callback=writable, help="Also write the figures to this JSON file.")
    ] = None,
) -> None:
    """Measure the prefix index and the hashing before it on this machine."""
    if prompt_tokens < block_tokens:
        raise typer.BadParameter(f"--prompt-tokens must be at least one block ({block_tokens})")
    blocks_each = max(1, held_blocks // instances)
    prompt_blocks = prompt_tokens // block_tokens
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as fresh_process:
        memory = fresh_process.submit(measure_memory, instances, blocks_each, prompt_blocks).result(timeout=600)
    rows = measure_times(instances, blocks_each, prompt_tokens, block_tokens, text_block_bytes, repeats)
    where = machine()

    table = Table(title=f"Prefix index: {instances} instances, {prompt_blocks:,} blocks of {block_tokens}")
    table.add_column("operation")
    for column in ("p50 µs", "p99 µs", "calls"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(row.what, f"{row.p50_us:,.1f}", f"{row.p99_us:,.1f}", f"{row.calls:,}")
    console = Console()
    console.print(table)
    console.print(
        f"memory: {memory.bytes_per_held_block:.0f} bytes per held block "
        f"({memory.rss_bytes / 2**20:.0f} MiB for {memory.held_blocks:,})"
    )
    slowest = max(row.p50_us for row in rows if row.what.startswith("match"))
    verdict = "met" if slowest < TARGET_MATCH_US else "missed"
    console.print(f"target: every match below {TARGET_MATCH_US:.0f} µs: {verdict} (slowest p50 {slowest:.0f} µs)")
    console.print(", ".join(f"{key} {value}" for key, value in where.items()), highlight=False)
    if output is not None:
        result = {
            "kind": "prefix_index",
            "schema": 1,
            "machine": where,
            "instances": instances,
            "prompt_tokens": prompt_tokens,
            "block_tokens": block_tokens,
            "text_block_bytes": text_block_bytes,
            "target_match_us": TARGET_MATCH_US,
            "timings": [row._asdict() for row in rows],
            "memory": memory._asdict() | {"bytes_per_held_block": memory.bytes_per_held_block},
        }
        output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
