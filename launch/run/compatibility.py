"""Compatibility of engines that may exchange KV, by the KV geometry that each reports, peers included.

vLLM 0.18.1 does not compare geometries before a pull, and answers 200 with garbage after one that does not fit. The
fleet file is already checked for compatible settings; this compares the running engines, and peers started elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import httpx
from prometheus_client.parser import text_string_to_metric_families

_INFO = "vllm:cache_config_info"
_COMPARED = ("block_size", "cache_dtype", "prefix_caching_hash_algo")
"""Labels in which engines that exchange KV must agree."""


async def incompatible_engines(urls: Mapping[str, str], client: httpx.AsyncClient) -> tuple[list[str], list[str]]:
    """Compare engines by the KV cache configuration in their ``/metrics``.

    Args:
        urls: base URL of every engine that has a KV connector, by name.
        client: its timeout bounds each request.

    Returns:
        Sentences on engines that differ, and sentences on engines that do not report it.
    """
    reported = await asyncio.gather(*(_geometry(url, client) for url in urls.values()))
    known = {name: labels for name, labels in zip(urls, reported, strict=True) if labels}
    silent = [
        f"{name} ({urls[name]}) does not report its KV cache configuration; make sure that it matches the others"
        for name in urls
        if name not in known
    ]
    incompatible = []
    names = list(known)
    for name in names[1:]:
        for label in _COMPARED:
            one, other = known[names[0]].get(label), known[name].get(label)
            if one is not None and other is not None and one != other:
                incompatible.append(
                    f"{label} is {one} on {names[0]} and {other} on {name}; KV pulled between them is garbage"
                )
    return incompatible, silent


async def _geometry(url: str, client: httpx.AsyncClient) -> dict[str, str]:
    try:
        response = await client.get(f"{url}/metrics")
        response.raise_for_status()
        for family in text_string_to_metric_families(response.text):
            for sample in family.samples:
                if sample.name == _INFO:
                    return dict(sample.labels)
    except (httpx.HTTPError, ValueError):
        return {}
    return {}
