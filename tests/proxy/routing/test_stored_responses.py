"""The engine of a stored response: bounded in number and time, lost with the engine."""

from __future__ import annotations

import json

import pytest

from proxy.errors import RequestError
from proxy.fleet.instances import Instance, Instances
from proxy.fleet.models import ModelList
from proxy.request.parse import Endpoint, Prompt
from proxy.routing.stored_responses import StoredResponses
from proxy.settings import HealthSettings, InstanceSettings, ResponseSettings
from tests.proxy.request.parsing import parse_request

PROMPT = Prompt([1, 2, 3], 0, 3 * 1024)


def fleet(*names: str) -> Instances:
    instances = Instances(
        tuple(InstanceSettings(name=name, url=f"http://{name}:1") for name in names), HealthSettings()
    )
    for instance in instances:
        instance.healthy, instance.started_unix_s = True, 5.0
    return instances


def stored(instances: Instances, capacity: int = 100, ttl_s: float = 60.0) -> StoredResponses:
    return StoredResponses(ResponseSettings(capacity=capacity, ttl_s=ttl_s), instances, 1024)


def code_of(responses: StoredResponses, response_id: str, now_s: float = 0.0) -> str | None:
    with pytest.raises(RequestError) as refused:
        responses.instance_of(response_id, "response_id", now_s)
    return refused.value.code


def test_the_oldest_are_dropped_above_the_capacity() -> None:
    instances = fleet("a")
    responses = stored(instances, capacity=2)
    for number in range(4):
        responses.learn(f"resp_{number}", instances["a"], PROMPT, 0.0)
    assert len(responses) == 2
    assert code_of(responses, "resp_1") == "response_not_found"
    assert responses.instance_of("resp_3", "response_id", 0.0) is instances["a"]


def test_a_response_is_forgotten_after_its_time() -> None:
    instances = fleet("a")
    responses = stored(instances, ttl_s=60.0)
    responses.learn("resp_1", instances["a"], PROMPT, 0.0)
    assert responses.instance_of("resp_1", "response_id", 59.0) is instances["a"]
    assert code_of(responses, "resp_1", 60.0) == "response_not_found"
    responses.learn("resp_2", instances["a"], PROMPT, 61.0)
    assert len(responses) == 1


@pytest.mark.parametrize("response_id", ["", "a/b", "a?b", "x" * 257, "é", "a b"])
def test_ids_that_no_path_can_name_are_not_kept(response_id: str) -> None:
    instances = fleet("a")
    responses = stored(instances)
    responses.learn(response_id, instances["a"], PROMPT, 0.0)
    assert len(responses) == 0


def test_states_of_the_engine_have_errors_of_their_own() -> None:
    instances = fleet("a", "b")
    responses = stored(instances)
    responses.learn("resp_1", instances["a"], PROMPT, 0.0)
    instances["a"].draining = True
    assert code_of(responses, "resp_1") == "response_unavailable"
    instances["a"].draining, instances["a"].healthy = False, False
    assert code_of(responses, "resp_1") == "response_unavailable"
    instances["a"].healthy, instances["a"].started_unix_s = True, 6.0
    assert code_of(responses, "resp_1") == "response_lost"
    instances["a"].started_unix_s = 5.0
    assert responses.instance_of("resp_1", "response_id", 0.0) is instances["a"]
    instances.add(Instance(InstanceSettings(name="a", url="http://elsewhere:1")))
    assert code_of(responses, "resp_1") == "response_lost"
    instances.remove("a")
    assert code_of(responses, "resp_1") == "response_lost"


def test_a_follow_up_has_the_stored_blocks_before_its_own() -> None:
    instances = fleet("a", "b")
    responses = stored(instances)
    responses.learn("resp_1", instances["b"], PROMPT, 0.0)
    body = b'{"model":"m","input":"' + b"x" * 2500 + b'","previous_response_id":"resp_1"}'
    parsed = parse_request(Endpoint.RESPONSES, body, 16, 1024)
    continued = responses.continued(parsed, 0.0)
    assert continued.only == "b"
    assert continued.prompt.hashes[:3] == PROMPT.hashes
    assert len(continued.prompt.hashes) == 5
    assert continued.prompt.text_bytes == 3 * 1024 + parsed.prompt.text_bytes
    assert continued.prompt.continued
    plain = parse_request(Endpoint.RESPONSES, b'{"model":"m","input":"x"}', 16, 1024)
    assert responses.continued(plain, 0.0) is plain


def test_a_follow_up_with_a_model_of_other_engines_names_those_of_its_engine() -> None:
    instances = fleet("a", "b")
    responses = stored(instances)
    responses.learn("resp_1", instances["a"], PROMPT, 0.0)
    body = b'{"model":"beta","input":"x","previous_response_id":"resp_1"}'
    parsed = parse_request(Endpoint.RESPONSES, body, 16, 1024)
    assert responses.continued(parsed, 0.0).only == "a", "its models are unknown"
    instances.listed("a", ModelList())
    assert responses.continued(parsed, 0.0).only == "a", "a restarted engine has not listed its models"
    instances.listed("a", ModelList(names=frozenset({"alpha", *(f"lora-{number}" for number in range(9))})))
    instances.listed("b", ModelList(names=frozenset({"beta"})))
    with pytest.raises(RequestError) as refused:
        responses.continued(parsed, 0.0)
    error = refused.value
    assert (error.status, error.code, error.param) == (400, "response_of_other_model", "model")
    assert "(alpha, lora-0, lora-1, lora-2, lora-3, …)" in error.message
    assert "'resp_1'" in error.message
    assert "'beta'" in error.message
    instances["a"].healthy = False
    with pytest.raises(RequestError) as refused:
        responses.continued(parsed, 0.0)
    assert (refused.value.status, refused.value.code) == (503, "response_unavailable")
    instances["a"].healthy = True
    instances.listed("a", ModelList(names=frozenset({"alpha", "beta"})))
    assert responses.continued(parsed, 0.0).only == "a"


def test_a_conversation_counts_instructions_and_tools_once() -> None:
    instances = fleet("a")
    responses = stored(instances)
    lead: dict[str, object] = {"model": "m", "instructions": "i" * 20_000, "tools": [{"name": "t" * 10_000}]}
    first = parse_request(Endpoint.RESPONSES, json.dumps({**lead, "input": "x" * 300}).encode(), 16, 1024)
    responses.learn("resp_0", instances["a"], first.prompt, 0.0)
    before = first.prompt
    for number in range(20):
        body = {**lead, "input": "y" * 300, "previous_response_id": f"resp_{number}"}
        parsed = parse_request(Endpoint.RESPONSES, json.dumps(body).encode(), 16, 1024)
        prompt = responses.continued(parsed, 0.0).prompt
        assert prompt.text_bytes == before.text_bytes + 301
        # Inputs are shorter than a block, and the blocks keep up with the text.
        assert len(prompt.hashes) == prompt.text_bytes // 1024
        assert prompt.hashes[: len(before.hashes)] == before.hashes
        responses.learn(f"resp_{number + 1}", instances["a"], prompt, 0.0)
        before = prompt


def test_two_follow_ups_of_one_response_share_its_blocks_only() -> None:
    instances = fleet("a")
    responses = stored(instances)
    responses.learn("resp_1", instances["a"], PROMPT, 0.0)
    chains = []
    for letter in "xy":
        body = json.dumps({"model": "m", "input": letter * 3000, "previous_response_id": "resp_1"}).encode()
        chains.append(responses.continued(parse_request(Endpoint.RESPONSES, body, 16, 1024), 0.0).prompt.hashes)
    assert chains[0][:3] == chains[1][:3] == PROMPT.hashes
    assert not set(chains[0][3:]) & set(chains[1][3:])
