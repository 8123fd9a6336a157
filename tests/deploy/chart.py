"""The Helm chart: its rendered copy, and what it was rendered from.

`python -m tests.deploy.chart` renders ``configs/deploy/kubernetes.yaml`` again (`make helm` first).
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
HELM = ROOT / ".helm" / "helm"
CHART = ROOT / "configs" / "deploy" / "helm" / "warmroute"
RENDERED = ROOT / "configs" / "deploy" / "kubernetes.yaml"
_VERSION = "1.34.0"
"""Helm built from its module assumes a Kubernetes of 2020."""


def render(values: Mapping[str, Any] | None = None, name: str = "warmroute") -> str:
    """The chart's manifests. Raises subprocess.CalledProcessError with Helm's message in ``stderr``."""
    command = [
        str(HELM),
        "template",
        name,
        str(CHART),
        "--namespace",
        "default",
        "--kube-version",
        _VERSION,
        "--values",
        "-",
    ]
    ran = subprocess.run(
        command, input=json.dumps(values or {}), capture_output=True, text=True, check=True, timeout=60
    )
    return ran.stdout


def documents(text: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Manifests by kind and name."""
    found = [each for each in yaml.safe_load_all(text) if each]
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def fingerprint() -> str:
    """SHA-256 of the chart's files, so that a copy rendered from other files is noticed without Helm."""
    total = hashlib.sha256()
    for path in sorted(each for each in CHART.rglob("*") if each.is_file()):
        total.update(f"{path.relative_to(CHART).as_posix()}\n".encode() + path.read_bytes())
    return total.hexdigest()


def rendered_copy() -> str:
    """Text of ``configs/deploy/kubernetes.yaml``."""
    return (
        "# The Helm chart beside this file with its default values, for those who have no Helm:\n"
        "#   kubectl apply -n default -f configs/deploy/kubernetes.yaml\n"
        f"# Rendered by `python -m tests.deploy.chart` from files with the SHA-256 {fingerprint()}.\n{render()}"
    )


if __name__ == "__main__":
    RENDERED.write_text(rendered_copy())
