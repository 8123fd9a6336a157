"""Health monitor: probes every engine for liveness, identity, models, KV pool and block size."""

from __future__ import annotations

import asyncio
import logging
import time

import httpx
from prometheus_client.parser import text_string_to_metric_families

from proxy.clip import clip
from proxy.core import Core
from proxy.engines.shortage import own_shortage
from proxy.fleet.instances import Instance
from proxy.fleet.model_lists import AnotherServerError
from proxy.fleet.reachability import diagnosis
from proxy.handoff.legs import query_engine_id
from proxy.meters.engine import COUNTERS

log = logging.getLogger("warmroute.health")

_WANTED = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "process_start_time_seconds",
    *COUNTERS,
)


class HealthMonitor:
    """Probes the fleet every ``health.interval_s`` seconds until cancelled."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._doubted: set[str] = set()
        self._doubts = asyncio.Event()
        core.model_lists.on_replaced = self._restarted

    async def run(self) -> None:
        """Probe until cancelled."""
        core = self._core
        while True:
            await self.probe_all()
            for limited in (core.rejections, core.failures, core.clients.refusals, core.access.refusals):
                limited.flush()
            await self._rest(core.settings.health.interval_s)

    def doubt(self, name: str) -> None:
        """Probe an instance at once: another replica has stopped using it. Its next failure opens its breaker."""
        instance = self._core.instances.get(name)
        if instance is not None and instance.healthy:
            instance.breaker.doubt(time.monotonic())
            self._doubted.add(name)
            self._doubts.set()

    async def _rest(self, seconds: float) -> None:
        """Wait until the next round, and meanwhile probe the instances in doubt."""
        ends_s = time.monotonic() + seconds
        while (left_s := ends_s - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(left_s):
                    await self._doubts.wait()
            except TimeoutError:
                return
            self._doubts.clear()
            names, self._doubted = self._doubted, set()
            for name in names:
                if (instance := self._core.instances.get(name)) is not None:
                    await self.probe(instance)

    async def probe_all(self) -> None:
        """Probe every instance once, concurrently."""
        async with asyncio.TaskGroup() as group:
            for instance in self._core.instances:
                group.create_task(self.probe(instance))

    async def probe(self, instance: Instance) -> None:
        """Probe one instance now. Results for an instance that has left the fleet are dropped."""
        timeout_s = self._core.settings.health.timeout_s
        url, whose = instance.url, ""
        try:
            async with asyncio.timeout(timeout_s):
                (await self._get(instance, "/health")).raise_for_status()
                await self._read_metrics(instance)
                await self._core.model_lists.read(instance)
                if instance.settings.bootstrap_url is not None:
                    url, whose = instance.settings.bootstrap_url, "its bootstrap server: "
                    await self._read_identity(instance, url)
        except Exception as error:
            # An invalid answer of one engine must not stop the probing of the others.
            expected = isinstance(error, httpx.HTTPError | TimeoutError | AnotherServerError)
            log.debug("probe of %s failed", instance.name, exc_info=not expected)
            late = isinstance(error, TimeoutError | httpx.TimeoutException)
            if late and self._core.lag.explains(timeout_s):
                log.warning(
                    "a probe of %s took too long because this process lacks CPU; its result is ignored", instance.name
                )
                return
            shortage = own_shortage(error)
            if shortage is not None:
                log.warning("a probe of %s was not sent: this proxy is out of sockets: %s", instance.name, shortage)
                return
            gone = isinstance(error, httpx.ConnectError | AnotherServerError)
            failure = clip(whose + diagnosis(error, url, timeout_s))
            if not instance.up and instance.diagnosis != failure:  # one that is up goes down with a warning
                log.warning("%s is not used: %s", instance.name, failure)
            self._core.instances.probe_failed(instance, f"probe: {failure}", refused=gone)
        else:
            self._core.instances.probed(instance)

    async def _get(self, instance: Instance, path: str) -> httpx.Response:
        return await self._core.get(instance, path)

    async def _read_metrics(self, instance: Instance) -> None:
        answer = await self._get(instance, "/metrics")
        if answer.status_code != 200 or not self._core.instances.contains(instance):
            return
        # An engine exposes hundreds of lines; only these few are parsed on the event loop.
        lines = [line for line in answer.text.splitlines() if line.startswith(_WANTED)]
        found = [
            sample for family in text_string_to_metric_families("\n".join(lines) + "\n") for sample in family.samples
        ]
        samples = {sample.name: sample for sample in found}
        if "vllm:num_requests_running" in samples:
            instance.running = int(samples["vllm:num_requests_running"].value)
        if "vllm:num_requests_waiting" in samples:
            instance.waiting = int(samples["vllm:num_requests_waiting"].value)
        if "process_start_time_seconds" in samples:
            self._saw_start(instance, samples["process_start_time_seconds"].value)
        config = samples.get("vllm:cache_config_info")
        if config is not None:
            self._saw_cache_config(instance, config.labels)
        counters = {
            name: sum(sample.value for sample in found if sample.name == f"{key}_total")  # one for each engine core
            for key, name in COUNTERS.items()
            if f"{key}_total" in samples
        }
        caching = config.labels.get("enable_prefix_caching") if config is not None else None
        short = self._core.short_load.requests(instance.name)
        self._core.meters.probed(instance, counters, caching, short, time.monotonic())
        usage = samples.get("vllm:kv_cache_usage_perc")
        if usage is not None:
            instance.kv_usage = usage.value
            used_tokens = int(usage.value * instance.kv_capacity_tokens)
            self._core.router.state.set_usage(instance.name, used_tokens)
            self._core.leaks.observe(
                instance, used_tokens, self._core.router.state.expected_tokens(instance.name, time.monotonic())
            )

    def _saw_start(self, instance: Instance, started_unix_s: float) -> None:
        if instance.started_unix_s is not None and started_unix_s != instance.started_unix_s:
            self._restarted(instance)
        instance.started_unix_s = started_unix_s

    def _saw_cache_config(self, instance: Instance, labels: dict[str, str]) -> None:
        block_tokens, blocks = labels.get("block_size", ""), labels.get("num_gpu_blocks", "")
        if not block_tokens.isdigit() or not blocks.isdigit():
            return
        first = all(other.block_tokens is None for other in self._core.instances)
        instance.block_tokens = int(block_tokens)
        instance.kv_capacity_tokens = int(block_tokens) * int(blocks)
        router = self._core.router
        if first:
            router.set_block_tokens(instance.block_tokens)
        elif instance.block_tokens != router.block_tokens:
            log.warning(
                "%s has blocks of %d tokens, the fleet %d: its cache predictions will be inaccurate",
                instance.name,
                instance.block_tokens,
                router.block_tokens,
            )
        router.state.set_capacity(instance.name, instance.kv_capacity_tokens, router.block_tokens)

    async def _read_identity(self, instance: Instance, url: str) -> None:
        engine_id = await query_engine_id(self._core.control, url, self._core.settings.offload.query_timeout_s)
        if not self._core.instances.contains(instance):
            return
        if instance.engine_id is not None and engine_id != instance.engine_id and instance.started_unix_s is None:
            self._restarted(instance)
            await self._core.model_lists.read(instance)
        instance.engine_id = engine_id

    def _restarted(self, instance: Instance) -> None:
        instance.restarts += 1
        instance.engine_id = None
        self._core.instances.restarted(instance)
        self._core.leaks.restarted(instance)
        self._core.meters.restarted(instance.name)
        self._core.router.state.restarted(instance.name)
        log.warning("%s restarted: its cache index is cleared", instance.name)
