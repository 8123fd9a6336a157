"""vLLM general plug-in that records the stages of every KV transfer of the stock MooncakeConnector.

It does nothing unless ``WARMROUTE_TRANSFER_RECORDS`` names a file. All engines of a host may append to the same one: a
record is one line of JSON, written at once. No file of vLLM is changed; methods of the connector's classes are wrapped
when vLLM loads the connector, in versions of the connector that are known (`CONNECTORS`), in no others.

Four kinds of records, each with ``transfer_id``, ``request_id``, ``engine_id``, ``tp_rank`` (None: scheduler):

- ``prefill`` (P, scheduler): ``arrived_s``, ``scheduled_s``, ``finished_s``, ``blocks``, ``outcome``.
- ``send`` (P, each worker): ``asked_s`` by D, ``ready_s`` (None: never), ``wire_begin_s``, ``wire_end_s`` (None:
  nothing to send), ``size_bytes``, ``blocks``, ``pieces`` of the write, ``batch`` (transfers in it), ``peer_rank``,
  ``outcome``.
- ``receive`` (D, each worker): ``started_s``, ``asked_s``, ``answered_s``, ``collected_s`` by a step, ``outcome``.
- ``decode`` (D, scheduler): ``arrived_s``, ``allocated_s``, ``admitted_s``, ``tokens`` to pull, ``outcome``.

Times are readings of the monotonic clock in seconds, comparable on one boot of one host (``boot``); plus
``unix_minus_monotonic_s`` they are Unix times.
"""

from __future__ import annotations

import contextvars
import functools
import hashlib
import importlib
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

log = logging.getLogger("vllm.warmroute_transfer_hooks")

VERSION = "1"
"""Of the hooks and of the records."""
VARIABLE = "WARMROUTE_TRANSFER_RECORDS"
CONNECTOR = "MooncakeConnector"
CONNECTORS = {
    "f80818612fcc53bb416877a7d214fe031be32f6a8dc33d55b636ae44800331c1": "0.18.1",
    "a2a7ae8f3b7c5bc0dff644290db781b6bbd964926e84d49f65e4986e20ae62cd": "0.20.2",
}
"""SHA-256 of ``mooncake_connector.py`` -> version of vLLM that has it: those whose source was read for these hooks."""

MOST_PULLS = 4_096
"""Pulls of one worker that are followed at a time."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_now = time.monotonic


def register() -> None:
    """Hook the connector in this process once it is loaded; entry point of ``vllm.general_plugins``."""
    path = os.environ.get(VARIABLE)
    if not path:
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # type: ignore[import-not-found]

    hook_factory(KVConnectorFactory, path)


def hook_factory(factory: Any, path: str) -> None:
    """Make vLLM's connector registry hook the connector when it loads it: engines without it never import Mooncake.

    Args:
        factory: the class ``KVConnectorFactory``; its registry maps a name to a function that imports the class.
        path: file of the records.
    """
    load_stock: Callable[[], type] | None = factory._registry.get(CONNECTOR)
    if load_stock is None or getattr(load_stock, "records_transfers", False):
        return

    # Attributes of another plug-in's function are kept: it knows by them that it has been here.
    @functools.wraps(load_stock)
    def load() -> type:
        connector = load_stock()
        # Its classes are those of the stock module, also where another plug-in made a subclass of the connector.
        hook_module(importlib.import_module(connector.__module__), path)
        return connector

    load.records_transfers = True  # type: ignore[attr-defined]
    factory._registry[CONNECTOR] = load


def hook_module(module: Any, path: str) -> bool:
    """Wrap the classes of a connector module; False, with an error in the log, if its version is not known.

    Args:
        module: ``mooncake_connector`` as imported.
        path: file of the records.
    """
    if getattr(module, "records_transfers", False):
        return True
    digest = hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest()
    if digest not in CONNECTORS:
        log.error("transfers are not recorded: the hooks were not made for %s (SHA-256 %s)", module.__file__, digest)
        return False
    records = RecordFile(path)
    hook_scheduler(module.MooncakeConnectorScheduler, records)
    hook_sender(module.MooncakeConnectorWorker, records)
    hook_receiver(module.MooncakeConnectorWorker, records)
    module.records_transfers = True
    log.info("recording KV transfers in %s (hooks for vLLM %s)", path, CONNECTORS[digest])
    return True


class RecordFile:
    """A file that records are appended to; one that cannot be written is reported once and then left alone.

    Args:
        path: the file; created when missing, kept open for the life of the process.
    """

    def __init__(self, path: str) -> None:
        try:
            self._common: dict[str, Any] = {"version": VERSION, "boot": _BOOT.read_text(encoding="ascii").strip()}
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            log.error("transfers are not recorded: %s", error)
            self._file = -1

    def write(self, kind: str, owner: Any, values: dict[str, Any]) -> None:
        """Append one record: a single write, which processes that share the file do not interleave."""
        if self._file < 0:
            return
        offset_s = time.time() - _now()
        arrived_unix_s = values.pop("arrived_unix_s", None)
        if arrived_unix_s is not None:
            values["arrived_s"] = arrived_unix_s - offset_s
        identity = {"kind": kind, **identity_of(owner), "pid": os.getpid(), "unix_minus_monotonic_s": offset_s}
        line = json.dumps({**self._common, **identity, **values}, separators=(",", ":")) + "\n"
        try:
            os.write(self._file, line.encode())
        except OSError as error:
            log.error("transfers are no longer recorded: %s", error)
            self._file = -1


def identity_of(owner: Any) -> dict[str, Any]:
    """Engine and rank of a worker, or the engine of a scheduler, which has no rank."""
    engine_id = getattr(owner, "engine_id", None)
    if engine_id is None:
        engine_id = owner.vllm_config.kv_transfer_config.engine_id
    return {"engine_id": str(engine_id), "tp_rank": getattr(owner, "tp_rank", None)}


def hook_scheduler(scheduler: Any, records: RecordFile) -> None:
    """Record ``prefill`` and ``decode``.

    vLLM calls ``update_state_after_alloc`` when it has found room for a request: on P for its prefill; on D before the
    pull and, after it, when the request joins the batch.

    Args:
        scheduler: the class ``MooncakeConnectorScheduler``.
        records: where they go.
    """
    after_alloc, finished = scheduler.update_state_after_alloc, scheduler.request_finished

    @functools.wraps(after_alloc)
    def update_state_after_alloc(self: Any, request: Any, blocks: Any, num_external_tokens: int) -> Any:
        params = request.kv_transfer_params
        if not params or not params.get("transfer_id"):
            return after_alloc(self, request, blocks, num_external_tokens)
        now_s = _now()
        pulls = bool(params.get("do_remote_prefill"))  # the call clears it
        answer = after_alloc(self, request, blocks, num_external_tokens)
        seen = _state(self)
        known = seen.get(request.request_id)
        if pulls:
            known = {**_begun(request), "allocated_s": now_s, "admitted_s": None, "tokens": num_external_tokens}
            seen[request.request_id] = known
            if num_external_tokens == 0:  # D has it all: the request runs at once
                records.write("decode", self, {**seen.pop(request.request_id), "admitted_s": now_s, "outcome": "done"})
        elif known is not None and "allocated_s" in known:
            del seen[request.request_id]
            records.write("decode", self, {**known, "admitted_s": now_s, "outcome": "done"})
        elif known is None and params.get("do_remote_decode"):
            seen[request.request_id] = {**_begun(request), "scheduled_s": now_s}
        return answer

    @functools.wraps(finished)
    def request_finished(self: Any, request: Any, block_ids: Any) -> Any:
        now_s = _now()
        answer = finished(self, request, block_ids)
        known = _state(self).pop(request.request_id, None)
        if known is not None:
            if "allocated_s" in known:
                records.write("decode", self, {**known, "outcome": "ended before the pull"})
            else:
                end = {
                    "finished_s": now_s,
                    "blocks": count_blocks(block_ids),
                    "outcome": "done" if answer[0] else "freed",
                }
                records.write("prefill", self, {**known, **end})
        return answer

    scheduler.update_state_after_alloc = update_state_after_alloc
    scheduler.request_finished = request_finished


def _begun(request: Any) -> dict[str, Any]:
    return {
        "transfer_id": request.kv_transfer_params["transfer_id"],
        "request_id": request.request_id,
        "arrived_unix_s": request.arrival_time,
    }


def _state(owner: Any) -> dict[str, dict[str, Any]]:
    """Values known so far of the requests of one scheduler or receiver, by request id."""
    found: dict[str, dict[str, Any]] | None = owner.__dict__.get("_warmroute_seen")
    if found is None:
        found = owner.__dict__.setdefault("_warmroute_seen", {})
    return found


def count_blocks(block_ids: Any) -> int:
    """Number of block ids, in one list (vLLM 0.18) or in one for each KV cache group (0.20)."""
    return sum(len(each) if isinstance(each, list | tuple) else 1 for each in block_ids)


_asked: contextvars.ContextVar[dict[str, dict[str, Any]]] = contextvars.ContextVar("warmroute_asked")
"""Records of the pull that the current task answers, by D's request id."""


def hook_sender(worker: Any, records: RecordFile) -> None:
    """Record ``send``.

    ``_build_transfer_params`` is called for each group of requests whose prefill is done, then ``_send_blocks`` in a
    thread with the lists that it made, by which the two are matched.

    Args:
        worker: the class ``MooncakeConnectorWorker``.
        records: where they go.
    """
    record_ready, answer_pull = worker.record_send_reqs, worker.send_kv_to_decode
    build, send = worker._build_transfer_params, worker._send_blocks

    @functools.wraps(record_ready)
    async def record_send_reqs(self: Any, metadata: Any) -> Any:
        answer = await record_ready(self, metadata)
        now_s = _now()
        for transfer_id, block_ids in metadata.reqs_to_send.values():
            waiting = self.reqs_need_send.get(transfer_id) if block_ids else None
            if waiting is not None:
                waiting.warmroute_ready_s = now_s
        return answer

    @functools.wraps(answer_pull)
    async def send_kv_to_decode(self: Any, identity: bytes, sock: Any, meta: Any) -> Any:
        now_s = _now()
        pull = {
            request_id: {
                "transfer_id": transfer_id,
                "request_id": request_id,
                "peer_rank": meta.remote_tp_rank,
                "asked_s": now_s,
                "ready_s": None,
                "wire_begin_s": None,
                "wire_end_s": None,
                "size_bytes": 0,
                "blocks": count_blocks(block_ids),
                "pieces": 0,
                "batch": 0,
                "outcome": "not ready",
            }
            for request_id, (transfer_id, block_ids) in meta.req_blocks.items()
        }
        token = _asked.set(pull)
        try:
            return await answer_pull(self, identity, sock, meta)
        finally:
            _asked.reset(token)
            for values in pull.values():
                records.write("send", self, values)

    @functools.wraps(build)
    async def _build_transfer_params(self: Any, ready_reqs: Any, agent_meta: Any, *more: Any) -> Any:
        built = await build(self, ready_reqs, agent_meta, *more)
        sources, lengths, refused = built[0], built[2], set(built[3])
        pull = _asked.get({})
        batch = []
        for request_id, send_meta in ready_reqs:
            values = pull.get(request_id)
            if values is None:
                continue
            values["ready_s"] = getattr(send_meta, "warmroute_ready_s", None)
            values["outcome"] = "refused" if request_id in refused else "done"
            if request_id not in refused:
                batch.append(values)
        total, blocks = sum(lengths), sum(values["blocks"] for values in batch)
        for values in batch:
            # Every block has the same size in a write.
            values["size_bytes"] = total * values["blocks"] // blocks if blocks else 0
            values["pieces"], values["batch"] = len(lengths), len(batch)
        if sources:
            self.__dict__.setdefault("_warmroute_writes", {})[id(sources)] = batch
        return built

    @functools.wraps(send)
    def _send_blocks(self: Any, remote_session: str, src_ptrs: Any, dst_ptrs: Any, lengths: Any) -> Any:
        batch = self.__dict__.get("_warmroute_writes", {}).pop(id(src_ptrs), ())
        begin_s = _now()
        status = send(self, remote_session, src_ptrs, dst_ptrs, lengths)
        end_s = _now()
        for values in batch:
            values["wire_begin_s"], values["wire_end_s"] = begin_s, end_s
            if status != 0:
                values["outcome"] = f"failed with {status}"
        return status

    worker.record_send_reqs = record_send_reqs
    worker.send_kv_to_decode = send_kv_to_decode
    worker._build_transfer_params = _build_transfer_params
    worker._send_blocks = _send_blocks


def hook_receiver(worker: Any, records: RecordFile) -> None:
    """Record ``receive``.

    Args:
        worker: the class ``MooncakeConnectorWorker``.
        records: where they go.
    """
    start, receive = worker.start_load_kv, worker.receive_kv_from_single_worker
    process, collect = worker.process_pulling_result, worker.get_finished

    @functools.wraps(start)
    def start_load_kv(self: Any, metadata: Any) -> Any:
        now_s = _now()
        seen = _state(self)
        for pulls in metadata.reqs_to_recv.values():
            for request_id, pull in pulls.items():
                if len(seen) >= MOST_PULLS:  # pulls whose P never answered
                    del seen[next(iter(seen))]
                seen[request_id] = {
                    "transfer_id": pull.transfer_id,
                    "request_id": request_id,
                    "started_s": now_s,
                    "asked_s": None,
                    "answered_s": None,
                    "collected_s": None,
                }
        return start(self, metadata)

    @functools.wraps(receive)
    async def receive_kv_from_single_worker(self: Any, worker_addr: str, pull_metas: Any) -> Any:
        now_s = _now()
        seen = _state(self)
        for request_id in pull_metas:
            values = seen.get(request_id)
            if values is not None and values["asked_s"] is None:
                values["asked_s"] = now_s
        try:
            return await receive(self, worker_addr, pull_metas)
        finally:
            for request_id in pull_metas:
                values = seen.get(request_id)
                if values is not None and values["answered_s"] is None:
                    del seen[request_id]
                    records.write("receive", self, {**values, "outcome": "failed"})

    @functools.wraps(process)
    def process_pulling_result(self: Any, response: Any, pull_metas: Any) -> Any:
        now_s = _now()
        for request_id in response.ok_reqs or ():
            # Before the call: the engine's thread may collect the request at any time after it.
            values = _state(self).get(request_id)
            if values is not None:
                values["answered_s"] = now_s
        return process(self, response, pull_metas)

    @functools.wraps(collect)
    def get_finished(self: Any) -> Any:
        answer = collect(self)
        if answer[1]:
            now_s = _now()
            for request_id in answer[1]:
                values = _state(self).pop(request_id, None)
                if values is not None:
                    records.write("receive", self, {**values, "collected_s": now_s, "outcome": "done"})
        return answer

    worker.start_load_kv = start_load_kv
    worker.receive_kv_from_single_worker = receive_kv_from_single_worker
    worker.process_pulling_result = process_pulling_result
    worker.get_finished = get_finished
