"""A process that asks a fleet's actors on a Ray cluster, again and again, and prints the engines that can be used.

Each line of its output is a JSON list of instances, or an object with ``error``. It is a process of its own, because
Ray ends a process whose cluster is lost, and takes over its signals.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

_NAMESPACE = "warmroute"
"""Namespace of the fleets of `warmroute up --on ray`."""
_JOIN_ERRORS = (ConnectionError, ImportError, OSError, RuntimeError, ValueError)


def main(fleet: str, address: str, interval_s: float, timeout_s: float) -> None:
    """Print readings until the output is closed. Errors after the start are printed and end it."""
    try:
        import ray
        from ray.exceptions import RayError

        ray.init(address=address, namespace=_NAMESPACE, log_to_driver=False, logging_level="error")
    except _JOIN_ERRORS as error:
        _print({"error": f"{type(error).__name__}: {error}"})
        return
    while True:
        try:
            _print(_usable(fleet, timeout_s))
        except RayError as error:
            _print({"error": f"{type(error).__name__}: {error}"})
            return
        time.sleep(interval_s)


def _usable(fleet: str, timeout_s: float) -> list[dict[str, Any]]:
    """Instances of the actors that answer in time, and whose engines are ready."""
    import ray
    from ray.exceptions import RayError
    from ray.util import list_named_actors

    asked = []
    for name in sorted(each for each in list_named_actors() if each.startswith(f"{fleet}/")):
        try:
            asked.append(ray.get_actor(name).report.remote(sys.maxsize))
        except ValueError:
            continue  # it has ended since
    answered, _ = ray.wait(asked, num_returns=len(asked), timeout=timeout_s) if asked else ([], [])
    found = []
    for each in answered:
        try:
            report = json.loads(ray.get(each))
        except RayError:
            continue  # its node is lost, or Ray is starting it again
        if report["status"] == "ready":
            found.append(report["instance"])
    return found


def _print(line: Any) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
