"""Transport that a connector really uses, from Mooncake's lines in the engine's log.

The configured name is not proof: Mooncake's NVLink transport is configured as tcp, and where Mooncake finds an RDMA
adapter it may use that regardless of the name.
"""

from __future__ import annotations

import os
import re
from itertools import pairwise

from launch.fleet.members import Member
from launch.run.processes import ManagedProcess, StartError
from policies.types import Role, Transport

_EVIDENCE = (
    # The first match counts: NVLink is set up beside TCP, which then only carries the handshake.
    (Transport.NVLINK, re.compile(r"Using Intra-Node NVLink transport")),
    # Not the transport's name alone: it also stands before "No available EFA devices".
    (Transport.EFA, re.compile(r"EFA device \(libfabric\): \S|EfaTransport: Started \d")),
    (Transport.RDMA, re.compile(r"RDMA device: \S+.*\b(LID|GID)\b")),
    (Transport.TCP, re.compile(r"TcpTransport: listen on port")),
)


def proven_transport(log: str) -> Transport | None:
    """The transport a log shows; None when it shows none."""
    return next((protocol for protocol, line in _EVIDENCE if line.search(log)), None)


def prove_transport(process: ManagedProcess, before: Transport | None = None) -> tuple[Transport | None, str | None]:
    """The transport of a ready engine, and a sentence when it is not the configured one and that is allowed.

    Args:
        process: the engine.
        before: transport that its previous start proved; it counts where a full disk has cut the log.

    Raises:
        StartError: it is not the configured one and the fleet requires the proof.
    """
    member = process.spec.member
    if member is None or member.role is Role.NONE:
        return None, None
    if process.spec.kind == "sim":
        return _simulated(process.spec.command), None
    found = proven_transport(process.log_text())
    wanted = member.vllm.transfer.protocol
    if found is wanted:
        return found, None
    if found is None and before is wanted and _disk_full(process):
        return before, (
            f"{process.spec.name}: the disk of {process.log_path} is full, so its transport is the one that its "
            f"previous start proved, {before}"
        )
    shown = f"its log shows {found}" if found else "its log does not show any transport"
    message = f"{process.spec.name} should move KV over {wanted}, but {shown} ({process.log_path})"
    if member.vllm.transfer.proof_required:
        raise StartError(f"{message}. {_advice(member)}")
    return found, message


def _disk_full(process: ManagedProcess) -> bool:
    try:
        return os.statvfs(process.log_path).f_bavail == 0
    except OSError:
        return False


def _simulated(command: tuple[str, ...]) -> Transport | None:
    """Transport in a simulated engine's command line; None where it is the profile's default."""
    message = dict(pairwise(command)).get("--transport")
    return Transport(message) if message in set(Transport) else None


def _advice(member: Member) -> str:
    if member.vllm.transfer.protocol is Transport.NVLINK:
        return (
            "NVLink needs Mooncake 0.3.13 or later built for CUDA, GPUs of one host, and MC_FORCE_TCP unset; choose "
            "protocol tcp, or transport_proof: report to run anyway."
        )
    return "Choose the transport that is there, or transport_proof: report to run anyway."
