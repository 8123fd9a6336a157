"""Gather what ``doctor --deep`` adds: paths between GPUs and adapters, Mooncake's topology, hand-offs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from launch.doctor.facts import Deep, EnginePython, FleetFacts, HandOffTest
from launch.doctor.probes.commands import answer
from launch.doctor.probes.output import near_nics, topology_matrix
from launch.fleet.file import FleetFile

HandOffs = Callable[[FleetFile, str], list[HandOffTest]]
"""(fleet, its source) -> one hand-off for each engine of the running fleet; raises `HandOffError`."""
_TOPOLOGY_S = 60.0
"""Mooncake loads, and looks at every adapter."""


class HandOffError(RuntimeError):
    """Hand-offs that could not be made at all; the message says why."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.remedy = remedy
        """Empty where the message contains it."""


def gather_deep(
    python: EnginePython,
    environment: Mapping[str, str],
    fleet: FleetFile | None,
    facts: FleetFacts | None,
    hand_offs: HandOffs | None,
) -> Deep:
    """The facts of ``--deep``. A running fleet's engines get one short prompt each; nothing else changes.

    Args:
        python: the engines' Python.
        environment: of the engines.
        fleet: the fleet to test; None: only the machine.
        facts: the same as the checks see it.
        hand_offs: makes the hand-offs; None where that part of the project is not at hand.
    """
    printed, matrix_error = answer(["nvidia-smi", "topo", "-m"])
    matrix = topology_matrix(printed or "")
    command = [python.executable, "-m", "mooncake.transfer_engine_topology_dump"]
    dumped, near_error = answer(command, environment, _TOPOLOGY_S)
    near = near_nics(dumped or "")
    made, made_error, made_remedy = _hand_offs(fleet, facts, hand_offs)
    return Deep(
        matrix=matrix,
        matrix_error=matrix_error or ("" if matrix else "no matrix in its output"),
        near_nics=near,
        near_nics_error=near_error or ("" if near is not None else "no topology in its output"),
        hand_offs=made,
        hand_offs_error=made_error,
        hand_offs_remedy=made_remedy,
    )


def _hand_offs(
    fleet: FleetFile | None, facts: FleetFacts | None, hand_offs: HandOffs | None
) -> tuple[list[HandOffTest] | None, str, str]:
    """The hand-offs; if there are none, the reason and its remedy."""
    if fleet is None or facts is None:
        return None, "no fleet is given (--fleet)", "give --fleet FILE of a running fleet"
    if not fleet.has_bootstrap:
        remedy = "give its engines roles other than none, if they are to exchange KV"
        return None, "no engine of the fleet has a KV connector that sends", remedy
    if hand_offs is None:
        return None, "only the whole command line makes hand-offs", "run `warmroute doctor`"
    try:
        return hand_offs(fleet, facts.source), "", ""
    except HandOffError as error:
        return None, str(error), error.remedy
