"""Every figure of ``GET /stats`` is joined over the workers by a rule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from proxy.gather.rules import READS
from tests.proxy.access.test_keys import ADMIN, KEY, OK, bearer, entry, started
from tests.proxy.conftest import StartProxy
from tests.proxy.stub_engine import StubEngine

JOIN = READS["/stats"]
SAME_WITH_ALL = ("index.block_tokens", "tenants.one.key.weight", "tenants.one.key.priority")
"""Settings: the first worker's are those of all."""
ESTIMATES = ("bytes_per_token.",)
"""Learned by each worker, not counted."""


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Path and value of every number."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from numbers(each, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for place, each in enumerate(value):
            yield from numbers(each, f"{path}.{place}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value


def raised(value: Any) -> Any:
    """The same answer with every number larger by 1000."""
    if isinstance(value, dict):
        return {key: raised(each) for key, each in value.items()}
    if isinstance(value, list):
        return [raised(each) for each in value]
    return value + 1000 if isinstance(value, int | float) and not isinstance(value, bool) else value


async def answer_of(start_proxy: StartProxy) -> dict[str, Any]:
    """An answer that has predictions, and a key with refusals."""
    keys = {"client": [entry("one", KEY, max_requests_per_min=2, max_sessions=9)], "admin": [entry("root", ADMIN)]}
    proxy = await started(start_proxy, engines=[StubEngine(cached_tokens=2)], keys=keys)
    statuses = [
        (await proxy.client.post("/v1/completions", json=OK, headers=bearer(KEY))).status_code for _ in range(3)
    ]
    assert statuses == [200, 200, 429]
    return await proxy.settled()


async def test_no_figure_is_that_of_the_worker_that_happens_to_be_first(start_proxy: StartProxy) -> None:
    answer = await answer_of(start_proxy)
    assert answer["tenants"]["one"]["key"]["refused"]
    assert answer["prediction_error"]["instances"]
    one = dict(numbers(JOIN([answer, raised(answer)])))
    other = dict(numbers(JOIN([raised(answer), answer])))
    assert one.keys() == dict(numbers(answer)).keys()
    first = {path for path, value in one.items() if other[path] != value and not path.startswith(ESTIMATES)}
    assert first == set(SAME_WITH_ALL)


async def test_refusals_of_keys_and_compared_predictions_are_summed(start_proxy: StartProxy) -> None:
    answer = await answer_of(start_proxy)
    joined = JOIN([answer, answer])
    assert joined["tenants"]["one"]["key"]["refused"] == {"max_requests_per_min": 2}
    assert answer["prediction_error"]["used"]["shadow"] == 2
    for path, value in numbers(answer["prediction_error"]):
        assert dict(numbers(joined["prediction_error"]))[path] == 2 * value


def test_parts_of_a_divided_fleet_are_joined_by_their_instances() -> None:
    """Each worker counts the contexts that it has heard of, the first one perhaps fewest, and its own held requests."""
    small, large = ({"instances": [name], "held": 1, "active_tokens": 10} for name in ("a", "b"))
    more = large | {"held": 30, "active_tokens": 20}
    joined = JOIN([{"holding": {"parts": [small, large]}}, {"holding": {"parts": [more, small]}}])
    assert joined["holding"]["parts"] == [small | {"held": 2}, large | {"held": 31, "active_tokens": 20}]
