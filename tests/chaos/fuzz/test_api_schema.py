"""Valid and invalid requests generated from the OpenAPI documents: no 5xx of our own, all errors in OpenAI's shape."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from proxy.admin.openapi import generation_paths
from tests.chaos.rig.generation_schema import generation_schema
from tests.chaos.rig.profiles import EXAMPLES
from tests.chaos.rig.served import AUTHORIZATION, Served
from tests.chaos.rig.wire import MODEL

EVERYWHERE = {400, 401, 403, 404, 405, 409, 413, 415, 422}
"""Errors that any operation may return."""
UNAVAILABLE = {("GET", "/ready"), ("POST", "/explain"), ("GET", "/ping"), ("POST", "/ping"), ("GET", "/breakdown")}
"""Operations that may return 503: without a healthy instance, and a stream of rows, which would not end."""

drawn = settings(
    max_examples=EXAMPLES or 6,
    derandomize=not EXAMPLES,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def check_answer(method: str, path: str, answer: Any) -> None:
    status = answer.status_code
    if status < 400:
        return
    assert status in EVERYWHERE or (status == 503 and (method, path) in UNAVAILABLE), (status, answer.text[:500])
    if method == "HEAD":
        return
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]


CONTROL = [
    *(("GET", "/health"), ("GET", "/ready"), ("GET", "/stats"), ("GET", "/metrics"), ("GET", "/v1/models")),
    *(("GET", "/v1/models/{model_id}"), ("GET", "/version"), ("GET", "/load"), ("GET", "/ping"), ("POST", "/ping")),
    *(("GET", "/instances"), ("POST", "/instances"), ("GET", "/breakdown"), ("GET", "/policy"), ("PUT", "/policy")),
    *(("GET", "/admission"), ("PUT", "/admission"), ("GET", "/shadow"), ("PUT", "/shadow"), ("GET", "/cache-killers")),
    *(("GET", "/meters"), ("GET", "/replicas"), ("POST", "/explain"), ("POST", "/reload")),
    *(("GET", "/instances/{name}"), ("PUT", "/instances/{name}")),
    *(("DELETE", "/instances/{name}"), ("POST", "/instances/{name}/drain"), ("POST", "/instances/{name}/undrain")),
]


def draw_and_check(schema: Any, method: str, path: str, mode: GenerationMode) -> None:
    operation = schema[path][method]
    seen = []

    @drawn
    @given(operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        answer = case.call(headers=AUTHORIZATION, timeout=30)
        seen.append(answer.status_code)
        check_answer(method, path, answer)

    check()
    assert seen


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["valid", "invalid"])
@pytest.mark.parametrize(("method", "path"), CONTROL, ids=lambda part: part.strip("/"))
def test_control_endpoints(served: Served, method: str, path: str, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json", headers=AUTHORIZATION)
    operation = schema[path][method]
    if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query):
        pytest.skip("nothing in it can be invalid")
    draw_and_check(schema, method, path, mode)
    assert httpx.get(f"{served.url}/health", trust_env=False).status_code == 200


def test_every_control_endpoint_is_in_the_list_above(served: Served) -> None:
    paths = httpx.get(f"{served.url}/openapi.json", headers=AUTHORIZATION, trust_env=False).json()["paths"]
    known = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert {one for one in known if one[1] not in generation_paths()} == set(CONTROL)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["valid", "invalid"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_generation_endpoints(served: Served, path: str, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_dict(generation_schema(MODEL))
    schema.config.update(base_url=served.url)
    draw_and_check(schema, "POST", path, mode)


@drawn
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"]),
    path=st.sampled_from(
        sorted({path for _, path in CONTROL} | {"/v1/completions", "/", "/docs", "/%00", "/..", "//"})
    ),
    body=st.binary(max_size=60),
    kind=st.sampled_from(["application/json", "text/plain", "multipart/form-data", "\xff", ""]),
)
def test_any_method_on_any_path_with_any_body(served: Served, method: str, path: str, body: bytes, kind: str) -> None:
    headers = {**AUTHORIZATION, "content-type": kind.encode("latin-1")}
    answer = httpx.request(method, served.url + path, content=body, headers=headers, trust_env=False, timeout=30)  # type: ignore[arg-type]
    assert answer.status_code < 500 or (answer.status_code == 503 and (method, path) in UNAVAILABLE), answer.text
