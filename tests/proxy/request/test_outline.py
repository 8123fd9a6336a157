"""Members found in slices compared with those of a decoder, for any JSON and any size of slice."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.errors import RequestError
from proxy.request import outline
from proxy.request.outline import TooManyMembersError, fields_of, members_of
from proxy.request.steps import at_once

TEXTS = st.text(alphabet=st.sampled_from('ab\\"[]{},: \n\t/é世\0'), max_size=12)
VALUES = st.recursive(
    TEXTS | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=10,
)
SLICES = st.integers(1, 9)


@settings(deadline=None, max_examples=80)
@given(st.dictionaries(TEXTS, VALUES, min_size=1, max_size=5), SLICES, st.integers(0, 3), st.booleans())
def test_fields_are_those_of_a_decoder(given: dict[str, Any], size: int, indent: int, escaped: bool) -> None:
    body = b" \n" * indent + json.dumps(given, indent=indent or None, ensure_ascii=escaped).encode() + b"\n" * indent
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outline, "SLICE_BYTES", size)
        found = at_once(fields_of(body))
    assert found == msgspec.json.decode(body, type=dict[str, msgspec.Raw])


@settings(deadline=None, max_examples=50)
@given(st.lists(VALUES, max_size=6), SLICES, st.integers(0, 3))
def test_items_are_those_of_a_decoder(given: list[Any], size: int, indent: int) -> None:
    text = json.dumps(given, indent=indent or None).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outline, "SLICE_BYTES", size)
        found = at_once(members_of(memoryview(text), 6))
        assert [json.loads(bytes(item)) for item in found] == given
        if given:
            with pytest.raises(TooManyMembersError):
                at_once(members_of(memoryview(text), len(given) - 1))


def test_the_last_of_repeated_names_counts_in_any_spelling() -> None:
    body = rb'{"a": null, "kv_transfer_\u0070arams": 1, "a": [2], "kv_transfer_params": {"x": 3}}'
    assert {name: bytes(raw) for name, raw in at_once(fields_of(body)).items()} == {
        "a": b"[2]",
        "kv_transfer_params": b'{"x": 3}',
    }


@pytest.mark.parametrize(
    "body",
    [
        *(
            b"",
            b" ",
            b"[]",
            b"5",
            b'{"a":1',
            b'{"a":1}}',
            b'{"a":1} x',
            b'{"a"}',
            b'{"a":}',
            b"{,}",
            b'{"a":1,}',
            b"{a:1}",
        ),
        *(b'{"a:1}', b'{"a":"\\"}', "{'a':1}".encode("utf-16"), b'{"a":' + b"[" * 2000 + b"]" * 2000 + b"}"),
        b'{"\\ud800":1}',
    ],
    ids=lambda body: body[:12],
)
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        at_once(fields_of(body))
    assert caught.value.status == 400


def test_too_many_fields_are_refused() -> None:
    with pytest.raises(RequestError, match="more than 1000 fields"):
        at_once(fields_of(json.dumps({str(number): 1 for number in range(1001)}).encode()))


def test_a_list_of_many_items_is_refused_within_its_first_slice() -> None:
    steps = members_of(memoryview(b"[" + b"[1]," * 1_000_000 + b"[1]]"), 1024)
    with pytest.raises(TooManyMembersError):
        next(steps)
