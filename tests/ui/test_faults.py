"""Faults of a fleet, and soon after each: its condition, Prometheus' alert by the shipped rules, the dashboard.

The intervals that are set allow 10 s. Each part is measured on its own, with time left for a busy machine. The proxy is
a process of its own, its engines are simulated, Prometheus and the browser are real.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import yaml
from playwright.sync_api import Browser, Page, expect

from proxy.settings import MeterSettings
from tests.integration.fleet import ROOT, SimEngine, free_port
from tests.integration.hop import Hop
from tests.ui.rig import LiveProxy, answers, until

pytestmark = [pytest.mark.ui, pytest.mark.first, pytest.mark.timeout(180)]

PROMETHEUS = shutil.which("prometheus")
WITHIN_S = 10.0
"""From a fault to its alert by the intervals alone; here it bounds each part of that way."""
METERS = {"clear_s": 0.5}
"""Detection at its defaults; only recovery is faster."""
_fresh = count(1)


class AlertServer(NamedTuple):
    """A running Prometheus with the shipped rules, at the shipped intervals."""

    client: httpx.Client

    def firing(self) -> dict[str, float]:
        """Unix seconds of the beginning of each alert that fires, by name and condition or instance."""
        alerts = self.client.get("/api/v1/alerts").json()["data"]["alerts"]
        return {
            f"{alert['labels']['alertname']} {alert['labels'].get('condition') or alert['labels'].get('instance')}": (
                datetime.fromisoformat(alert["activeAt"][:19] + "+00:00").timestamp()
            )
            for alert in alerts
            if alert["state"] == "firing"
        }


class Faulty(NamedTuple):
    """A fleet of three engines whose events, hash seeds and headers a test can change."""

    proxy: LiveProxy
    hop: Hop
    """In front of the third engine."""
    alerts: AlertServer
    page: Page
    """The dashboard's page of conditions."""

    def traffic(self) -> None:
        """One prompt of five blocks that no engine has, to each engine that is up."""
        start = next(_fresh) * 1_000
        for _ in self.proxy.engines:
            assert self.proxy.complete(list(range(start, start + 320)), "s", max_tokens=3).status_code == 200

    def reported(self, condition: str, began_unix_s: float, alerts: tuple[str, ...] = ()) -> None:
        """Check that all three report the condition in time, with traffic until then."""
        self._traffic_until(lambda: not self.condition(condition)["ok"], f"{condition} is not ok")
        found = self.condition(condition)
        assert found["since_unix_s"] - began_unix_s <= WITHIN_S
        assert found["remedy"]
        shown = self.page.locator(f'[data-condition="{condition}"]')
        expect(shown).to_contain_text("not met", timeout=WITHIN_S * 1000)
        expect(shown.locator(".remedy")).not_to_be_empty()
        wanted = {f"WarmrouteConditionNotOk {condition}", *alerts}
        self._traffic_until(lambda: wanted <= self.alerts.firing().keys(), f"{wanted} fire")
        firing = self.alerts.firing()
        assert max(firing[each] for each in wanted) - found["since_unix_s"] <= WITHIN_S

    def recovers(self, *conditions: str) -> None:
        """Wait until these are ok again, for all three."""
        self._traffic_until(lambda: all(self.condition(each)["ok"] for each in conditions), f"{conditions} are ok")
        for each in conditions:
            expect(self.page.locator(f'[data-condition="{each}"]')).not_to_contain_text("not met", timeout=30_000)
        gone = {f"WarmrouteConditionNotOk {each}" for each in conditions}
        until(lambda: not gone & self.alerts.firing().keys(), "the alerts end")

    def condition(self, name: str) -> dict[str, Any]:
        """The condition's row of ``/ready?verbose``."""
        conditions: list[dict[str, Any]] = self.proxy.client.get("/ready?verbose").json()["conditions"]
        return next(each for each in conditions if each["name"] == name)

    def restart(self, engine: SimEngine, *flags: str) -> None:
        """Start a dead engine, with these flags more."""
        engine.flags = (*engine.flags, *flags)
        engine.start()
        until(lambda: answers(engine), "the engine answers")

    def _traffic_until(self, holds: Callable[[], bool], what: str) -> None:
        def checked() -> bool:
            self.traffic()
            return holds()

        until(checked, what)


@contextlib.contextmanager
def hopping(target: str) -> Iterator[tuple[Hop, str]]:
    """A hop in a thread with an event loop of its own, and its address."""
    hop, loop = Hop(target), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    served = hop.serving()
    try:
        yield hop, asyncio.run_coroutine_threadsafe(served.__aenter__(), loop).result(20)
    finally:
        asyncio.run_coroutine_threadsafe(served.__aexit__(None, None, None), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()


@contextlib.contextmanager
def prometheus(folder: Path, proxy_port: int) -> Iterator[AlertServer]:
    """Prometheus with the shipped configuration, whose targets are replaced by this proxy."""
    if PROMETHEUS is None:
        pytest.skip("prometheus is not on the PATH: `make monitoring-tools` installs it")
    shipped = ROOT / "configs" / "monitoring"
    settings = yaml.safe_load((shipped / "prometheus.yml").read_text(encoding="utf-8"))
    settings["rule_files"] = [str(shipped / "alerts.yml")]
    settings["scrape_configs"] = settings["scrape_configs"][:1]
    settings["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{proxy_port}"]}]
    config = folder / "prometheus.yml"
    config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    port = free_port()
    command = [
        PROMETHEUS,
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10, trust_env=False) as client:
            until(lambda: _ready(client), "Prometheus is ready")
            yield AlertServer(client)
    finally:
        process.terminate()
        process.wait(timeout=20)


def _ready(client: httpx.Client) -> bool:
    try:
        return client.get("/-/ready").status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Iterator[Faulty]:
    folder = tmp_path_factory.mktemp("faults")
    with contextlib.ExitStack() as stack:
        engines, instances = [], []
        for number in range(3):
            events, again = free_port(), free_port()
            publishing = ("--kv-events-port", str(events), "--kv-events-replay-port", str(again))
            engine = SimEngine(folder / f"engine-{number}.log", ("--engine-speed", "100", *publishing))
            stack.callback(engine.kill)
            engine.start()
            engines.append(engine)
            sources = {"events_url": f"tcp://127.0.0.1:{events}", "events_replay_url": f"tcp://127.0.0.1:{again}"}
            instances.append({"name": f"engine-{number}", "url": engine.url, **sources})
        until(lambda: all(map(answers, engines)), "the engines answer")
        hop, instances[2]["url"] = stack.enter_context(hopping(engines[2].url))
        proxy = LiveProxy(
            folder,
            engines,
            instances=instances,
            keys={},
            policy={"name": "round_robin"},
            offload={"planner": "never"},
            meters=METERS,
        )
        stack.callback(proxy.client.close)
        stack.callback(proxy.stop)
        proxy.start()
        alerts = stack.enter_context(prometheus(folder, proxy.port))
        context = stack.enter_context(contextlib.closing(browser.new_context()))
        page = context.new_page()
        page.goto(f"{proxy.url}/ui/#/health")
        faulty = Faulty(proxy, hop, alerts, page)
        # The engines' hashes have agreed, their headers were seen, and their events are trusted.
        for _ in range(25):
            faulty.traffic()
        until(lambda: not alerts.firing(), "no alert")
        yield faulty


def test_the_intervals_allow_an_alert_within_ten_seconds() -> None:
    """Silent events are found last: silence, the time they must last, two examinations, a scrape, an evaluation."""
    meters = MeterSettings()
    shipped = yaml.safe_load((ROOT / "configs" / "monitoring" / "prometheus.yml").read_text(encoding="utf-8"))
    condition_s = meters.events_silent_s + meters.raise_s + 2 * meters.interval_s
    alert_s = sum(float(shipped["global"][f"{step}_interval"].removesuffix("s")) for step in ("scrape", "evaluation"))
    assert condition_s + alert_s <= WITHIN_S


def test_an_engine_is_killed(faulty: Faulty) -> None:
    engine = faulty.proxy.engines[0]
    engine.kill()
    try:
        faulty.reported("instances", time.time(), ("WarmrouteInstanceDown engine-0",))
    finally:
        faulty.restart(engine)
    faulty.recovers("instances")


def test_the_events_of_one_stop_and_a_hop_strips_a_header_of_another(faulty: Faulty) -> None:
    """At once, as each has a condition of its own and is waited for."""
    faults = f"{faulty.proxy.engines[1].url}/sim/faults"
    try:
        began_s = time.time()
        httpx.post(faults, json={"mode": "no_kv_events"}, trust_env=False).raise_for_status()
        faulty.hop.strips = True
        for _ in range(MeterSettings().min_requests):  # the condition is about so many answers of an instance
            faulty.traffic()
        stripped_s = time.time()
        faulty.reported("kv_events", began_s)
        faulty.reported("engine_headers", stripped_s)
    finally:
        faulty.hop.strips = False
        httpx.post(faults, json={"mode": "none"}, trust_env=False).raise_for_status()
    faulty.recovers("kv_events", "engine_headers")


def test_its_hash_seed_changes(faulty: Faulty) -> None:
    engine = faulty.proxy.engines[1]
    engine.kill()
    faulty.restart(engine, "--hash-seed", "7")
    try:
        until(lambda: faulty.condition("instances")["ok"], "the engine is back")
        faulty.reported("hash_seed", time.time())
    finally:
        engine.kill()
        faulty.restart(engine, "--hash-seed", "0")
    faulty.recovers("instances", "hash_seed")
