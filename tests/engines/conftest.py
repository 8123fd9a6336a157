"""Real vLLM engines behind the real proxy. Run by ``make test-engines``; any other run skips them with a reason."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from launch.fleet.file import load_fleet
from launch.run.supervisor import Fleet
from proxy.settings import load_settings
from tests.engines.relay import Relay
from tests.engines.rig import ABORT_S, QUICK_ENGINES, RUN_VARIABLE, Engines, Proxy, begin_prompts
from tests.proxy.conftest import serving

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent

ENGINES_VARIABLE = "WARMROUTE_ENGINES"
"""Environment with vLLM, and the tiny model in it or beside it; default ``.venv-engines``."""
ASKED_VARIABLE = "WARMROUTE_TEST_ENGINES"
FIRST = ("test_transfer_hooks", "test_small_pool", "test_elastic_ab", "test_environment_ab", "test_two_ranks")
"""Tests with separate engines: run before the shared ones start, so that at most four run."""
LAST = ("test_joint", "test_failures", "test_kills", "test_resume")
"""Abandoned pulls leave leaked blocks in the engines, kills cost a restart each."""

FLEET_OVERRIDES = (
    QUICK_ENGINES,
    # Separate ports: a fleet that already runs from the same file is not touched.
    "base_port=18201",
    "base_bootstrap_port=19201",
    "base_events_port=17701",
    "base_events_replay_port=17801",
    "base_master_port=19601",
    f"vllm.transfer.abort_timeout_s={ABORT_S}",
    "restart=on_failure",
    "max_restarts=20",
    "restart_backoff_s=0.2",
    # Without it an engine forgets every response.
    "env.VLLM_ENABLE_RESPONSES_API_STORE='1'",
    # Coding agents send tools with tool_choice auto.
    "vllm.extra_args=[--enable-auto-tool-choice, --tool-call-parser, hermes]",
)


def engines_folder() -> Path:
    return Path(os.environ.get(ENGINES_VARIABLE) or ROOT / ".venv-engines").absolute()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests that were not requested or cannot run; those with separate engines go first, those that kill last."""
    mine = [item for item in items if item.get_closest_marker("engines") and HERE in item.path.parents]
    asked = os.environ.get(ASKED_VARIABLE) == "1" or "engines" in (config.getoption("markexpr") or "").split()
    reason = None
    if not asked:
        reason = f"real engines: not requested (`make test-engines`, -m engines or {ASKED_VARIABLE}=1)"
    elif not (engines_folder() / "bin" / "python").exists():
        reason = f"real engines: nothing at {engines_folder()}; run `make engines` or set {ENGINES_VARIABLE}"
    for item in mine:
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
    order = {name: rank - len(FIRST) for rank, name in enumerate(FIRST)} | {name: 1 + i for i, name in enumerate(LAST)}
    folder = f"{HERE}{os.sep}"
    items.sort(key=lambda item: order.get(item.path.stem, 0) if str(item.path).startswith(folder) else 0)


@pytest.fixture(autouse=True)
def _prompts(request: pytest.FixtureRequest) -> None:
    # A second attempt (pytest-rerunfailures) must not find the first one's prompts in the engines' caches.
    attempt = getattr(request.node, "execution_count", 1)
    begin_prompts(request.node.nodeid if attempt == 1 else f"{request.node.nodeid} {attempt}")


@pytest.fixture(scope="session")
def engine_python() -> Path:
    """The Python that has vLLM."""
    return engines_folder() / "bin" / "python"


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """Folder of the tiny model."""
    folder = engines_folder()
    return next(path for path in (folder / "tiny-model", folder.parent / "tiny-model") if path.is_dir())


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engines(
    tmp_path_factory: pytest.TempPathFactory, engine_python: Path, tiny_model: Path
) -> AsyncIterator[Engines]:
    """Four engines, started by the launcher once, supervised by it, and stopped at the end."""
    file = load_fleet(
        ROOT / "configs" / "fleets" / "vllm-cpu-4x.yaml",
        [*FLEET_OVERRIDES, f"vllm.python={engine_python}", f"model={tiny_model}"],
    )
    running = os.environ.get(RUN_VARIABLE)
    run_dir = Path(running) if running else tmp_path_factory.mktemp("engines") / "run"
    async with AsyncExitStack() as stack:
        if not running:
            await stack.enter_async_context(Fleet(file, run_dir, with_proxy=False))
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=60, trust_env=False))
        yield Engines(file, run_dir, client)


class StartProxy:
    """``await start_proxy(0, 1, ...)``: the real proxy over some of the engines, stopped when the test ends."""

    def __init__(self, engines: Engines, stack: AsyncExitStack) -> None:
        self.engines = engines
        self.stack = stack

    async def relay(self, target: str) -> Relay:
        """An HTTP relay in front of one address, until the test ends."""
        relay = Relay(target)
        await relay.start()
        self.stack.push_async_callback(relay.stop)
        return relay

    async def __call__(
        self,
        *which: int,
        roles: dict[int, str] | None = None,
        urls: dict[int, str] | None = None,
        bootstraps: dict[int, str] | None = None,
        events: bool = False,
        transport: str | None = None,
        **settings: Any,
    ) -> Proxy:
        """Start the proxy.

        Args:
            which: engines it may use, by number.
            roles: role by engine, when not ``kv_both``.
            urls: address by engine, when not the engine's own: a relay's.
            bootstraps: the same for bootstrap addresses.
            events: true to subscribe to the engines' KV events.
            transport: as which the proxy prices transfers; default: unknown.
            settings: of the proxy; they override short bounds and a planner that offloads every prompt from 500 tokens.
        """
        file = self.engines.file
        instances = [
            {
                "name": file.name(number),
                "url": (urls or {}).get(number, file.url(number)),
                "bootstrap_url": (bootstraps or {}).get(number, file.bootstrap_url(number)),
                "role": (roles or {}).get(number, "kv_both"),
                **({"transport": transport} if transport else {}),
                **(
                    {"events_url": file.events_url(number), "events_replay_url": file.events_replay_url(number)}
                    if events
                    else {}
                ),
            }
            for number in which
        ]
        offload = {
            "planner": "threshold",
            "params": {"min_decode_requests": 0, "max_in_flight": 8},
            "prefill_timeout_s": 8.0,
            "first_token_timeout_s": 8.0,
            "hold_s": float(ABORT_S),
            # Longer than any D leg is queued here, so that none is cut while D has it queued.
            "abandoned_s": 20.0,
            # What earlier tests leaked in a D is no reason to rest it.
            "leak_share": 1.0,
            **settings.pop("offload", {}),
        }
        merged = {
            "port": 0,
            "instances": instances,
            "offload": offload,
            "classes": {"medium_tokens": 200, "heavy_tokens": 500},
            # Two busy processors: a late probe is no error.
            "health": {"interval_s": 0.5, "timeout_s": 5.0},
            "timeouts": {"first_byte_s": 30, "total_s": 60, "idle_s": 15},
            "log_level": "warning",
            **settings,
        }
        _, url = await self.stack.enter_async_context(serving(load_settings(None, **merged)))
        client = await self.stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=120, trust_env=False))
        proxy = Proxy(url, client, file.request_model)
        await proxy.until_healthy(*(file.name(number) for number in which))
        return proxy


@pytest_asyncio.fixture(loop_scope="session")
async def start_proxy(engines: Engines) -> AsyncIterator[StartProxy]:
    """Factory of proxies that are stopped when the test ends."""
    await engines.until_all_ready()
    async with AsyncExitStack() as stack:
        yield StartProxy(engines, stack)
    engines.resume_all()
