"""Start commands and settings of each stack in front of the engines."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from bench.data_plane.load.client import LoadTarget
from bench.data_plane.peers import PEERS_BIN, peer_version
from proxy.settings import TracingSettings

HOST = "127.0.0.1"
OURS = "warmroute"
BASELINE = "baseline"
"""Our proxy from another source tree, to measure a change against what was there before in one interleaved run."""
UNOBSERVED = "warmroute-unobserved"
"""Our proxy without a breakdown file, shadow policies, traces or an open dashboard."""
OBSERVED = "warmroute-observed"
"""Our proxy with all of these; traces of the default share of requests."""
TRACED = "warmroute-traced"
"""The same with a trace of every request."""
SHADOWS = ["linear", "least_loaded", "lmetric"]


class StackError(Exception):
    """A stack that cannot be started; the message says why, and what to do."""


class NotInstalledError(StackError):
    """The program is not on this machine."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Command and settings of one stack."""

    command: list[str]
    note: str
    """Version and settings, for the record."""
    evidence: tuple[str, str | tuple[str, ...]] | None = None
    """URL of its metrics, and the names of those that show what it did."""
    companions: tuple[list[str], ...] = ()
    """Commands of processes that run beside it, whose CPU is not counted as its own."""


def free_ports(count: int) -> list[int]:
    """Distinct ports that are free now; all are held open until the last one is drawn."""
    sockets = [socket.create_server((HOST, 0)) for _ in range(count)]
    try:
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _settings(port: int, engines: Sequence[LoadTarget]) -> dict[str, Any]:
    return {
        "host": HOST,
        "port": port,
        "instances": [
            {"name": f"inst-{i}", "url": f"http://{engine.host}:{engine.port}"} for i, engine in enumerate(engines)
        ],
        "policy": {"name": "linear"},
        "grace_s": 3.0,
        "log_level": "warning",
    }


def _serve(folder: Path, settings: dict[str, Any]) -> list[str]:
    """Arguments for Python; the settings are written to ``folder``."""
    config = folder / "warmroute.yaml"
    config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return ["-m", "warmroute", "serve", "--config", str(config)]


def warmroute(
    port: int, engines: Sequence[LoadTarget], folder: Path, profile: Path | None = None, tree: Path | None = None
) -> Launch:
    """Our proxy with every feature of a plain deployment: index, ledger, breakdown with its file, metrics, health.

    Args:
        tree: source tree to run it from; None: the one this benchmark runs from.
    """
    file = {"breakdown": {"jsonl_path": str(folder / "breakdown.jsonl")}}
    serve = _serve(folder, {**_settings(port, engines), **file})
    note = f"warmroute {version('warmroute')}, policy linear, breakdown file on"
    if tree is not None:
        # -P: the current folder must not come before the tree.
        command = ["env", f"PYTHONPATH={tree.resolve()}", sys.executable, "-P", *serve]
        return Launch(command=command, note=f"{note}, from {tree.name}")
    return Launch(command=_profiled(serve, profile), note=note)


def unobserved(port: int, engines: Sequence[LoadTarget], folder: Path) -> Launch:
    """Our proxy without what an operator may switch on to watch it."""
    serve = _serve(folder, {**_settings(port, engines), "policy": {"name": "warm"}})
    return Launch(command=[sys.executable, *serve], note=f"warmroute {version('warmroute')}, policy warm, not observed")


def observed(port: int, engines: Sequence[LoadTarget], folder: Path) -> Launch:
    """Our proxy with the breakdown in a file, three shadow policies, traces, and a dashboard open."""
    return _watched(port, engines, folder, TracingSettings().sample_ratio)


def traced(port: int, engines: Sequence[LoadTarget], folder: Path) -> Launch:
    """The same with a trace of every request."""
    return _watched(port, engines, folder, 1.0)


def _watched(port: int, engines: Sequence[LoadTarget], folder: Path, sample_ratio: float) -> Launch:
    collector = free_ports(1)[0]
    watched = {
        "policy": {"name": "warm"},
        "breakdown": {"jsonl_path": str(folder / "breakdown.jsonl")},
        "shadow": {"policies": SHADOWS},
        "tracing": {"enabled": True, "endpoint": f"http://{HOST}:{collector}", "sample_ratio": sample_ratio},
    }
    serve = _serve(folder, {**_settings(port, engines), **watched})
    observer = [sys.executable, "-m", "bench.data_plane.observers"]
    return Launch(
        command=[sys.executable, *serve],
        note=f"warmroute {version('warmroute')}, policy warm, file, {len(SHADOWS)} shadows, "
        f"traces of {sample_ratio:.0%}, dashboard open",
        evidence=(f"http://{HOST}:{port}/metrics", ("warmroute_shadow_requests_total", "warmroute_traces_total")),
        companions=(
            [*observer, "collect", str(collector)],
            [*observer, "watch", f"http://{HOST}:{port}"],
        ),
    )


def _profiled(arguments: list[str], profile: Path | None) -> list[str]:
    """Python with these arguments, under a profiler if ``profile`` is given: py-spy for .svg, else cProfile."""
    if profile is None:
        return [sys.executable, *arguments]
    if profile.suffix != ".svg":
        return [sys.executable, "-m", "cProfile", "-o", str(profile), *arguments]
    program = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if program is None:
        raise StackError("a profile in .svg needs py-spy: pip install py-spy, or give another suffix to use cProfile")
    return [program, "record", "--rate", "400", "--output", str(profile), "--", sys.executable, *arguments]


def _peer(name: str) -> str:
    program = PEERS_BIN / name
    if not program.exists():
        raise NotInstalledError(f"{program} is missing: python -m bench.data_plane.peers installs it")
    return str(program)


def _vllm_router(policy: str, port: int, engines: Sequence[LoadTarget], folder: Path) -> Launch:
    metrics_port = free_ports(1)[0]
    command = [
        _peer("vllm-router"),
        *("--host", HOST, "--port", str(port), "--policy", policy),
        *("--prometheus-host", HOST, "--prometheus-port", str(metrics_port), "--log-level", "warning"),
        *("--worker-urls", *(f"http://{engine.host}:{engine.port}" for engine in engines)),
    ]
    return Launch(
        command=command,
        note=f"vllm-router {peer_version('vllm-router')}, policy {policy}, else its defaults",
        evidence=(f"http://{HOST}:{metrics_port}/metrics", "vllm_router_prefix_routing_decisions_total"),
    )


def vllm_router_round_robin(port: int, engines: Sequence[LoadTarget], folder: Path) -> Launch:
    """vLLM Router with round robin, which does not read prompts."""
    return _vllm_router("round_robin", port, engines, folder)


def vllm_router_cache_aware(port: int, engines: Sequence[LoadTarget], folder: Path) -> Launch:
    """vLLM Router's default: every text prompt is rendered to token ids by every engine."""
    return _vllm_router("cache_aware", port, engines, folder)


def sglang_cache_aware(port: int, engines: Sequence[LoadTarget], folder: Path) -> Launch:
    """SGLang's gateway with its default policy."""
    command = [
        *(_peer("sglang-router"), "launch", "--host", HOST, "--port", str(port), "--policy", "cache_aware"),
        *("--prometheus-host", HOST, "--prometheus-port", str(free_ports(1)[0]), "--log-level", "warn"),
        *("--worker-urls", *(f"http://{engine.host}:{engine.port}" for engine in engines)),
    ]
    return Launch(
        command=command, note=f"sglang-router {peer_version('sglang-router')}, cache_aware, else its defaults"
    )


NGINX = """
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log warn;
events {{ worker_connections 8192; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  client_max_body_size 64m;
  client_body_buffer_size 1m;
  tcp_nodelay on;
  keepalive_requests 1000000;
  upstream engines {{
    {servers}
    keepalive 512;
    keepalive_timeout 4s;
    keepalive_requests 1000000;
  }}
  server {{
    listen {host}:{port} backlog=4096;
    location / {{
      proxy_pass http://engines;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_read_timeout 600s;
    }}
  }}
}}
"""


def nginx(port: int, engines: Sequence[LoadTarget], folder: Path) -> Launch:
    """nginx, round robin over kept connections: the cost of relaying alone. Raises NotInstalledError."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if program is None:
        raise NotInstalledError("nginx is not installed: apt-get install nginx-light")
    config = folder / "nginx.conf"
    servers = "\n    ".join(f"server {engine.host}:{engine.port};" for engine in engines)
    config.write_text(NGINX.format(folder=folder, servers=servers, host=HOST, port=port), encoding="utf-8")
    said = subprocess.run([program, "-v"], capture_output=True, text=True, timeout=10, check=False).stderr.strip()
    command = [program, "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(config)]
    return Launch(
        command=command, note=f"{said.removeprefix('nginx version: ')}, one worker, round robin, buffering off"
    )


LAUNCHES: dict[str, Callable[[int, Sequence[LoadTarget], Path], Launch]] = {
    OURS: warmroute,
    "vllm-router-rr": vllm_router_round_robin,
    "vllm-router-ca": vllm_router_cache_aware,
    "sglang-ca": sglang_cache_aware,
    "nginx": nginx,
}
"""Every stack but ``direct``, which is the engines themselves."""

VARIANTS: dict[str, Callable[[int, Sequence[LoadTarget], Path], Launch]] = {
    UNOBSERVED: unobserved,
    OBSERVED: observed,
    TRACED: traced,
}
"""Stacks that are measured only where they are named."""
