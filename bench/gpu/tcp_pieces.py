"""Find how many pieces one Mooncake transfer over TCP may have: sends so many from one process to another, on loopback.

Needs nothing of this project and no GPU; run it with the engines' Python::

    python bench/gpu/tcp_pieces.py 2000 2500 65000 70000
    MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER=1000000 python bench/gpu/tcp_pieces.py 378816

Each line: pieces, ``taken`` or ``refused``, seconds. ``PIECE_BYTES`` is the size of a piece (default 256).
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import sys
import time
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from typing import Any

PIECE_BYTES = int(os.environ.get("PIECE_BYTES", "256"))
_WAIT_S = 60.0


def engine_with(size_bytes: int) -> tuple[Any, ctypes.Array[ctypes.c_char]]:
    """A transfer engine over TCP, and memory that it may use; the caller keeps both."""
    engine = importlib.import_module("mooncake.engine").TransferEngine()
    memory = ctypes.create_string_buffer(size_bytes)
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        raise SystemExit("error: the transfer engine did not start")
    if engine.register_memory(ctypes.addressof(memory), size_bytes) != 0:
        raise SystemExit("error: the memory was not registered")
    return engine, memory


def receive(size_bytes: int, address: Queue[tuple[str, int]], done: Event) -> None:
    """Offer memory until ``done``."""
    engine, memory = engine_with(size_bytes)
    address.put((f"127.0.0.1:{engine.get_rpc_port()}", ctypes.addressof(memory)))
    done.wait()


def main(numbers: list[int]) -> None:
    """Send each number of pieces in one call."""
    os.environ.setdefault("MC_FORCE_TCP", "1")
    size_bytes = PIECE_BYTES * max(numbers)
    context = multiprocessing.get_context("spawn")
    address: Queue[tuple[str, int]] = context.Queue()
    done = context.Event()
    receiver = context.Process(target=receive, args=(size_bytes, address, done))
    receiver.start()
    try:
        engine, memory = engine_with(size_bytes)
        here = ctypes.addressof(memory)
        peer, there = address.get(timeout=_WAIT_S)
        for count in numbers:
            places = [number * PIECE_BYTES for number in range(count)]
            started_s = time.perf_counter()
            result = engine.batch_transfer_sync_write(
                peer, [here + place for place in places], [there + place for place in places], [PIECE_BYTES] * count
            )
            taken = "taken" if result == 0 else "refused"
            print(f"{count:,} {taken} {time.perf_counter() - started_s:.2f} s", flush=True)
    finally:
        done.set()
        receiver.join(_WAIT_S)
        if receiver.is_alive():
            receiver.kill()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    main([int(argument) for argument in sys.argv[1:]])
