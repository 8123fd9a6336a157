"""One hand-off through vLLM's own connector source with hooks; vLLM, torch and Mooncake around it are stand-ins.

``python -m tests.launch.transfer_hooks.real_connector SOURCE RECORDS``: its schedulers and workers, its messages over
real sockets; the write of Mooncake only returns a status. D asks before P's prefill has ended.
"""

from __future__ import annotations

import asyncio
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import msgspec
import zmq.asyncio

from launch.transfer_hooks import warmroute_transfer_hooks as hooks

BLOCKS_OF_P, BLOCKS_OF_D = [3, 4, 7], [5, 6, 9]
BLOCK_BYTES = 64
LAYERS = [1_000, 900_000]
"""Base addresses."""


class StandIn(ModuleType):
    """A package that has every name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = MagicMock(name=name)
        setattr(self, name, found)
        return found


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of the packages that the connector imports and this environment lacks."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        known = fullname.partition(".")[0] in {"vllm", "torch", "mooncake"}
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        return None


@contextmanager
def make_zmq_socket(context: Any, address: str, kind: int, bind: bool, linger: int) -> Iterator[Any]:
    socket = context.socket(kind)
    socket.connect(address)
    try:
        yield socket
    finally:
        socket.close(linger=linger)


def connector(source: Path) -> Any:
    """The connector's module, without hooks."""
    sys.meta_path.insert(0, StandIns())
    base = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
    for name in ("KVConnectorBase_V1", "KVConnectorMetadata", "SupportsHMA"):
        setattr(base, name, type(name, (), {}))
    vars(importlib.import_module("vllm"))["envs"] = SimpleNamespace(VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT=30)
    vars(importlib.import_module("vllm.utils.network_utils"))["make_zmq_socket"] = make_zmq_socket
    spec = importlib.util.spec_from_file_location("connector", source)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules["connector"] = module
    spec.loader.exec_module(module)

    async def registered(self: Any) -> None:
        return None

    module.MooncakeConnectorWorker.__del__ = lambda self: None
    module.MooncakeConnectorWorker.register_worker_with_bootstrap = registered
    return module


def scheduler(module: Any, engine_id: str) -> Any:
    made = object.__new__(module.MooncakeConnectorScheduler)
    vars(made).update(
        vllm_config=SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id=engine_id)),
        is_kv_producer=False,
        is_kv_consumer=False,
        _reqs_need_recv={},
        _reqs_need_send={},
        _reqs_not_processed=set(),
        _is_hma_required=False,
    )
    return made


def worker(module: Any, engine_id: str, loop: asyncio.AbstractEventLoop) -> Any:
    made = object.__new__(module.MooncakeConnectorWorker)
    topology = SimpleNamespace(
        get_target_remote_ranks=lambda size: [0],
        get_target_remote_ranks_from_engine_id=lambda engine: [0],
        handshake_target_ranks=lambda size: [0],
        is_kv_layout_blocks_first=False,
        local_replicates_kv_cache=False,
    )
    vars(made).update(
        engine_id=engine_id,
        engine=SimpleNamespace(batch_transfer_sync_write=lambda *arguments: 0),
        hostname="127.0.0.1",
        rpc_port=1,
        side_channel_port=0,
        tp_rank=0,
        tp_size=1,
        is_kv_producer=False,
        is_kv_consumer=False,
        kv_topo=topology,
        transfer_topo=topology,
        kv_caches_base_addr=LAYERS,
        block_len=BLOCK_BYTES,
        block_len_per_layer=[BLOCK_BYTES] * len(LAYERS),
        reqs_need_send={},
        finished_sending_reqs=set(),
        finished_recving_reqs=set(),
        sender_loop=loop,
        receiver_loop=loop,
        sender_worker_queue=asyncio.Queue(),
        num_sender_tasks=2,
        async_zmq_ctx=zmq.asyncio.Context(),
        _sender_executor=ThreadPoolExecutor(1),
        _remote_agents={},
        _tp_size={"p": 1, "d": 1},
        _encoder=msgspec.msgpack.Encoder(),
        _xfer_meta_decoder=msgspec.msgpack.Decoder(module.MooncakeXferMetadata),
        _xfer_resp_decoder=msgspec.msgpack.Decoder(module.MooncakeXferResponse),
    )
    return made


def request(module: Any, request_id: str, **params: Any) -> Any:
    return SimpleNamespace(
        request_id=request_id,
        arrival_time=time.time(),
        kv_transfer_params={"transfer_id": "t", **params},
        prompt_token_ids=[1] * 48,
        status=module.RequestStatus.FINISHED_LENGTH_CAPPED,
    )


async def until(holds: Callable[[], object]) -> None:
    """Wait for a condition."""
    for _ in range(2_500):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError("not within 25 s")


async def hand_over(module: Any) -> None:
    """P and D in one loop."""
    loop = asyncio.get_running_loop()
    grouped = "block_lens" in module.MooncakeXferMetadata.__struct_fields__  # since 0.20
    p_scheduler, d_scheduler = scheduler(module, "p"), scheduler(module, "d")
    p_worker, d_worker = worker(module, "p", loop), worker(module, "d", loop)
    listening = threading.Event()
    listener = asyncio.create_task(p_worker._mooncake_sender_listener(listening))
    await until(listening.is_set)
    d_worker._remote_agents["p"] = {0: {0: f"tcp://127.0.0.1:{p_worker.side_channel_port}"}}
    blocks = SimpleNamespace(
        get_unhashed_block_ids=lambda: BLOCKS_OF_D, get_unhashed_block_ids_all_groups=lambda: (BLOCKS_OF_D,)
    )
    on_p = request(module, "on-p", do_remote_decode=True, do_remote_prefill=False)
    p_scheduler.update_state_after_alloc(on_p, blocks, 0)
    first_step = p_scheduler.build_connector_meta(None)
    pull = {"do_remote_prefill": True, "remote_engine_id": "p", "remote_bootstrap_addr": "unused"}
    on_d = request(module, "on-d", do_remote_decode=False, **pull)
    external, _ = d_scheduler.get_num_new_matched_tokens(on_d, 0)
    d_scheduler.update_state_after_alloc(on_d, blocks, external)
    d_worker.start_load_kv(d_scheduler.build_connector_meta(None))
    await until(lambda: "t" in p_worker.reqs_need_send)  # D's request is at P, which has not begun
    p_worker.start_load_kv(first_step)
    assert p_scheduler.request_finished(on_p, (BLOCKS_OF_P,) if grouped else BLOCKS_OF_P)[0]
    p_worker.start_load_kv(p_scheduler.build_connector_meta(None))
    await until(lambda: d_worker.finished_recving_reqs)
    assert await asyncio.to_thread(d_worker.get_finished) == (None, {"on-d"})
    assert (await asyncio.to_thread(p_worker.get_finished)) == ({"on-p"}, None)
    d_scheduler.update_state_after_alloc(on_d, blocks, 0)
    listener.cancel()
    await asyncio.gather(listener, return_exceptions=True)


if __name__ == "__main__":
    loaded = connector(Path(sys.argv[1]))
    assert hooks.hook_module(loaded, sys.argv[2]), "a connector that the hooks do not know"
    asyncio.run(asyncio.wait_for(hand_over(loaded), 30))
    os._exit(0)  # without waiting for the sockets' contexts
