"""Model of a body to pass on: read from JSON of any size and from forms as clients write them."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.errors import RequestError
from proxy.request.addressed import Addressed, AddressRules, address_steps
from proxy.request.aliases import ModelAliases
from proxy.request.steps import at_once

LARGE = 3 * 1024 * 1024
FORM = b"multipart/form-data; boundary=b"
ALIASES = {"alias": "the-model"}


def addressed(body: bytes, kind: bytes = b"", *, sole: str | None = None, required: bool = True) -> Addressed:
    return at_once(address_steps(body, kind, AddressRules(frozenset(), ModelAliases(ALIASES), lambda: sole, required)))


def form(*parts: tuple[bytes, bytes], boundary: bytes = b"b") -> bytes:
    pieces = [b"--" + boundary + b"\r\n" + head + b"\r\n\r\n" + value + b"\r\n" for head, value in parts]
    return b"".join(pieces) + b"--" + boundary + b"--\r\n"


@pytest.mark.parametrize("padding", [0, LARGE])
def test_a_json_body_stays_the_same_object(padding: int) -> None:
    body = b'{"pad":"' + b"x" * padding + b'","model":"m"}'
    found = addressed(body)
    assert found.model == "m"
    assert found.body is body


@pytest.mark.parametrize("padding", [0, LARGE])
def test_an_alias_is_replaced_and_nothing_else(padding: int) -> None:
    pad = "x" * padding
    body = '{"model":"alias","pad":"' + pad + '","number":1.500,"text":"\\u00e9"}'
    found = addressed(body.encode())
    assert found.model == "the-model"
    assert json.loads(found.body) == {"model": "the-model", "pad": pad, "number": 1.5, "text": "é"}
    assert b'1.500,"text":"\\u00e9"' in found.body


@pytest.mark.parametrize("body", [b"{}", b'{"model":null}', b'{"model":""}', b'{"input":"' + b"x" * LARGE + b'"}'])
def test_a_body_that_names_no_model(body: bytes) -> None:
    assert addressed(body, sole="only").model == "only"
    assert addressed(body, required=False).model is None
    with pytest.raises(RequestError, match="missing required field `model`") as refused:
        addressed(body)
    assert (refused.value.status, refused.value.param) == (400, "model")


NAMED: list[tuple[bytes, bytes]] = [
    (b'Content-Disposition: form-data; name="model"', FORM),
    (b"content-disposition: form-data; name=model", FORM),
    (b'CONTENT-DISPOSITION:form-data;name="model"\r\nContent-Type: text/plain', FORM),
    (b'Content-Type: text/plain\r\nContent-Disposition: form-data; name="model"', b'Multipart/Form-Data; boundary="b"'),
    (b'Content-Disposition: form-data; name="model"', b"multipart/form-data; charset=utf-8; boundary=b"),
]


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize(("head", "kind"), NAMED)
def test_the_model_of_a_form_wherever_it_is(head: bytes, kind: bytes, last: bool) -> None:
    sound = b'\r\n--\r\n--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nfalse\r\n' * 1000
    file = (b'Content-Disposition: form-data; name="file"; filename="a.wav"', sound)
    other = (b'Content-Disposition: form-data; name="model_size"', b"large")
    for value, model in ((b"m", "m"), (b" m \r\n", "m"), ("modèle".encode(), "modèle"), (b"alias", "the-model")):
        parts = [file, other, (head, value)] if last else [(head, value), file, other]
        body = form(*parts)
        found = addressed(body, kind)
        assert found.model == model
        assert found.body == (form(*[(h, v.replace(b"alias", b"the-model")) for h, v in parts]))


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (form((b'Content-Disposition: form-data; name="file"', b"x")), FORM),
        (form((b'Content-Disposition: form-data; name="model"', b"")), FORM),
        (form((b'Content-Disposition: form-data; name="model"', b"m")), b"multipart/form-data"),
        (form((b'Content-Disposition: form-data; name="model"', b"m")), b"multipart/mixed; boundary=b"),
        (b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm', FORM),
        (b'--b\r\nContent-Disposition: form-data; name="model"', FORM),
        (b"", FORM),
    ],
)
def test_a_form_without_a_readable_model_may_go_anywhere(body: bytes, kind: bytes) -> None:
    assert addressed(body, kind) == (None, body)
    assert addressed(body, kind, sole="only") == ("only", body)


def test_names_that_are_too_long_are_refused() -> None:
    name = b"m" * 257
    for body, kind in ((b'{"model":"' + name + b'"}', b""), (form((NAMED[0][0], name)), FORM)):
        with pytest.raises(RequestError, match="longer than 256"):
            addressed(body, kind)


PIECES = [b"--b", b"\r\n", b"\r\n\r\n", b"--", NAMED[0][0], b"m", b"\x00\xff", b'"', b"{", b"}", b'"model":', b"[1]"]
KINDS = [FORM, b"multipart/form-data; boundary=", b"application/json", b"", b"\xff"]


@settings(max_examples=120, deadline=None, derandomize=True, database=None)
@given(st.lists(st.sampled_from(PIECES)), st.sampled_from(KINDS))
def test_any_body_is_read_or_refused(pieces: list[bytes], kind: bytes) -> None:
    body = b"".join(pieces)
    with contextlib.suppress(RequestError):
        assert addressed(body, kind).body == body
