"""The hooks around stand-ins of the connector's classes, in the shapes of vLLM 0.18 and 0.20."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bench.instruments.hooked.stages import pair_records, read_records
from launch.transfer_hooks import warmroute_transfer_hooks as hooks

BLOCK_BYTES = 64
REGIONS = 2


class Scheduler:
    """The part of ``MooncakeConnectorScheduler`` that the hooks use."""

    def __init__(self, engine_id: str) -> None:
        self.vllm_config = SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id=engine_id))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        params = request.kv_transfer_params
        if params and params.get("do_remote_prefill"):
            params["do_remote_prefill"] = False

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return bool(request.kv_transfer_params and request.kv_transfer_params.get("do_remote_decode")), None


@dataclass
class SendMeta:
    transfer_id: str
    local_block_ids: Any
    ready: asyncio.Event = field(default_factory=asyncio.Event)


class Worker:
    """The part of ``MooncakeConnectorWorker`` that the hooks use, both sides; ``status`` is the engine's answer."""

    status = 0
    nested = False
    """Block ids by KV cache group, as in 0.20."""

    def __init__(self, engine_id: str) -> None:
        self.engine_id, self.tp_rank = engine_id, 0
        self.reqs_need_send: dict[str, SendMeta] = {}
        self.finished: set[str] = set()

    async def record_send_reqs(self, metadata: Any) -> None:
        for transfer_id, block_ids in metadata.reqs_to_send.values():
            meta = self.reqs_need_send.setdefault(transfer_id, SendMeta(transfer_id, []))
            if block_ids:
                meta.local_block_ids = block_ids
                meta.ready.set()

    async def send_kv_to_decode(self, identity: bytes, sock: Any, meta: Any) -> None:
        ready = []
        for request_id, (transfer_id, _) in meta.req_blocks.items():
            waiting = self.reqs_need_send.setdefault(transfer_id, SendMeta(transfer_id, []))
            async with asyncio.timeout(30):
                await waiting.ready.wait()
            ready.append((request_id, waiting))
        more = ((), ()) if self.nested else ()
        built = await self._build_transfer_params(ready, meta, *more)
        status = 0
        if built[0]:
            loop = asyncio.get_running_loop()
            status = await loop.run_in_executor(None, self._send_blocks, "session", built[0], built[1], built[2])
        await sock([] if status else [request_id for request_id, _ in ready])

    async def _build_transfer_params(self, ready_reqs: Any, agent_meta: Any, *more: Any) -> Any:
        counts = [hooks.count_blocks(agent_meta.req_blocks[request_id][1]) for request_id, _ in ready_reqs]
        lengths = [count * BLOCK_BYTES for count in counts if count for _ in range(REGIONS)]
        built: tuple[Any, ...] = ([1] * len(lengths), [2] * len(lengths), lengths, [])
        return (*built, None) if self.nested else built

    def _send_blocks(self, remote_session: str, src_ptrs: Any, dst_ptrs: Any, lengths: Any) -> int:
        return self.status

    def start_load_kv(self, metadata: Any) -> None:
        return None

    async def receive_kv_from_single_worker(self, worker_addr: Any, pull_metas: Any) -> None:
        async def answered(ok_reqs: list[str]) -> None:
            self.process_pulling_result(SimpleNamespace(ok_reqs=ok_reqs), pull_metas)

        asked = {request_id: (pull.transfer_id, pull.blocks) for request_id, pull in pull_metas.items()}
        await worker_addr.send_kv_to_decode(b"", answered, SimpleNamespace(req_blocks=asked, remote_tp_rank=0))

    def process_pulling_result(self, response: Any, pull_metas: Any) -> None:
        self.finished |= set(response.ok_reqs)

    def get_finished(self) -> tuple[None, set[str] | None]:
        done, self.finished = self.finished, set()
        return None, done or None


class NestedWorker(Worker):
    nested = True


def request(request_id: str, **params: Any) -> Any:
    return SimpleNamespace(request_id=request_id, arrival_time=1.0, kv_transfer_params=params)


def hooked(path: Path, worker: type[Worker]) -> tuple[type[Scheduler], type[Worker]]:
    """Fresh subclasses with the hooks."""
    records = hooks.RecordFile(str(path))

    class HookedScheduler(Scheduler):
        pass

    class HookedWorker(worker):  # type: ignore[valid-type, misc]
        pass

    hooks.hook_scheduler(HookedScheduler, records)
    hooks.hook_sender(HookedWorker, records)
    hooks.hook_receiver(HookedWorker, records)
    return HookedScheduler, HookedWorker


async def hand_over(
    scheduler: type[Scheduler], worker: type[Worker], blocks: dict[str, int], early: bool = False, cached: bool = False
) -> None:
    """Transfers of so many blocks in one pull; ``early``: D asks before P is ready; ``cached``: D needs none."""
    p, d = scheduler("p"), scheduler("d")
    source, target = worker("p"), worker("d")

    def ids(count: int) -> Any:
        return [list(range(count))] if worker.nested else list(range(count))

    async def prefill() -> None:
        for name, count in blocks.items():
            asked = request(f"p-{name}", transfer_id=name, do_remote_decode=True)
            p.update_state_after_alloc(asked, None, 0)
            assert p.request_finished(asked, ids(count))[0]
        sent = {f"p-{name}": (name, ids(count)) for name, count in blocks.items()}
        await source.record_send_reqs(SimpleNamespace(reqs_to_send=sent))

    if not early:
        await prefill()
    requests = {name: request(f"d-{name}", transfer_id=name, do_remote_prefill=True) for name in blocks}
    for name, count in blocks.items():
        d.update_state_after_alloc(requests[name], None, 0 if cached else count * 16)
    pulls = {
        f"d-{name}": SimpleNamespace(transfer_id=name, blocks=ids(0 if cached else count))
        for name, count in blocks.items()
    }
    target.start_load_kv(SimpleNamespace(reqs_to_recv={"p": pulls}))
    pull = asyncio.create_task(target.receive_kv_from_single_worker(source, pulls))
    if early:
        for _ in range(3):
            await asyncio.sleep(0)
        await prefill()
    async with asyncio.timeout(30):
        await pull
    _, done = target.get_finished()
    for name, asked in requests.items():
        if asked.request_id in (done or ()) and not cached:
            d.update_state_after_alloc(asked, None, 0)
        d.request_finished(asked, ids(blocks[name]))


@pytest.mark.parametrize("worker", [Worker, NestedWorker])
@pytest.mark.parametrize("early", [False, True])
async def test_records_of_both_sides_pair(tmp_path: Path, worker: type[Worker], early: bool) -> None:
    path = tmp_path / "records.jsonl"
    await hand_over(*hooked(path, worker), {"one": 3, "two": 5}, early)
    found = pair_records(read_records(path.read_bytes()))
    assert found.incomplete == {}
    one, two = found.complete["one"], found.complete["two"]
    assert (one.sender, one.receiver) == ("p", "d")
    assert (one.size_bytes, two.size_bytes) == (3 * REGIONS * BLOCK_BYTES, 5 * REGIONS * BLOCK_BYTES)
    assert (one.blocks, one.pieces, one.batch) == (3, 2 * REGIONS, 2)
    for each in (one, two):
        assert (each.ready_wait_s > 0) == early
        assert min(each.wire_s, each.control_s, each.admission_s, each.connect_s, each.p_prefill_s) >= 0


@pytest.mark.parametrize("worker", [Worker, NestedWorker])
async def test_a_write_that_fails_is_recorded_on_both_sides(tmp_path: Path, worker: type[Worker]) -> None:
    path = tmp_path / "records.jsonl"
    scheduler, broken = hooked(path, worker)
    broken.status = -1
    await hand_over(scheduler, broken, {"one": 3})
    found = pair_records(read_records(path.read_bytes()))
    assert found.complete == {}
    assert "SendRecord: failed with -1" in found.incomplete["one"]
    assert "ReceiveRecord: failed" in found.incomplete["one"]


@pytest.mark.parametrize("worker", [Worker, NestedWorker])
async def test_a_prompt_that_d_has_whole_is_recorded_without_bytes(tmp_path: Path, worker: type[Worker]) -> None:
    path = tmp_path / "records.jsonl"
    await hand_over(*hooked(path, worker), {"one": 3}, cached=True)
    found = pair_records(read_records(path.read_bytes()))
    one = found.complete["one"]
    assert (one.size_bytes, one.blocks, one.wire_s, one.answer_s) == (0, 0, 0.0, None)


def test_requests_without_a_transfer_leave_no_record(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    scheduler, _ = hooked(path, Worker)
    one = scheduler("p")
    nothing: list[Any] = [None, {}]
    for params in nothing:
        plain = SimpleNamespace(request_id="r", arrival_time=1.0, kv_transfer_params=params)
        one.update_state_after_alloc(plain, None, 0)
        one.request_finished(plain, [1])
    assert path.read_bytes() == b""


def test_a_file_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    records = hooks.RecordFile(str(tmp_path / "missing" / "records.jsonl"))
    records.write("send", Worker("p"), {})


def connector_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of the connector's shape, importable."""
    module = ModuleType("fake_mooncake_connector")
    path = tmp_path / "mooncake_connector.py"
    path.write_text("# a connector\n")
    module.__file__ = str(path)
    fresh: dict[str, Any] = {
        "MooncakeConnectorScheduler": type("Scheduler", (Scheduler,), {}),
        "MooncakeConnectorWorker": type("Worker", (Worker,), {}),
        "MooncakeConnector": type("MooncakeConnector", (), {"__module__": module.__name__}),
    }
    vars(module).update(fresh)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_the_connector_is_hooked_when_it_is_loaded_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = connector_module(tmp_path, monkeypatch)
    digest = hashlib.sha256(b"# a connector\n").hexdigest()
    monkeypatch.setitem(hooks.CONNECTORS, digest, "0.0")
    loads: list[int] = []

    def stock() -> Any:
        loads.append(1)
        return module.MooncakeConnector

    stock.shows_token_major_views = True  # type: ignore[attr-defined]
    factory = SimpleNamespace(_registry={hooks.CONNECTOR: stock})
    hooks.hook_factory(factory, str(tmp_path / "records.jsonl"))
    hooks.hook_factory(factory, str(tmp_path / "records.jsonl"))
    assert not loads
    load = factory._registry[hooks.CONNECTOR]
    assert load.shows_token_major_views
    before = module.MooncakeConnectorWorker.get_finished
    assert load() is module.MooncakeConnector
    after = module.MooncakeConnectorWorker.get_finished
    assert after is not before
    load()
    assert module.MooncakeConnectorWorker.get_finished is after


def test_an_unknown_connector_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = connector_module(tmp_path, monkeypatch)
    before = module.MooncakeConnectorWorker.get_finished
    assert not hooks.hook_module(module, str(tmp_path / "records.jsonl"))
    assert module.MooncakeConnectorWorker.get_finished is before
    assert "the hooks were not made for" in caplog.text


async def test_a_hand_off_costs_four_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also prints the processor time of a hand-off with hooks and without, in turns (``-s``)."""
    path, write = tmp_path / "records.jsonl", os.write
    writes: list[int] = []

    def counted(file: int, content: bytes) -> int:
        writes.append(len(content))
        return write(file, content)

    monkeypatch.setattr(os, "write", counted)
    arms = {"plain": (Scheduler, Worker), "hooked": hooked(path, Worker)}
    spent_s: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(30):
        for name, (scheduler, worker) in arms.items():
            begin_s = time.process_time()
            for each in range(10):
                await hand_over(scheduler, worker, {f"{number}-{each}": 8})
            spent_s[name].append((time.process_time() - begin_s) / 10)
    middle = {name: median(found) * 1e6 for name, found in spent_s.items()}
    print(f"processor time of a hand-off, µs: {middle['plain']:.0f} without hooks, {middle['hooked']:.0f} with them")
    assert len([size for size in writes if size > 1]) == len(path.read_bytes().splitlines()) == 4 * 300
