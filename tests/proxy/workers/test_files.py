"""Files and listeners of several workers: rows and the access log on disk, the admin port, a store between workers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from bench.replicas.processes import free_port
from tests.proxy.serve_process import until
from tests.proxy.sharing.store_server import StoreServer, needs_store
from tests.proxy.workers.conftest import AUTHORIZED, StartWorkers, Workers, files_in, running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two_workers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Workers]:
    """As those of other modules, with the admin endpoints on a port of their own."""
    folder = tmp_path_factory.mktemp("workers")
    async with running(folder, admin={"port": free_port()}, **files_in(folder)) as workers:
        yield workers


@pytest.mark.asyncio(loop_scope="module")
async def test_rows_are_in_a_file_of_each_worker_and_the_access_log_has_all(two_workers: Workers) -> None:
    workers = two_workers
    rows, log = workers.folder / "rows.jsonl", workers.folder / "access.jsonl"
    await workers.completed(20)

    async def written() -> bool:
        return log.is_file() and len(log.read_bytes().splitlines()) == 20

    await until(written)
    assert len({json.loads(line)["request_id"] for line in log.read_bytes().splitlines()}) == 20

    async def recorded() -> bool:
        files = [workers.folder / f"rows.worker-{number}.jsonl" for number in range(2)]
        found = [len(each.read_bytes().splitlines()) if each.is_file() else 0 for each in files]
        return sum(found) == 20 and all(found)

    await until(recorded)
    assert not rows.exists()


@pytest.mark.asyncio(loop_scope="module")
async def test_the_admin_port_answers_for_all_workers(two_workers: Workers) -> None:
    workers = two_workers
    before = (await workers.get("/stats"))["requests"]["finished"]
    await workers.completed(20)
    assert (await workers.served.client.get("/stats", headers=AUTHORIZED)).status_code == 404
    for _ in range(6):
        async with httpx.AsyncClient(base_url=workers.admin, trust_env=False, timeout=30) as admin:
            stats = (await admin.get("/stats", headers=AUTHORIZED)).json()
            assert stats["requests"]["finished"] == before + 20
            assert (await admin.get("/stats")).status_code == 401
            assert (await admin.post("/instances/inst-0/drain")).status_code == 401


@pytest.mark.asyncio(loop_scope="module")
async def test_an_answer_of_one_worker_names_it(two_workers: Workers) -> None:
    workers = two_workers
    named = set()
    for _ in range(20):
        async with workers.new_client() as client:
            named.add((await client.get(f"{workers.admin}/replicas")).headers["x-warmroute-worker"])
    assert named == {"0", "1"}


@needs_store
@pytest.mark.fleet
async def test_with_a_store_each_worker_is_a_replica_of_its_own(start_workers: StartWorkers, tmp_path: Path) -> None:
    store = StoreServer(tmp_path)
    store.start()
    try:
        workers = await start_workers(2, sharing={"url": store.url, "replica": "east", "ttl_s": 3.0})

        found: dict[str, Any] = {}

        async def known() -> bool:
            nonlocal found
            found = await workers.get("/replicas")
            return found["linked"] and len(found["others"]) == 1

        await until(known)
        assert {found["replica"], found["others"][0]["replica"]} == {"east-0", "east-1"}
    finally:
        store.kill()
