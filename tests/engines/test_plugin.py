"""The plug-in that runs the stock MooncakeConnector on the CPU: in parts with stand-ins, then with the real vLLM."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch.cpu_engine.plugin import warmroute_mooncake_cpu as plugin
from tests.engines.rig import BLOCK, QUICK_START


class Shaped:
    """A tensor stand-in: its shape and its base."""

    def __init__(self, *shape: int, base: Shaped | None = None) -> None:
        self.shape = shape
        self.base = base

    def dim(self) -> int:
        return len(self.shape)

    def transpose(self, first: int, second: int) -> Shaped:
        shape = list(self.shape)
        shape[first], shape[second] = shape[second], shape[first]
        return Shaped(*shape, base=self)


class Connector:
    """The part of the stock connector that the plug-in uses."""

    def __init__(self, worker: Any) -> None:
        self.connector_worker = worker
        self.registered: dict[str, Shaped] = {}

    def register_kv_caches(self, kv_caches: dict[str, Shaped]) -> None:
        self.registered = kv_caches


class Registry:
    def __init__(self) -> None:
        self.loads = 0
        self._registry: dict[str, Callable[[], type]] = {plugin.CONNECTOR: self.load}

    def load(self) -> type:
        self.loads += 1
        return Connector


def test_a_cache_with_heads_first_is_shown_with_tokens_first() -> None:
    cache = Shaped(2, 100, 3, BLOCK, 32)
    view = plugin.token_major(cache, BLOCK)
    assert view.shape == (2, 100, BLOCK, 3, 32)
    assert view.base is cache


@pytest.mark.parametrize("shape", [(2, 100, BLOCK, 3, 32), (100, BLOCK, 576), (2, 100, 3, 2 * BLOCK, 32)])
def test_any_other_cache_is_left_alone(shape: tuple[int, ...]) -> None:
    cache = Shaped(*shape)
    assert plugin.token_major(cache, BLOCK) is cache


def test_the_registry_loads_the_adapted_connector_lazily_and_once() -> None:
    registry = Registry()
    plugin.adapt_connector(registry)
    adapted = registry._registry[plugin.CONNECTOR]
    plugin.adapt_connector(registry)
    assert registry._registry[plugin.CONNECTOR] is adapted
    assert registry.loads == 0
    kind = adapted()
    assert (adapted(), registry.loads) == (kind, 1)
    assert issubclass(kind, Connector)
    assert kind.__name__ == Connector.__name__


def test_only_the_version_with_the_assert_is_shown_views() -> None:
    registry = Registry()
    plugin.adapt_connector(registry)
    kind = registry._registry[plugin.CONNECTOR]()
    cache = Shaped(2, 100, 3, BLOCK, 32)
    for worker, shown in (
        (SimpleNamespace(block_size=BLOCK, kv_topo=object()), (2, 100, BLOCK, 3, 32)),
        (SimpleNamespace(block_size=BLOCK), cache.shape),
    ):
        connector = kind(worker)
        connector.register_kv_caches({"layer": cache})
        assert connector.registered["layer"].shape == shown


def test_a_missing_accelerator_has_index_0_and_a_real_one_its_own() -> None:
    def none() -> int:
        raise RuntimeError("no accelerator")

    without = SimpleNamespace(current_device_index=none)
    plugin.answer_device_index(without)
    assert without.current_device_index() == 0
    third = SimpleNamespace(current_device_index=lambda: 3)
    plugin.answer_device_index(third)
    assert third.current_device_index() == 3
    plugin.answer_device_index(SimpleNamespace())  # a torch without the function


def test_amx_is_asked_for_only_where_there_is_some(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[bool] = []

    def cpu(supported: bool, allowed: bool) -> SimpleNamespace:
        def ask() -> bool:
            asked.append(allowed)
            return allowed

        return SimpleNamespace(_is_amx_tile_supported=lambda: supported, _init_amx=ask)

    assert not plugin.ask_for_amx_tiles(cpu(False, True))
    assert asked == []
    assert plugin.ask_for_amx_tiles(cpu(True, True))
    assert not caplog.records
    assert not plugin.ask_for_amx_tiles(cpu(True, False))
    assert "refuses AMX" in caplog.text
    assert not plugin.ask_for_amx_tiles(SimpleNamespace())


@pytest.mark.parametrize("method", ["fork", "spawn", None])
def test_engines_that_are_to_fork_do(monkeypatch: pytest.MonkeyPatch, method: str | None) -> None:
    class Platform:
        @classmethod
        def check_and_update_config(cls, vllm_config: list[type]) -> None:
            vllm_config.append(cls)
            os.environ[plugin.START_METHOD] = "spawn"

    monkeypatch.setenv(plugin.START_METHOD, "")  # restored at the end
    if method is None:
        monkeypatch.delenv(plugin.START_METHOD)
    else:
        monkeypatch.setenv(plugin.START_METHOD, method)
    registered: list[str] = []
    monkeypatch.setattr(os, "register_at_fork", lambda **handlers: registered.extend(handlers))
    plugin.keep_fork(Platform)
    kept = Platform.check_and_update_config
    plugin.keep_fork(Platform)
    assert registered == (["before", "after_in_child"] if method == "fork" else [])
    assert Platform.check_and_update_config is kept
    config: list[type] = []
    Platform.check_and_update_config(config)
    assert config == [Platform]
    assert os.environ[plugin.START_METHOD] == ("fork" if method == "fork" else "spawn")


def test_a_forked_process_keeps_its_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: dict[str, Callable[[], None]] = {}
    monkeypatch.setattr(os, "register_at_fork", lambda **given: handlers.update(given))
    plugin.keep_processors()
    before = os.sched_getaffinity(0)
    handlers["before"]()
    try:
        os.sched_setaffinity(0, {min(before)})  # as Intel's OpenMP does in the child
        handlers["after_in_child"]()
        assert os.sched_getaffinity(0) == before
    finally:
        os.sched_setaffinity(0, before)


REAL = """
import os
import sys
import torch
from vllm.plugins import load_general_plugins
from vllm.platforms import current_platform
assert current_platform.is_cpu()
try:
    torch.accelerator.current_device_index()
    raise SystemExit("there is an accelerator: nothing to adapt")
except RuntimeError:
    pass
load_general_plugins()
assert torch.accelerator.current_device_index() == 0
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnector as stock
adapted = KVConnectorFactory.get_connector_class_by_name("MooncakeConnector")
assert issubclass(adapted, stock) and adapted is not stock, adapted.__mro__
assert adapted is KVConnectorFactory.get_connector_class_by_name("MooncakeConnector")
from warmroute_mooncake_cpu import token_major
cache = torch.arange(2 * 5 * 3 * 16 * 4, dtype=torch.float32).reshape(2, 5, 3, 16, 4)
view = token_major(cache, 16)
assert view.shape == (2, 5, 16, 3, 4)
for k_or_v in (0, 1):
    assert view[k_or_v].data_ptr() == cache[k_or_v].data_ptr() and view[k_or_v].nbytes == cache[k_or_v].nbytes
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
assert CPUAttentionBackend.get_kv_cache_shape(5, 16, 3, 32) == (2, 5, 3, 16, 32)
from vllm.engine.arg_utils import EngineArgs
EngineArgs(model=sys.argv[1], dtype="float32", enforce_eager=True).create_engine_config()
assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"
allowed = os.sched_getaffinity(0)
if os.fork() == 0:
    os._exit(os.sched_getaffinity(0) != allowed)
assert os.wait()[1] == 0, "a forked process is bound to fewer processors"
print("adapted")
"""


@pytest.mark.engines
@pytest.mark.timeout(300)
def test_with_the_real_torch_and_vllm(engine_python: Path, tiny_model: Path) -> None:
    openmp = engine_python.parent.parent / "lib" / "libiomp5.so"  # as the launcher preloads it
    done = subprocess.run(
        [str(engine_python), "-c", REAL, str(tiny_model)],
        env={
            **os.environ,
            **QUICK_START,
            plugin.START_METHOD: "fork",
            "HF_HUB_OFFLINE": "1",
            "LD_PRELOAD": str(openmp),
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd="/",
    )
    assert done.stdout.splitlines()[-1:] == ["adapted"], done.stderr[-3000:]
