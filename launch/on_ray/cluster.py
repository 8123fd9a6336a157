"""Access to a Ray cluster: joining it, placing a fleet's actors, calling them within a bound. Every call blocks."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

from launch.fleet.file import FleetFile
from launch.fleet.members import Member
from launch.on_ray.actor import NAMESPACE, EngineActor
from launch.run.processes import StartError

_LOOPBACK = "127.0.0.2"
"""Address of a cluster of this machine alone. Ray replaces 127.0.0.1 by an address that other machines reach."""
_CONNECT_S = 5.0
_STOP_S = 5.0


class LostError(Exception):
    """An actor that does not answer: its node is gone, or Ray is starting it again."""


class Cluster:
    """One connection to Ray, with the actors of one fleet. ``close`` ends them.

    Args:
        fleet: the fleet to place.
        prefix: begins the names of its actors.
        address: of a running cluster; None: the one that runs on this machine, else one of this machine alone, which
            ends with this process.
    """

    def __init__(self, fleet: FleetFile, prefix: str, address: str | None) -> None:
        self._fleet = fleet
        self._prefix = prefix
        self._address = address
        self._group: Any = None
        self._actors: dict[str, Any] = {}

    def open(self) -> str:
        """Join the cluster; returns a sentence on it. Raises StartError: no Ray, or no cluster at the address."""
        try:
            import ray
        except ImportError as error:
            raise StartError("--on ray needs the extra ray: pip install 'warmroute[ray]' on every node") from error
        if self._address is not None:
            _check_reachable(self._address)
        common: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": "error"}
        try:
            ray.init(address=self._address or "auto", **common)
        except (ConnectionError, RuntimeError, ValueError) as error:
            if self._address is not None:
                raise StartError(f"no Ray cluster at {self._address}: {error}") from error
            wanted = max(os.cpu_count() or 1, len(self._fleet.members))
            ray.init(num_cpus=wanted, include_dashboard=False, _node_ip_address=_LOOPBACK, **common)
            return "started Ray on this machine"
        return f"joined the Ray cluster of {len([each for each in ray.nodes() if each['Alive']])} node(s)"

    def place(self, timeout_s: float) -> None:
        """Reserve a bundle for each instance, spread over the nodes, and start its actor there.

        Raises:
            StartError: the cluster lacks the resources.
        """
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundles = [_resources(member, self._fleet) for member in self._fleet.members]
        self._group = placement_group(bundles, strategy="SPREAD")
        if not self._group.wait(timeout_s):
            free = ", ".join(f"{key} {value:g}" for key, value in sorted(ray.available_resources().items()))
            raise StartError(
                f"the cluster has no room for {len(bundles)} instances of {bundles[0]} within {timeout_s:g} s; "
                f"free: {free}"
            )
        remote = ray.remote(EngineActor)
        for member, bundle in zip(self._fleet.members, bundles, strict=True):
            self._actors[member.name] = remote.options(
                name=f"{self._prefix}/{member.name}",
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                max_restarts=-1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=member.index
                ),
            ).remote(self._fleet, member.index)

    def call(self, name: str, method: Callable[..., Any], timeout_s: float, *values: Any) -> Any:
        """Result of a method of an instance's actor.

        Raises:
            LostError: no result within ``timeout_s``.
        """
        import ray
        from ray.exceptions import RayError

        try:
            return ray.get(getattr(self._actors[name], method.__name__).remote(*values), timeout=timeout_s)
        except (RayError, TimeoutError) as error:
            raise LostError(str(error).strip().partition("\n")[0][:200]) from error

    def close(self, stop_grace_s: float) -> None:
        """End engines and actors, free their resources, and leave the cluster."""
        import ray
        from ray.exceptions import RayError
        from ray.util.placement_group import remove_placement_group

        if not ray.is_initialized():
            return
        try:
            stops = [actor.stop.remote() for actor in self._actors.values()]
            if stops:
                ray.wait(stops, num_returns=len(stops), timeout=stop_grace_s + _STOP_S)
            for actor in self._actors.values():
                ray.kill(actor)
            if self._group is not None:
                remove_placement_group(self._group)
        except RayError:
            pass  # a cluster that is gone has no actors either
        finally:
            self._actors = {}
            ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raises StartError: nothing listens there; Ray would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise StartError(f"no Ray cluster at {address}: {error}") from error


def _resources(member: Member, fleet: FleetFile) -> dict[str, float]:
    """Resources of one instance: a CPU, and its GPUs."""
    uses_gpus = fleet.kind == "vllm" and member.vllm.device == "cuda"
    gpus = member.vllm.tensor_parallel_size * member.vllm.data_parallel_size
    return {"CPU": 1.0, **({"GPU": float(gpus)} if uses_gpus else {})}
