"""Hand-off parameters of each connector, and parameters that are never sent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from policies.types import Connector
from proxy.handoff.connectors import DIALECTS, MooncakeDialect, NixlDialect
from proxy.request.bodies import decode_leg, prefill_leg, transfer_params_of

ANSWERED = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "e",
    "remote_block_ids": [4, 5, 6],
    "remote_host": "10.0.0.1",
    "remote_port": 20_001,
    "tp_size": 2,
    "of_a_later_version": {"x": [1]},
}


def test_every_connector_has_a_dialect() -> None:
    assert set(DIALECTS) == set(Connector)


def test_mooncake_names_the_transfer_on_both_legs() -> None:
    dialect = MooncakeDialect()
    assert dialect.prefill_params("x-1")["transfer_id"] == "x-1"
    assert dialect.decode_params("x-1", None, "engine", "http://b:1") == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": "x-1",
        "remote_engine_id": "engine",
        "remote_bootstrap_addr": "http://b:1",
    }


@pytest.mark.parametrize(
    ("engine_id", "bootstrap_url"), [(None, "http://b:1"), ("", "http://b:1"), ("e", None), ("e", "")]
)
@pytest.mark.parametrize("answered", [None, ANSWERED])
def test_mooncake_never_builds_a_d_leg_without_engine_id_and_bootstrap(
    engine_id: str | None, bootstrap_url: str | None, answered: dict[str, Any] | None
) -> None:
    with pytest.raises(ValueError, match="engine id or bootstrap address is unknown"):
        MooncakeDialect().decode_params("x-1", answered, engine_id, bootstrap_url)


def test_nixl_forwards_exactly_what_p_answered() -> None:
    assert NixlDialect().decode_params("x-1", ANSWERED, None, None) == ANSWERED
    assert NixlDialect().prefill_params("x-1") == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }


@pytest.mark.parametrize("answered", [None, {}, {"remote_host": "h"}, {**ANSWERED, "remote_block_ids": []}])
def test_nixl_refuses_an_answer_without_block_ids(answered: dict[str, Any] | None) -> None:
    with pytest.raises(ValueError, match="no kv_transfer_params with remote_block_ids"):
        NixlDialect().decode_params("x-1", answered, "e", "http://b:1")


@pytest.mark.parametrize(
    ("answer", "params"),
    [
        (json.dumps({"id": "x", "choices": [], "kv_transfer_params": ANSWERED}).encode(), ANSWERED),
        (b'{"id": "x", "kv_transfer_params": null}', None),
        (b'{"id": "x"}', None),
        (b'{"kv_transfer_params": [1]}', None),
        (b"not json", None),
        (b"", None),
    ],
)
def test_the_answer_of_p_is_read_for_its_parameters(answer: bytes, params: dict[str, Any] | None) -> None:
    assert transfer_params_of(answer) == params


def test_legs_change_only_what_a_hand_off_needs() -> None:
    body = (
        b'{"model": "m", "prompt": [1, 2], "max_tokens": 9, "stream": true, "stream_options": {}, '
        b'"seed": 7, "x": {"y": 1.50}}'
    )
    p = json.loads(prefill_leg(body, {"t": 1}))
    assert p == {
        **{key: value for key, value in json.loads(body).items() if key != "stream_options"},
        "max_tokens": 1,
        "min_tokens": 1,
        "stream": False,
        "kv_transfer_params": {"t": 1},
    }
    assert json.loads(decode_leg(body, {"t": 2})) == {**json.loads(body), "kv_transfer_params": {"t": 2}}
    assert b"1.50" in decode_leg(body, {})  # values are passed on as written
