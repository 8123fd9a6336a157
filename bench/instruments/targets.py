"""The engines to measure: those of a fleet file that runs, or given by their URLs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec

from bench.analysis.architecture import Architecture
from bench.analysis.output import AnalysisError
from bench.analysis.sheets import MODEL_FOLDER, load_model
from bench.instruments.engine import InstrumentError
from bench.instruments.over_http import HttpEngine
from bench.instruments.record import EngineNote
from launch.engines.vllm import resolve_model
from launch.fleet.file import FleetError, FleetFile, find_fleet, load_fleet
from policies.types import Connector, Role
from replayer.replay.client import CONNECT_TIMEOUT_S, READ_BYTES
from replayer.replay.endpoint import EndpointError, first_model
from sim.hardware import ProfileError, load_profile

VLLM_BATCHED_TOKENS = 8_192
VLLM_SEQUENCES = 256
"""vLLM's own defaults on a data-centre GPU, where a fleet file gives none."""


class EngineAddress(msgspec.Struct, kw_only=True, frozen=True):
    """Address of one engine."""

    name: str
    url: str
    bootstrap_url: str | None = None
    connector: Connector = Connector.MOONCAKE


class Targets(msgspec.Struct, kw_only=True, frozen=True):
    """Engines of one kind, and what their fleet file says of them."""

    engines: tuple[EngineAddress, ...]
    fleet: str = ""
    model: str | None = None
    """None: the first that the engine names."""
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    transport: str | None = None
    kv_bytes_per_token: int | None = None
    """From the model's dimensions; None: unknown."""
    expert_miss: float | None = None
    """Share of its experts that one token leaves out; 0: dense; None: unknown."""

    def named(self, name: str) -> EngineAddress:
        """One engine by name or URL.

        Raises:
            InstrumentError: there is none.
        """
        for target in self.engines:
            if name in {target.name, target.url}:
                return target
        known = ", ".join(target.name for target in self.engines)
        raise InstrumentError(f"no engine {name!r}; there are: {known}")


def targets_of(fleet: Path | None, overrides: Sequence[str], urls: Sequence[str]) -> Targets:
    """The engines of a fleet file, or those at the URLs.

    Raises:
        InstrumentError: neither or both are given, or the file cannot be used.
    """
    if fleet is not None and urls:
        raise InstrumentError(f"{fleet} and --url are both given: give the fleet file, or the engines' addresses")
    if fleet is None and not urls:
        raise InstrumentError("give a fleet file whose engines are running, or their addresses with --url")
    if fleet is None:
        return Targets(engines=tuple(EngineAddress(name=url, url=url.rstrip("/").removesuffix("/v1")) for url in urls))
    try:
        path = find_fleet(fleet)
        return fleet_targets(load_fleet(path, overrides), path.stem)
    except FleetError as error:
        raise InstrumentError(str(error)) from error


def fleet_targets(fleet: FleetFile, name: str) -> Targets:
    """The engines that a fleet file starts.

    Raises:
        InstrumentError: simulated engines that do not run in real time.
    """
    engines = tuple(
        EngineAddress(name=member.name, url=fleet.url(member.index), bootstrap_url=fleet.bootstrap_url(member.index))
        for member in fleet.members
    )
    if fleet.kind == "sim":
        return _simulated(fleet, name, engines)
    vllm = fleet.members[0].vllm
    shape = _architecture(fleet.model)
    value_bytes = 1 if "8" in (vllm.kv_cache_dtype or "") else 4 if vllm.dtype in {"float32", "float"} else 2
    transfer = None if fleet.members[0].role is Role.NONE else vllm.transfer.protocol.value
    return Targets(
        engines=engines,
        fleet=name,
        model=fleet.request_model,
        max_num_batched_tokens=vllm.max_num_batched_tokens,
        max_num_seqs=vllm.max_num_seqs,
        max_model_len=vllm.max_model_len,
        transport=transfer,
        kv_bytes_per_token=None if shape is None else round(shape.kv_bytes_per_token(value_bytes)),
        expert_miss=None if shape is None else 1 - shape.active_share,
    )


def _simulated(fleet: FleetFile, name: str, engines: tuple[EngineAddress, ...]) -> Targets:
    sim = fleet.sim
    if sim.time_scale != 1.0:
        raise InstrumentError("instruments measure wall time: run the engines with sim.time_scale: 1")
    try:
        profile = load_profile(sim.profile)
    except ProfileError as error:
        raise InstrumentError(str(error)) from error
    return Targets(
        engines=engines,
        fleet=name,
        model=fleet.request_model,
        max_num_batched_tokens=sim.max_num_batched_tokens or profile.max_num_batched_tokens,
        max_num_seqs=sim.max_num_seqs or profile.max_num_seqs,
        max_model_len=sim.max_model_len or profile.max_model_len,
        transport=None if fleet.role is Role.NONE else sim.transport or profile.default_transport,
        kv_bytes_per_token=profile.kv.bytes_per_token,
    )


def _architecture(model: str) -> Architecture | None:
    """Dimensions of a model folder, or of a known model by its id; None where neither is found."""
    config = Path(resolve_model(model)) / "config.json"
    known = sorted(path.stem for path in MODEL_FOLDER.glob("*.yaml"))
    by_id = [stem for stem in known if model.rpartition("/")[2].lower().startswith(stem)]
    try:
        return load_model(str(config)) if config.is_file() else load_model(by_id[-1]) if by_id else None
    except AnalysisError:
        return None


@asynccontextmanager
async def opened(
    targets: Sequence[EngineAddress], model: str | None, api_key: str | None, timeout_s: float
) -> AsyncIterator[list[HttpEngine]]:
    """Engines ready to be measured; their connections are closed at the end of the block.

    Raises:
        InstrumentError: the first does not name its model.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=READ_BYTES) as http:
        try:
            served = model or await first_model(http, targets[0].url, api_key, option="--url")
        except EndpointError as error:
            raise InstrumentError(str(error)) from error
        yield [
            HttpEngine(
                http,
                target.name,
                target.url,
                served,
                bootstrap_url=target.bootstrap_url,
                connector=target.connector,
                timeout_s=timeout_s,
                api_key=api_key,
            )
            for target in targets
        ]


async def notes_of(engines: Sequence[HttpEngine], targets: Targets) -> list[EngineNote]:
    """The engines as the record describes them.

    Raises:
        InstrumentError: one does not answer.
    """
    return [
        EngineNote(
            name=engine.name,
            url=engine.url,
            model=engine.model,
            version=await engine.version(),
            pool_tokens=(await engine.report()).pool_tokens,
            max_num_batched_tokens=targets.max_num_batched_tokens,
        )
        for engine in engines
    ]
