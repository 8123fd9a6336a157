"""vLLM as an engine kind: command line, environment, and requirements before it can start."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.fleet.checks import ALLOCATOR_VARIABLES, NVLINK_VARIABLE
from launch.fleet.fabric import fabric_environment, library_directories
from launch.fleet.file import FleetFile
from launch.fleet.members import Member
from launch.fleet.pieces import TCP_QUEUE
from policies.types import Role, Transport

PROJECT = Path(__file__).resolve().parents[2]
_MODULE = "vllm.entrypoints.openai.api_server"
# The `vllm` command looks up its own distribution's version, which the CPU build does not have under that name.
_TCMALLOC = (
    "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4",
    "/usr/lib/aarch64-linux-gnu/libtcmalloc_minimal.so.4",
    "/usr/lib64/libtcmalloc_minimal.so.4",
)
_FORCE_TCP = "MC_FORCE_TCP"


class VllmEngine:
    """``python -m vllm.entrypoints.openai.api_server``."""

    def command(self, fleet: FleetFile, index: int) -> tuple[str, ...]:
        """Command line of instance ``index``."""
        member = fleet.members[index]
        vllm = member.vllm
        options: list[tuple[str, Any]] = [
            ("model", resolve_model(member.model)),
            ("served-model-name", fleet.served_model_name),
            ("host", fleet.host),
            ("port", member.port),
            ("dtype", vllm.dtype),
            ("block-size", vllm.block_size),
            ("kv-cache-dtype", vllm.kv_cache_dtype),
            ("num-gpu-blocks-override", vllm.num_gpu_blocks_override),
            ("max-model-len", vllm.max_model_len),
            ("max-num-seqs", vllm.max_num_seqs),
            ("scheduling-policy", vllm.scheduling_policy if vllm.scheduling_policy != "fcfs" else None),
            ("max-num-batched-tokens", vllm.max_num_batched_tokens),
            ("long-prefill-token-threshold", vllm.long_prefill_token_threshold or None),
            ("gpu-memory-utilization", vllm.gpu_memory_utilization),
            ("tensor-parallel-size", vllm.tensor_parallel_size if vllm.tensor_parallel_size > 1 else None),
            ("data-parallel-size", vllm.data_parallel_size if vllm.data_parallel_size > 1 else None),
            ("load-format", vllm.load_format),
            ("attention-backend", vllm.attention_backend),
            ("generation-config", vllm.generation_config),
            ("compilation-config", _json(vllm.compilation_config)),
            ("kv-transfer-config", _json(_transfer_config(member))),
            ("kv-events-config", _json(_events_config(member))),
        ]
        flags = [part for name, value in options if value is not None for part in (f"--{name}", str(value))]
        flags.append("--enable-prefix-caching" if vllm.prefix_caching else "--no-enable-prefix-caching")
        flags += ["--enforce-eager"] if vllm.enforce_eager else []
        flags += ["--enable-prompt-tokens-details"] if vllm.prompt_tokens_details else []
        return (resolve_python(vllm.python), "-m", _MODULE, *flags, *vllm.extra_args)

    def environment(self, fleet: FleetFile, index: int) -> dict[str, str]:
        """Variables instance ``index`` needs beyond the fleet file's own."""
        member = fleet.members[index]
        vllm = member.vllm
        variables = {
            "VLLM_HOST_IP": fleet.reached_as,
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "PYTHONHASHSEED": str(vllm.hash_seed),
            # The current folder must not precede the engine's own packages.
            "PYTHONSAFEPATH": "1",
            # vLLM renames its processes; without this the new name overwrites /proc/PID/environ, which is checked.
            "SPT_NOENV": "1",
            "MASTER_PORT": str(member.master_port),
        }
        if vllm.dev_mode:
            variables["VLLM_SERVER_DEV_MODE"] = "1"
        if vllm.offline:
            variables |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        if member.devices:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(member.devices)
        if vllm.device == "cpu":
            variables |= _cpu_environment(member)
        if member.role is not Role.NONE:
            variables |= _transfer_environment(fleet, member)
        return variables

    def default_environment(self, fleet: FleetFile, index: int) -> Mapping[str, str]:
        """A larger queue of pieces where KV moves over TCP."""
        member = fleet.members[index]
        over_tcp = member.role is not Role.NONE and member.vllm.transfer.protocol is Transport.TCP
        return TCP_QUEUE if over_tcp else {}

    def dropped_environment(self, fleet: FleetFile, index: int) -> tuple[str, ...]:
        """Inherited variables that would change how instance ``index`` moves KV.

        Mooncake checks the presence of MC_INTRANODE_NVLINK, not its value: only its absence turns it off.
        """
        member = fleet.members[index]
        if member.role is not Role.NONE and member.vllm.transfer.protocol is Transport.NVLINK:
            return (_FORCE_TCP,)
        return (NVLINK_VARIABLE,)

    def search_paths(self, fleet: FleetFile, index: int) -> dict[str, tuple[str, ...]]:
        """Directories with the libfabric of instance ``index``; none without EFA or RDMA."""
        member = fleet.members[index]
        transfer = member.vllm.transfer
        directories = () if member.role is Role.NONE else library_directories(transfer.protocol, transfer.fabric)
        return {"LD_LIBRARY_PATH": directories} if directories else {}

    def ready_urls(self, fleet: FleetFile, index: int) -> tuple[str, ...]:
        """Health, and the bootstrap server where there is one."""
        bootstrap = fleet.bootstrap_url(index)
        return (f"{fleet.url(index)}/health", *((f"{bootstrap}/query",) if bootstrap else ()))

    def problems(self, fleet: FleetFile, inherited: Mapping[str, str]) -> list[str]:
        """Sentences on what this machine lacks to start the fleet.

        Args:
            fleet: the fleet to start.
            inherited: the environment the engines would inherit.
        """
        found: dict[str, None] = {}
        visible = inherited.get("CUDA_VISIBLE_DEVICES")
        wanted = [device for member in fleet.members for device in member.devices]
        if visible is not None and not set(wanted) <= set(visible.split(",")):
            problem = f"CUDA_VISIBLE_DEVICES is {visible!r}, but the fleet uses GPUs {', '.join(wanted)}"
            found[f"devices: {problem}; name the allowed GPUs in `devices`, or unset the variable"] = None
        for member in fleet.members:
            python = resolve_python(member.vllm.python)
            if shutil.which(python) is None:
                problem = (
                    f"vllm.python: no Python at {python}; `make engines` builds one for the CPU, or set {_PYTHON_HINT}"
                )
                found[problem] = None
            model = resolve_model(member.model)
            if _is_path(member.model) and not Path(model).exists():
                found[f"model: no folder at {model}; `make engines` makes the tiny model, or set {_MODEL_HINT}"] = None
            if member.vllm.device == "cpu":
                for library in _preload(member):
                    if not Path(library).exists():
                        found[f"vllm.cpu.preload: no library at {library} (Debian: libtcmalloc-minimal4)"] = None
            if member.role is not Role.NONE and member.vllm.transfer.protocol is Transport.NVLINK:
                for name in ALLOCATOR_VARIABLES:
                    if "expandable_segments" in inherited.get(name, "") and name not in member.env:
                        found[
                            f"{name}: NVLink transfers need plain device memory; unset it or drop expandable_segments"
                        ] = None
        return list(found)


_PYTHON_HINT = "WARMROUTE_ENGINE_PYTHON or --set vllm.python=..."
_MODEL_HINT = "WARMROUTE_ENGINE_MODEL or --model ..."


def resolve_python(text: str) -> str:
    """The engine's Python: a bare command unchanged, a path relative to the current folder or else to the project."""
    if os.sep not in text:
        return shutil.which(text) or text
    # Not resolved further: a virtual environment is identified by the path of its Python, which is a link.
    return str(_found(text))


def resolve_model(text: str) -> str:
    """A model folder as an absolute path, relative to the current folder or else to the project; an id unchanged."""
    path = _found(text)
    return str(path) if _is_path(text) or path.is_dir() else text


def _is_path(text: str) -> bool:
    return text.startswith((".", "/", "~"))


def _found(text: str) -> Path:
    path = Path(text).expanduser()
    if path.is_absolute():
        return path
    here = Path.cwd() / path
    return here if here.exists() or not (PROJECT / path).exists() else PROJECT / path


def _json(value: dict[str, Any] | None) -> str | None:
    return None if value is None else json.dumps(value, separators=(",", ":"))


def _transfer_config(member: Member) -> dict[str, Any] | None:
    if member.role is Role.NONE:
        return None
    transfer = member.vllm.transfer
    # NVLink is a Mooncake option under vLLM's name tcp; an environment variable selects it.
    protocol = Transport.TCP if transfer.protocol is Transport.NVLINK else transfer.protocol
    config: dict[str, Any] = {
        "kv_connector": "MooncakeConnector",
        "kv_role": member.kv_role.value,
        "kv_connector_extra_config": {"mooncake_protocol": protocol.value, **transfer.extra_config},
    }
    if transfer.kv_load_failure_policy is not None:
        config["kv_load_failure_policy"] = transfer.kv_load_failure_policy
    return config


def _events_config(member: Member) -> dict[str, Any] | None:
    if member.events_port is None:
        return None
    events = member.vllm.events
    # Without the `*` vLLM would connect to the address instead of listening on it.
    config: dict[str, Any] = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{member.events_port}",
        "topic": events.topic,
    }
    if member.replay_port is not None:
        config["replay_endpoint"] = f"tcp://*:{member.replay_port}"
    if events.buffer_steps is not None:
        config["buffer_steps"] = events.buffer_steps
    return config


def _transfer_environment(fleet: FleetFile, member: Member) -> dict[str, str]:
    port = member.bootstrap_port
    variables = {
        "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(fleet.base_bootstrap_port + member.index if port is None else port),
        "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(member.vllm.transfer.abort_timeout_s),
    }
    if member.vllm.transfer.protocol is Transport.NVLINK:
        variables[NVLINK_VARIABLE] = "1"
    return variables | fabric_environment(member.vllm.transfer.protocol, member.vllm.transfer.fabric)


def _cpu_environment(member: Member) -> dict[str, str]:
    cpu = member.vllm.cpu
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(cpu.kvcache_space_gib),
        "VLLM_CPU_OMP_THREADS_BIND": cpu.omp_bind,
        "OMP_NUM_THREADS": str(cpu.omp_threads),
        "LD_PRELOAD": ":".join(_preload(member)),
    }


def _preload(member: Member) -> tuple[str, ...]:
    """Libraries an engine on the CPU must have loaded before anything else: the first tcmalloc found, OpenMP."""
    if member.vllm.cpu.preload is not None:
        return tuple(str(_found(library)) for library in member.vllm.cpu.preload)
    tcmalloc = next((path for path in _TCMALLOC if Path(path).exists()), _TCMALLOC[0])
    openmp = Path(resolve_python(member.vllm.python)).parent.parent / "lib" / "libiomp5.so"
    return (tcmalloc, str(openmp))
