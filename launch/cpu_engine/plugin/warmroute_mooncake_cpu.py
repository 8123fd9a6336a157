"""vLLM general plug-in that lets the stock MooncakeConnector run on vLLM's CPU platform.

The connector moves memory by address and length and needs no GPU, but three things stop it on a CPU:

- **The layout assert (vLLM 0.18.x).** ``register_kv_caches`` demands ``cache.shape[-3] == block_size``, the order
  (block, token, head). CPU attention keeps (block, head, token). The connector then uses only the address, the size
  in bytes and the number of blocks, which are the same for a transposed view; so it gets such views.
- **The device index (vLLM 0.20 and later).** The worker calls ``torch.accelerator.current_device_index()``, which
  raises where there is no accelerator. Here it returns 0.
- **AMX tile permission.** A process must request permission before it uses AMX tiles (``arch_prctl``,
  ``ARCH_REQ_XCOMP_PERM``). oneDNN requests it in the first matrix product of a prefill; vLLM's own attention kernel
  does not. An engine whose first forward pass is a decode, as after a pull, would die of SIGILL with bfloat16 weights.

It also keeps ``VLLM_WORKER_MULTIPROC_METHOD=fork`` where an engine is started with it. vLLM's CPU platform replaces it
by ``spawn``, and then the engine core imports all again that the API server has imported. Intel's OpenMP, which vLLM
preloads on a CPU, binds every forked process to the first processor; a forked engine core gets its processors back.

vLLM calls `register` in every process it starts. Off the CPU platform it does nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import cache
from typing import Any

log = logging.getLogger("vllm.warmroute_mooncake_cpu")

CONNECTOR = "MooncakeConnector"
"""Name of the connector in vLLM's registry, as used in ``--kv-transfer-config``."""

START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
"""vLLM's variable for how it starts processes: ``fork`` or ``spawn``."""


def register() -> None:
    """Adapt torch and vLLM in this process; entry point of ``vllm.general_plugins``. May be called again."""
    from vllm.platforms import current_platform  # type: ignore[import-not-found]

    if not current_platform.is_cpu():
        return
    import torch  # type: ignore[import-not-found]
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # type: ignore[import-not-found]

    ask_for_amx_tiles(torch.cpu)
    answer_device_index(torch.accelerator)
    adapt_connector(KVConnectorFactory)
    keep_fork(type(current_platform))


def ask_for_amx_tiles(cpu: Any) -> bool:
    """Request AMX tiles from the kernel where the processor has them; returns whether this process may use them.

    Args:
        cpu: the module ``torch.cpu``.
    """
    supported, ask = getattr(cpu, "_is_amx_tile_supported", None), getattr(cpu, "_init_amx", None)
    if supported is None or ask is None or not supported():
        return False
    allowed = bool(ask())
    if not allowed:
        log.warning("the kernel refuses AMX tiles to this process: bfloat16 engines may die of SIGILL, use float32")
    return allowed


def answer_device_index(accelerator: Any) -> None:
    """Make ``current_device_index()`` return 0 where it raises because there is no accelerator.

    Args:
        accelerator: the module ``torch.accelerator``.
    """
    ask = getattr(accelerator, "current_device_index", None)
    if ask is None:
        return
    try:
        ask()
    except RuntimeError:
        accelerator.current_device_index = lambda: 0


def keep_fork(platform: Any) -> None:
    """Leave `START_METHOD` as it is where it says ``fork``.

    Args:
        platform: the class ``CpuPlatform``, whose ``check_and_update_config`` sets it to ``spawn``.
    """
    stock: Callable[[Any], None] = platform.check_and_update_config
    if getattr(stock, "keeps_fork", False):
        return

    def check_and_update_config(vllm_config: Any) -> None:
        forks = os.environ.get(START_METHOD) == "fork"
        stock(vllm_config)
        if forks:
            os.environ[START_METHOD] = "fork"

    check_and_update_config.keeps_fork = True  # type: ignore[attr-defined]
    platform.check_and_update_config = staticmethod(check_and_update_config)
    if os.environ.get(START_METHOD) == "fork":
        keep_processors()


def keep_processors() -> None:
    """Let forked processes run on the same processors as this one.

    The fork handler of Intel's OpenMP leaves them the first one only, so all engine cores of a machine would share it:
    an idle core's threads then wait for seconds while another core decodes. Python's handlers run after that one.
    """
    allowed: set[int] = set()

    def remember() -> None:
        allowed.clear()
        allowed.update(os.sched_getaffinity(0))

    os.register_at_fork(before=remember, after_in_child=lambda: os.sched_setaffinity(0, allowed))


def adapt_connector(factory: Any) -> None:
    """Make vLLM's connector registry load the adapted connector under the stock one's name.

    Args:
        factory: the class ``KVConnectorFactory``; its registry maps a name to a function that imports the class.
    """
    stock: Callable[[], type] = factory._registry[CONNECTOR]
    if getattr(stock, "shows_token_major_views", False):
        return

    # Lazy as the stock entry is: engines without this connector never import Mooncake.
    @cache
    def load() -> type:
        return with_token_major_views(stock())

    load.shows_token_major_views = True  # type: ignore[attr-defined]
    factory._registry[CONNECTOR] = load


def with_token_major_views(connector: Any) -> type:
    """A subclass of the connector, of the same name, whose worker gets (block, token, head) caches."""

    def register_kv_caches(self: Any, kv_caches: dict[str, Any]) -> None:
        worker = self.connector_worker
        # Only 0.18.x, identified by this attribute, has the assert; later versions detect the layout.
        if hasattr(worker, "kv_topo"):
            kv_caches = {layer: token_major(kv, worker.block_size) for layer, kv in kv_caches.items()}
        connector.register_kv_caches(self, kv_caches)

    adapted = type(connector.__name__, (connector,), {"register_kv_caches": register_kv_caches})
    adapted.__module__ = connector.__module__
    return adapted


def token_major(kv: Any, block_size: int) -> Any:
    """A view of one layer's cache with tokens before heads.

    Args:
        kv: tensor (2, blocks, heads, block_size, head_size), as CPU attention has it; any other is returned unchanged.
        block_size: tokens of one block.

    Returns:
        View (2, blocks, block_size, heads, head_size) of the same memory.
    """
    if kv.dim() != 5 or kv.shape[-2] != block_size:
        return kv
    return kv.transpose(-3, -2)
