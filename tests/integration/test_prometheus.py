"""A real Prometheus scrapes a proxy and simulated engines with the shipped files and evaluates the shipped rules."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.integration.conftest import Cluster, StartCluster
from tests.integration.fleet import free_port
from tests.monitoring.names import ROOT

FOLDER = ROOT / "configs" / "monitoring"
PROMETHEUS = shutil.which("prometheus")

pytestmark = [
    pytest.mark.fleet,
    pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus: `make monitoring-tools` installs it"),
]


def scrape_file(cluster: Cluster) -> dict[str, Any]:
    """The shipped file with this fleet's addresses and shorter intervals."""
    config: dict[str, Any] = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "250ms", "scrape_timeout": "250ms", "evaluation_interval": "250ms"}
    config["rule_files"] = [str(FOLDER / name) for name in config["rule_files"]]
    proxies, engines = config["scrape_configs"]
    proxies["static_configs"] = [{"targets": [cluster.url.removeprefix("http://")]}]
    engines["static_configs"] = [
        {"targets": [f"127.0.0.1:{engine.port}"], "labels": {"engine_name": f"inst-{number}"}}
        for number, engine in enumerate(cluster.engines)
    ]
    return config


@contextlib.asynccontextmanager
async def prometheus(config: dict[str, Any], folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A Prometheus process; a client for its API."""
    path, output = folder / "prometheus.yml", folder / "prometheus.log"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    address = f"127.0.0.1:{free_port()}"
    assert PROMETHEUS is not None
    with output.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(PROMETHEUS, f"--config.file={path}", f"--storage.tsdb.path={folder / 'data'}"),
            f"--web.listen-address={address}",
            stdout=log,
            stderr=log,
        )
    try:
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=10, trust_env=False) as client:
            for _ in range(1000):
                assert process.returncode is None, output.read_text(encoding="utf-8")
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get("/-/ready")).status_code == 200:
                        break
                await asyncio.sleep(0.05)
            yield client
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def results(client: httpx.AsyncClient, expression: str) -> list[tuple[dict[str, str], float]]:
    answer = (await client.get("/api/v1/query", params={"query": expression})).json()
    assert answer["status"] == "success", answer
    return [(found["metric"], float(found["value"][1])) for found in answer["data"]["result"]]


async def until_results(client: httpx.AsyncClient, expression: str, count: int) -> list[tuple[dict[str, str], float]]:
    """Wait until an expression has ``count`` results."""
    found: list[tuple[dict[str, str], float]] = []
    for _ in range(600):
        found = await results(client, expression)
        if len(found) == count:
            return found
        await asyncio.sleep(0.1)
    raise AssertionError(f"{expression}: {found} after 60 s")


async def test_a_killed_engine_is_an_alert_and_the_alert_ends_when_it_is_back(
    start_cluster: StartCluster, tmp_path: Path
) -> None:
    # A decision that took long on a busy machine would be an alert of its own.
    cluster = await start_cluster(2, health={"interval_s": 0.25, "open_s": 0.5}, limits={"slow_decision_s": 60})
    body = {"model": "sim", "prompt": list(range(600)), "max_tokens": 2}
    async with prometheus(scrape_file(cluster), tmp_path) as client:
        model = (await cluster.client.get("/v1/models")).json()["data"][0]["id"]
        assert (await cluster.client.post("/v1/completions", json={**body, "model": model})).status_code == 200
        healthy = await until_results(client, "warmroute_instance_healthy == 1", 2)
        assert {labels["instance"] for labels, _ in healthy} == {"inst-0", "inst-1"}
        assert {labels["proxy"] for labels, _ in healthy} == {cluster.url.removeprefix("http://")}
        await until_results(client, "up == 1", 3)
        await until_results(client, "vllm:num_requests_running", 2)
        [(labels, value)] = await until_results(client, 'warmroute_requests_total{outcome="ok"}', 1)
        assert (labels["job"], value) == ("warmroute", 1)
        assert await results(client, 'ALERTS{alertstate="firing"}') == []
        groups = (await client.get("/api/v1/rules")).json()["data"]["groups"]
        assert [rule["name"] for group in groups for rule in group["rules"] if rule["health"] == "err"] == []

        cluster.engines[1].kill()
        [(alert, _)] = await until_results(client, 'ALERTS{alertname="WarmrouteInstanceDown", alertstate="firing"}', 1)
        assert (alert["instance"], alert["severity"]) == ("inst-1", "warning")
        assert await results(client, 'ALERTS{alertname="WarmrouteNoInstance"}') == []
        [(condition, _)] = await until_results(
            client, 'ALERTS{alertname="WarmrouteConditionNotOk", condition="instances", alertstate="firing"}', 1
        )
        assert condition["proxy"] == alert["proxy"]

        cluster.engines[1].start()
        await until_results(client, 'ALERTS{alertname="WarmrouteInstanceDown", alertstate="firing"}', 0)
