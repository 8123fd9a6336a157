"""The generation endpoints of our OpenAPI document, restricted to requests that a stub serves quickly."""

from __future__ import annotations

from typing import Any

from proxy.admin.openapi import generation_paths


def generation_schema(model: str) -> dict[str, Any]:
    """An OpenAPI 3.1 document of the completion endpoints, for the one model that is served."""
    paths = {path: methods for path, methods in generation_paths().items() if path.endswith("/completions")}
    for path in paths.values():
        body = path["post"]["requestBody"]["content"]["application/json"]["schema"]
        body["properties"] = {
            **body["properties"],
            "model": {"const": model},
            "max_tokens": {"type": ["integer", "null"], "minimum": 1, "maximum": 100_000},
            "n": {"type": ["integer", "null"], "minimum": 1, "maximum": 4},
        }
    return {"openapi": "3.1.0", "info": {"title": "generation", "version": "1"}, "paths": paths}
