"""Size of an engine's KV pool, as the engine reports it."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families

_TIMEOUT_S = 5.0
_CACHE_INFO = "vllm:cache_config_info"


async def kv_capacity_tokens(url: str) -> int | None:
    """KV pool of an engine in tokens, from the cache configuration in its ``/metrics``; None where it is missing."""
    try:
        async with httpx.AsyncClient(timeout=_TIMEOUT_S) as client:
            response = await client.get(f"{url}/metrics")
            response.raise_for_status()
        for family in text_string_to_metric_families(response.text):
            for sample in family.samples:
                if sample.name == _CACHE_INFO:
                    return int(sample.labels["num_gpu_blocks"]) * int(sample.labels["block_size"])
    except (httpx.HTTPError, ValueError, KeyError):
        return None
    return None
