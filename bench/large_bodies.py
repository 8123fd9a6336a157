"""Delay of small requests while other clients send large bodies.

``python -m bench.large_bodies [--seconds 10] [--clients 8] [--mib 28]`` starts an engine stub, ``warmroute serve`` and,
in a further process, clients that send bodies of one shape without a pause. It measures ``GET /health`` and small
completions alone and beside each shape, one request every 20 ms, and exits with 1 unless p99 stays within 200 ms of
the p99 alone. Stub and clients need processor time as well: with two cores part of the delay is theirs.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
import yaml

from bench.figures.machine import machine

TARGET_MS = 200.0
MODEL = "m"
_READY_S = 30.0
_HEAD = {"content-type": "application/json"}
_SMALL = json.dumps({"model": MODEL, "prompt": "hello " * 400, "max_tokens": 4}).encode()


def shapes(mib: int) -> dict[str, bytes]:
    """Bodies of ``mib`` MiB, by name."""
    size = mib * 2**20
    ids = ",".join(str(number * 7919 % 151_000) for number in range(size // 7))
    text = json.dumps("some words of text,\n" * (size // 21)).encode()
    return {
        "text": b'{"model":"m","prompt":' + text + b"}",
        "token ids": b'{"model":"m","prompt":[' + ids.encode() + b"]}",
        "lists of one id": b'{"model":"m","prompt":[' + b"[1]," * (size // 4) + b"[1]]}",
        "messages": b'{"model":"m","messages":[' + b'{"role":"user"},' * (size // 16) + b'{"role":"user"}]}',
    }


class _Engine(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        found = {"/health": b"", "/v1/models": json.dumps({"object": "list", "data": [{"id": MODEL}]}).encode()}
        self._answer(200 if self.path in found else 404, found.get(self.path, b""))

    def do_POST(self) -> None:
        left = int(self.headers["content-length"])
        while left:
            left -= len(self.rfile.read(min(left, 2**20)))
        choice = {"index": 0, "text": "x", "finish_reason": "length"}
        self._answer(200, json.dumps({"choices": [choice]}).encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def _serve_engine(port: int) -> None:
    ThreadingHTTPServer(("127.0.0.1", port), _Engine).serve_forever()


def _send_large(
    port: int, name: str, mib: int, clients: int, begun: Event, ending: Event, counts: SimpleQueue[Counter[str]]
) -> None:
    body = shapes(mib)[name]
    path = "/v1/chat/completions" if b'"messages"' in body[:40] else "/v1/completions"

    answers: Counter[str] = Counter()

    def send() -> None:
        while not ending.is_set():
            try:
                answers[f"{_status(port, 'POST', path, body)}"] += 1
            except (OSError, http.client.HTTPException):
                answers["no answer"] += 1

    threads = [threading.Thread(target=send) for _ in range(clients)]
    for thread in threads:
        thread.start()
    begun.set()
    for thread in threads:
        thread.join()
    counts.put(answers)


def _status(port: int, method: str, path: str, body: bytes | None = None) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body, _HEAD)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _proxy() -> Iterator[int]:
    engine_port, port = _free_port(), _free_port()
    engine = get_context("spawn").Process(target=_serve_engine, args=(engine_port,), daemon=True)
    engine.start()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "proxy.yaml"
        instances = [{"name": "stub", "url": f"http://127.0.0.1:{engine_port}"}]
        config.write_text(yaml.safe_dump({"port": port, "instances": instances, "log_level": "error"}), "utf-8")
        proxy = subprocess.Popen([sys.executable, "-m", "warmroute", "serve", "--config", str(config)])
        try:
            _until_ready(port)
            yield port
        finally:
            proxy.terminate()
            proxy.wait(60)
            engine.terminate()
            engine.join()


def _until_ready(port: int) -> None:
    deadline_s = time.monotonic() + _READY_S
    while time.monotonic() < deadline_s:
        with suppress(OSError):
            if _status(port, "GET", "/ready") == 200:
                return
        time.sleep(0.1)
    raise TimeoutError(f"the proxy was not ready within {_READY_S:g} s")


def _delays_ms(port: int, seconds: float) -> dict[str, list[float]]:
    """Times of both kinds of small requests."""
    times: dict[str, list[float]] = {"health": [], "completion": []}
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        for kind, request in (("health", ("GET", "/health")), ("completion", ("POST", "/v1/completions", _SMALL))):
            start_s = time.perf_counter()
            _status(port, *request)
            times[kind].append((time.perf_counter() - start_s) * 1e3)
            time.sleep(0.02)
    return times


def main(
    seconds: Annotated[float, typer.Option(help="Seconds of each measurement.")] = 10.0,
    clients: Annotated[int, typer.Option(help="Clients with large bodies.")] = 8,
    mib: Annotated[int, typer.Option(help="Size of a large body in MiB.")] = 28,
) -> None:
    """Measure and print one row per shape; exit status 1 if the target is missed."""
    spawn = get_context("spawn")
    missed = False
    with _proxy() as port:
        alone = _delays_ms(port, seconds)
        _print("alone", alone)
        for name in shapes(1):
            begun, ending, counts = spawn.Event(), spawn.Event(), spawn.SimpleQueue()
            large = spawn.Process(target=_send_large, args=(port, name, mib, clients, begun, ending, counts))
            large.start()
            begun.wait(120)
            time.sleep(1)  # the first bodies arrive
            beside = _delays_ms(port, seconds)
            ending.set()
            answers = counts.get()
            large.join()
            _print(name, beside, f"large: {dict(answers)}")
            missed |= any(
                np.percentile(beside[kind], 99) - np.percentile(alone[kind], 99) > TARGET_MS for kind in alone
            )
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    if missed:
        raise typer.Exit(1)


def _print(name: str, times: dict[str, list[float]], large: str = "") -> None:
    figures = (
        f"{kind} p50 {np.percentile(each, 50):.1f} p99 {np.percentile(each, 99):.1f} max {max(each):.1f} ms"
        for kind, each in times.items()
    )
    print(f"{name:16}", "; ".join(figures), f"({len(times['health'])} each)", large, flush=True)


if __name__ == "__main__":
    typer.run(main)
