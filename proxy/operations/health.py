"""Health monitor: probes every engine for liveness, identity, models, KV pool and block size."""

from __future__ import annotations

import asyncio
import logging
import time

import httpx

from proxy.clip import clip
from proxy.core import Core
from proxy.engines.shortage import own_shortage
from proxy.fleet.instances import Instance
from proxy.fleet.model_lists import AnotherServerError
from proxy.fleet.reachability import diagnosis
from proxy.fleet.reported import ReportedLoad
from proxy.handoff.legs import query_engine_ids
from proxy.meters.reading import EngineFigures, MetricsReading

log = logging.getLogger("warmroute.health")


class HealthMonitor:
    """Probes the fleet every ``health.interval_s`` seconds until cancelled: each engine once, for all its ranks.

    An engine whose probe has not ended is left out of the next rounds; the others do not wait for it.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._doubted: set[str] = set()
        self._probing: set[tuple[str, str]] = set()
        """Engines whose probe in ``run`` has not ended."""
        self._doubts = asyncio.Event()
        core.model_lists.on_replaced = self._restarted

    async def run(self) -> None:
        """Probe until cancelled."""
        core = self._core
        async with asyncio.TaskGroup() as group:
            while True:
                for instance in self._engines().values():
                    self._begin(instance, group)
                for limited in (core.rejections, core.failures, core.clients.refusals, core.access.refusals):
                    limited.flush()
                await self._rest(core.settings.health.interval_s, group)

    def doubt(self, name: str) -> None:
        """Probe an instance at once: another replica has stopped using it. Its next failure opens its breaker."""
        instance = self._core.instances.get(name)
        if instance is not None and instance.healthy:
            instance.breaker.doubt(time.monotonic())
            self._doubted.add(name)
            self._doubts.set()

    def _begin(self, instance: Instance, group: asyncio.TaskGroup) -> bool:
        """Start a probe of an engine; False if one is in progress."""
        engine = _engine_of(instance)
        if engine in self._probing:
            return False
        self._probing.add(engine)
        group.create_task(self._probe_once(engine, instance))
        return True

    async def _probe_once(self, engine: tuple[str, str], instance: Instance) -> None:
        try:
            await self.probe(instance)
        finally:
            self._probing.discard(engine)
            if self._doubted:
                self._doubts.set()

    async def _rest(self, seconds: float, group: asyncio.TaskGroup) -> None:
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
                if (instance := self._core.instances.get(name)) is not None and not self._begin(instance, group):
                    self._doubted.add(name)  # the probe in progress may have begun before

    async def probe_all(self) -> None:
        """Probe every instance once, concurrently."""
        async with asyncio.TaskGroup() as group:
            for instance in self._engines().values():
                group.create_task(self.probe(instance))

    def _engines(self) -> dict[tuple[str, str], Instance]:
        """One instance of each engine, whose probe is also that of the others."""
        return {_engine_of(each): each for each in self._core.instances}

    async def probe(self, instance: Instance) -> None:
        """Probe one instance now, with all ranks of its engine. Results for one that has left the fleet are dropped."""
        timeout_s = self._core.settings.health.timeout_s
        ranks = self._core.instances.ranks(instance)
        url, whose, path = instance.url, "", "/health"
        unregistered: set[int] = set()
        try:
            async with asyncio.timeout(timeout_s):
                (await self._get(instance, path)).raise_for_status()
                path = "/metrics"
                await self._read_metrics(ranks)
                path = "/v1/models"
                await self._core.model_lists.read(instance)
                if instance.settings.bootstrap_url is not None:
                    url, whose, path = instance.settings.bootstrap_url, "its bootstrap server: ", "/query"
                    unregistered = await self._read_identity(ranks, url)
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
            for each in ranks:
                self._failed(each, whose + diagnosis(error, url, timeout_s, path), gone=gone)
        else:
            for each in ranks:
                if each.rank is not None and 0 < each.reported_ranks <= each.rank:
                    self._failed(
                        each, f"the engine has {each.reported_ranks} data-parallel ranks, and no rank {each.rank}"
                    )
                elif (each.rank or 0) in unregistered:
                    self._failed(each, f"its bootstrap server does not list data-parallel rank {each.rank or 0}")
                else:
                    self._core.instances.probed(each)

    def _failed(self, instance: Instance, failure: str, *, gone: bool = False) -> None:
        failure = clip(failure)
        if not instance.up and instance.diagnosis != failure:  # one that is up goes down with a warning
            log.warning("%s is not used: %s", instance.name, failure)
        self._core.instances.probe_failed(instance, f"probe: {failure}", refused=gone)

    async def _get(self, instance: Instance, path: str) -> httpx.Response:
        return await self._core.get(instance, path)

    async def _read_metrics(self, ranks: tuple[Instance, ...]) -> None:
        answer = await self._get(ranks[0], "/metrics")
        if answer.status_code != 200:
            return
        reading = MetricsReading(answer.text)
        for instance in ranks:
            if self._core.instances.contains(instance):
                instance.reported_ranks = reading.ranks
                self._take(instance, reading.figures(instance.rank))

    def _take(self, instance: Instance, figures: EngineFigures) -> None:
        """Take one instance's part of a reading."""
        instance.reported = ReportedLoad(figures.running, figures.waiting, figures.kv_usage)
        self._saw_start(instance, figures)
        # Not the number of requests: D has nothing to compute while P prefills for it.
        pending_tokens = self._core.router.state.ledger.account(instance.name).pending_prefill_tokens
        self._core.stalls.observe(instance, figures.of_steps, pending_tokens)
        if figures.block_tokens is not None and figures.blocks is not None:
            self._saw_pool(instance, figures.block_tokens, figures.blocks)
        short = self._core.short_load.requests(instance.name)
        self._core.meters.probed(instance, figures.counters, figures.caching, short, time.monotonic())
        if figures.kv_usage is not None:
            used_tokens = int(figures.kv_usage * instance.kv_capacity_tokens)
            self._core.router.state.set_usage(instance.name, used_tokens)
            self._core.leaks.observe(
                instance, used_tokens, self._core.router.state.expected_tokens(instance.name, time.monotonic())
            )

    def _saw_start(self, instance: Instance, figures: EngineFigures) -> None:
        """Notice a new process: by its start, or where none is reported (several API servers) by counters that fell."""
        started_unix_s, looked_up = figures.started_unix_s, figures.counters.get("prefix_query_tokens")
        if started_unix_s is not None:
            if instance.started_unix_s not in {None, started_unix_s}:
                self._restarted(instance)
            instance.started_unix_s = started_unix_s
        elif looked_up is not None and instance.looked_up_tokens is not None and looked_up < instance.looked_up_tokens:
            self._restarted(instance)
        instance.looked_up_tokens = looked_up

    def _saw_pool(self, instance: Instance, block_tokens: int, blocks: int) -> None:
        core, router = self._core, self._core.router
        first = all(each.block_tokens is None for each in core.instances)
        changed = instance.block_tokens != block_tokens
        instance.block_tokens = block_tokens
        instance.kv_capacity_tokens = block_tokens * blocks
        if first:
            router.set_block_tokens(block_tokens)
        elif block_tokens != router.block_tokens:
            # An engine that is down may come back with this size, too.
            answering = {each.block_tokens for each in core.instances if not each.bad_probes_in_a_row}
            if answering <= {block_tokens, None}:
                self._adopt(block_tokens)
            elif changed:
                log.warning(
                    "%s has blocks of %d tokens, the fleet %d: its cache predictions will be inaccurate",
                    instance.name,
                    block_tokens,
                    router.block_tokens,
                )
        router.state.set_capacity(instance.name, instance.kv_capacity_tokens, router.block_tokens)

    def _adopt(self, block_tokens: int) -> None:
        """Take the block size that all engines have now, as after all of them were restarted with another one."""
        core = self._core
        log.info("the engines' blocks have %d tokens", block_tokens)
        core.router.set_block_tokens(block_tokens)
        for each in core.instances:
            core.router.state.set_capacity(each.name, each.kv_capacity_tokens, block_tokens)
            if each.settings.events_url is not None:
                # Events of blocks of this size were not taken: they are replayed, or begin again.
                core.events.remove(each.name)
                core.events.add(each.settings)

    async def _read_identity(self, ranks: tuple[Instance, ...], url: str) -> set[int]:
        """Read the engine ids; returns the ranks that have none."""
        found = await query_engine_ids(self._core.control, url, self._core.settings.offload.query_timeout_s)
        replaced = False
        for instance in ranks:
            engine_id = found.get(instance.rank or 0)
            if engine_id is None or not self._core.instances.contains(instance):
                continue
            if instance.engine_id not in {None, engine_id} and instance.started_unix_s is None:
                self._restarted(instance)
                replaced = True
            instance.engine_id = engine_id
        if replaced:
            await self._core.model_lists.read(ranks[0])
        return {each.rank or 0 for each in ranks}.difference(found)

    def _restarted(self, instance: Instance) -> None:
        instance.restarts += 1
        instance.engine_id = None
        self._core.instances.restarted(instance)
        self._core.leaks.restarted(instance)
        self._core.stalls.restarted(instance.name)
        self._core.meters.restarted(instance.name)
        self._core.router.state.restarted(instance.name)
        log.warning("%s restarted: its cache index is cleared", instance.name)


def _engine_of(instance: Instance) -> tuple[str, str]:
    """The engine of an instance: its URL, and the instance's name unless it is one of several ranks."""
    return instance.url, instance.name if instance.rank is None else ""
