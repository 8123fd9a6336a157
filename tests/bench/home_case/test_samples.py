"""Samples of the proxy: what ends them is reported."""

from __future__ import annotations

import asyncio
import os
from importlib import metadata

import pytest

from bench.figures.machine import machine
from bench.home_case.samples import ProxySampler


async def test_a_sampler_that_fails_says_so_when_it_is_left() -> None:
    asked = asyncio.Event()

    async def broken() -> None:
        asked.set()
        raise TypeError("no such gauge")

    async with ProxySampler(os.getpid(), broken) as sampler:
        await asyncio.wait_for(asked.wait(), 30)
        await asyncio.sleep(0)
    assert sampler.problem == "sampling ended early: TypeError: no such gauge"


async def test_a_sampler_that_is_left_in_time_has_no_problem() -> None:
    asked = asyncio.Event()

    async def gauges() -> dict[str, float]:
        asked.set()
        return {"held": 1.0}

    async with ProxySampler(os.getpid(), gauges) as sampler:
        await asyncio.wait_for(asked.wait(), 30)
        await asyncio.sleep(0)
    assert sampler.problem == ""
    assert sampler.samples[0].held == 1.0


def test_a_source_tree_that_is_not_installed_is_described_too(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == "warmroute":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    assert machine()["warmroute"] == ""
