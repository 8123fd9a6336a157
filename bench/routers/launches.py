"""Commands that start each router in front of the engines, with its documented settings."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml

from bench.replicas.processes import free_port
from bench.routers.arms import RouterArm, RouterProduct
from policies.registry import PolicyParameterError, UnknownPolicyError, make_routing
from replayer.records.version import installed_version
from warmroute_yaml import load_yaml

HOST = "127.0.0.1"
_VERSION_S = 60.0
_PACKAGES = {RouterProduct.VLLM: "vllm-router", RouterProduct.SGLANG: "sglang-router"}
_MODULES = {RouterProduct.VLLM: "vllm_router.launch_router", RouterProduct.SGLANG: "sglang_router.launch_router"}
_EVIDENCE = {
    RouterProduct.VLLM: (
        "vllm_router_prefix_routing_decisions_total",
        "vllm_router_kv_routing_inputs_total",
        "vllm_router_kv_placement_lookups_total",
    ),
    RouterProduct.SGLANG: ("smg_worker_selection_total",),
}

DOCUMENTED: Mapping[tuple[RouterProduct, str], Mapping[str, str]] = {
    # vllm-project/router, docs/load_balancing/README.md, "Cache Aware", its example. With the program's own defaults
    # (0.3, 64, 1.5) instances of 32 sequences are not balanced before one has a queue of two batches.
    (RouterProduct.VLLM, "cache_aware"): {
        "cache-threshold": "0.5",
        "balance-abs-threshold": "32",
        "balance-rel-threshold": "1.1",
    },
    # sgl-project/sglang, docs/advanced_features/router.md, "Load Balancing Policies", "Key tuning flags".
    (RouterProduct.SGLANG, "cache_aware"): {
        "cache-threshold": "0.5",
        "balance-abs-threshold": "32",
        "balance-rel-threshold": "1.5",
        "eviction-interval-secs": "120",
        "max-tree-size": "67108864",
    },
}
"""Options of the peers' policies. An arm's own options come after them."""


class RouterLaunchError(Exception):
    """A router that cannot be started; the message says why, and what to do."""


class PeerEnvironment(NamedTuple):
    """Installation of vLLM Router and SGLang's gateway."""

    python: str = sys.executable
    path: Path | None = None
    """Folder with their unpacked wheels, put before PYTHONPATH."""

    def variables(self) -> dict[str, str]:
        """The environment of their processes."""
        if self.path is None:
            return dict(os.environ)
        paths = [str(self.path.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
        return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


class RouterLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """Command and addresses of one router."""

    command: list[str]
    environment: dict[str, str]
    url: str
    ready_path: str
    """Answers with the number of engines that it sends requests to."""
    note: str
    """Version and settings, for the record."""
    metrics_url: str
    events_path: str = ""
    """Answers with the state of the KV events it follows; empty: the router has no such answer."""
    evidence: tuple[str, ...] = ()
    """Names of metrics that show how it decided."""


def launch_of(
    arm: RouterArm, base: Mapping[str, Any], folder: Path, peers: PeerEnvironment, model: str
) -> RouterLaunch:
    """The launch of an arm's router on free ports.

    Args:
        arm: the arm.
        base: settings of a warmroute proxy, with the engines as ``instances``.
        folder: for the router's settings.
        peers: where the other routers are installed.
        model: name of the served model.

    Raises:
        RouterLaunchError: the router is not installed, or lacks what it needs.
    """
    if arm.product is RouterProduct.WARMROUTE:
        return _warmroute(arm, base, folder)
    return _peer(arm, base["instances"], peers, model)


def check_arm(arm: RouterArm, base: Mapping[str, Any]) -> None:
    """Check what can be checked without starting anything. Raises RouterLaunchError."""
    if arm.product is RouterProduct.WARMROUTE:
        try:
            make_routing(arm.policy, policy_params(arm))
        except (UnknownPolicyError, PolicyParameterError) as error:
            raise RouterLaunchError(f"arm {arm.label}: {error}") from error
    elif arm.policy == "kv_aware" and not all(each.get("events_url") for each in base["instances"]):
        raise RouterLaunchError(f"arm {arm.label}: every instance in --config needs an events_url")


def policy_params(arm: RouterArm) -> dict[str, Any]:
    """Parameters of warmroute's policy; values are read as YAML."""
    return {key: load_yaml(value) for key, _, value in (each.partition("=") for each in arm.options)}


def settings_of(arm: RouterArm, base: Mapping[str, Any], port: int) -> dict[str, Any]:
    """Settings of a warmroute proxy with the arm's policy."""
    policy = {"name": arm.policy, "params": policy_params(arm)}
    # A router that starts on engines with a history would replay the events of all runs before, well into its own run.
    # Without that it trusts their events from the next time that they empty their caches, which is at its start.
    instances = [{key: each[key] for key in each if key != "events_replay_url"} for each in base["instances"]]
    return {"log_level": "warning", **base, "instances": instances, "host": HOST, "port": port, "policy": policy}


def _warmroute(arm: RouterArm, base: Mapping[str, Any], folder: Path) -> RouterLaunch:
    port = free_port()
    config = folder / "warmroute.yaml"
    config.write_text(yaml.safe_dump(settings_of(arm, base, port)), encoding="utf-8")
    url = f"http://{HOST}:{port}"
    return RouterLaunch(
        command=[sys.executable, "-m", "warmroute", "serve", "--config", str(config)],
        environment=dict(os.environ),
        url=url,
        ready_path="/ready",
        note=f"warmroute {installed_version() or 'of a source tree'}, policy {arm.settings}",
        metrics_url=f"{url}/metrics",
        events_path="/instances",
        evidence=(
            *("warmroute_offloads_total", "warmroute_prefill_specialists", "warmroute_recomputation"),
            "warmroute_short_prefill_step_seconds",
        ),
    )


def _peer(arm: RouterArm, instances: Sequence[Mapping[str, Any]], peers: PeerEnvironment, model: str) -> RouterLaunch:
    package, variables = _PACKAGES[arm.product], peers.variables()
    version = installed_peer(peers.python, package, variables)
    port, metrics_port = free_port(), free_port()
    options = dict(DOCUMENTED.get((arm.product, arm.policy), {}))
    options |= {key: value for key, _, value in (each.partition("=") for each in arm.options)}
    command = [
        *(peers.python, "-m", _MODULES[arm.product]),
        *("--host", HOST, "--port", str(port), "--policy", arm.policy),
        *("--prometheus-host", HOST, "--prometheus-port", str(metrics_port)),
        # Only how soon it finds the engines at its start.
        *("--worker-startup-check-interval", "1"),
        *(part for key, value in options.items() for part in (f"--{key}", value)),
    ]
    if arm.policy == "kv_aware":
        command += _event_sources(instances, model)
    command += ["--worker-urls", *(str(each["url"]) for each in instances)]
    settings = ", ".join(f"{key} {value}" for key, value in options.items())
    return RouterLaunch(
        command=command,
        environment=variables,
        url=f"http://{HOST}:{port}",
        ready_path="/readiness",
        note=f"{package} {version}, {arm.policy}, {settings or 'its defaults'}",
        metrics_url=f"http://{HOST}:{metrics_port}/metrics",
        evidence=_EVIDENCE[arm.product],
    )


def _event_sources(instances: Sequence[Mapping[str, Any]], model: str) -> list[str]:
    """vLLM Router's options for engines that publish KV events (its help: one source per worker)."""
    found = ["--kv-event-model", model]
    for each in instances:
        found += ["--kv-event-source", f"{each['url']}={each['events_url']}"]
    return found


def installed_peer(python: str, package: str, variables: Mapping[str, str]) -> str:
    """The installed version of a peer. Raises RouterLaunchError."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    try:
        done = subprocess.run(
            [python, "-c", code], env=dict(variables), capture_output=True, text=True, timeout=_VERSION_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise RouterLaunchError(
            f"{package} is not installed for {python}: python -m bench.data_plane.peers installs it (then give "
            "--peer-python .venv-peers/bin/python), or give the folder of its unpacked wheels with --peer-path"
        ) from error
    return done.stdout.strip()
