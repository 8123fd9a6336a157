"""Model that a request to pass on is for: a field of its JSON, or of its form. Nothing else of the body is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Set
from typing import Any, NamedTuple, cast

import msgspec

from proxy.errors import RequestError
from proxy.request.aliases import ModelAliases, model_of_none
from proxy.request.bodies import invalid_json, with_model
from proxy.request.fields import REFUSED_FIELDS, check_fields
from proxy.request.outline import fields_of
from proxy.request.steps import Steps

_DECODED_BYTES = 2 * 1024 * 1024
_MAX_MODEL_NAME = 256
_MAX_PARTS = 100
_MAX_PART_HEAD_BYTES = 8192
_BOUNDARY = re.compile(rb'multipart/form-data\s*;(?:.*;)?\s*boundary=(?:"([^"\r\n]{1,200})"|([^\s;"]{1,200}))', re.I)
_MODEL_NAMES = frozenset((b'name="model"', b"name=model"))


class Addressed(NamedTuple):
    """A body to pass on."""

    model: str | None
    """None: any instance may answer."""
    body: bytes
    """As it came, unless it names an alias."""


class AddressRules(NamedTuple):
    """Settings of reading such bodies."""

    allowed_fields: Set[str]
    """Guarded fields that clients may send."""
    aliases: ModelAliases
    sole_model: Callable[[], str | None]
    """Returns the model of requests that name none; None: several are served."""
    model_required: bool = True
    """JSON must name a model if several are served; a form need not."""


_NOTHING = msgspec.Raw()
_GUARDED = tuple(sorted(REFUSED_FIELDS))
_Fields = msgspec.defstruct(
    "_Fields", [("model", str | None, None), *((name, msgspec.Raw, _NOTHING) for name in _GUARDED)]
)
_decode = msgspec.json.Decoder(cast(type[Any], _Fields)).decode
_decode_model = msgspec.json.Decoder(str | None).decode


def address_steps(body: bytes, content_type: bytes, rules: AddressRules) -> Steps[Addressed]:
    """Read the model of a body: a form's field, or JSON whatever type is given; steps end only in large bodies.

    Raises:
        RequestError: 400 with the problem.
    """
    if content_type.lower().startswith(b"multipart/"):
        return _of_form(body, content_type, rules)
    given: str | None
    try:
        if len(body) > _DECODED_BYTES:
            fields = yield from fields_of(body)
            check_fields(fields, rules.allowed_fields)
            given = _decode_model(fields["model"]) if "model" in fields else None
        else:
            decoded = _decode(body)
            guarded = {name: raw for name in _GUARDED if (raw := getattr(decoded, name)) != _NOTHING}
            if guarded:
                check_fields(guarded, rules.allowed_fields)
            given = decoded.model
    except msgspec.ValidationError as error:
        raise RequestError(400, f"invalid body: {error}", param="model", code="invalid_type") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid_json(body, error) from error
    if not given:
        sole_model = rules.sole_model()
        return Addressed(model_of_none(sole_model) if rules.model_required else sole_model, body)
    _check_length(given)
    model = rules.aliases.get(given)
    if model is not None:
        return Addressed(model, (yield from with_model(body, model)))
    return Addressed(given, body)


def _of_form(body: bytes, content_type: bytes, rules: AddressRules) -> Addressed:
    place = _model_part(body, content_type)
    given = body[place].decode("utf-8", "replace").strip() if place is not None else ""
    if place is None or not given:
        return Addressed(rules.sole_model(), body)
    _check_length(given)
    model = rules.aliases.get(given)
    if model is not None:
        return Addressed(model, b"".join((body[: place.start], model.encode(), body[place.stop :])))
    return Addressed(given, body)


def _model_part(body: bytes, content_type: bytes) -> slice | None:
    """Place of the value of the field ``model``; None: the form has none, or is not readable."""
    match = _BOUNDARY.match(content_type)
    if match is None:
        return None
    delimiter = b"--" + (match[1] or match[2])
    at = body.find(delimiter)
    for _ in range(_MAX_PARTS):
        if at < 0:
            return None
        start = at + len(delimiter)
        head_end = body.find(b"\r\n\r\n", start, start + _MAX_PART_HEAD_BYTES)
        if head_end < 0:
            return None
        at = body.find(b"\r\n" + delimiter, head_end + 2)
        if at >= 0 and _is_model(body[start:head_end]):
            return slice(head_end + 4, at)
        at = at + 2 if at >= 0 else at
    return None


def _is_model(head: bytes) -> bool:
    for line in head.split(b"\r\n"):
        name, *parameters = line.split(b";")
        if name.lower().startswith(b"content-disposition:"):
            return any(each.strip() in _MODEL_NAMES for each in parameters)
    return False


def _check_length(model: str) -> None:
    if len(model) > _MAX_MODEL_NAME:
        raise RequestError(400, f"'model' is longer than {_MAX_MODEL_NAME} characters", param="model")
