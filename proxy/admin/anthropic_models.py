"""Cards and lists of models in the shape of Anthropic's API, for requests with its header."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from proxy.clip import clip
from proxy.errors import RequestError

HEADER = "anthropic-version"
"""Anthropic's clients send it with every request; both APIs list models under the same path."""
_MOST = 1000
"""Largest page of Anthropic's API, and the default here: fleets serve few models, and not all clients turn pages."""


def anthropic_card(card: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's card with the fields of Anthropic's ``ModelInfo`` added."""
    length = card.get("max_model_len")
    return {
        **card,
        "type": "model",
        "display_name": card["id"],
        "created_at": _rfc3339(card.get("created")),
        "lifecycle": "active",
        "max_input_tokens": length,
        "max_tokens": length,
    }


def anthropic_page(cards: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """One page of the list: ``limit`` models after ``after_id``, or before ``before_id``.

    Raises:
        RequestError: 400: ``limit`` is out of bounds, or a cursor is no model's name.
    """
    limit = _limit(query.get("limit"))
    names = [card["id"] for card in cards]
    if (before := query.get("before_id")) is not None:
        end = _place(names, "before_id", before)
        start = max(end - limit, 0)
        more = start > 0
    else:
        after = query.get("after_id")
        start = 0 if after is None else _place(names, "after_id", after) + 1
        end = start + limit
        more = end < len(cards)
    page = [anthropic_card(card) for card in cards[start:end]]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return {"object": "list", "data": page, "has_more": more, "first_id": first, "last_id": last}


def _limit(given: str | None) -> int:
    if given is None:
        return _MOST
    if not (given.isascii() and given.isdigit() and len(given) <= 4 and 1 <= int(given) <= _MOST):
        raise RequestError(400, f"limit: must be an integer from 1 to {_MOST}, got {clip(given, 40)!r}", param="limit")
    return int(given)


def _place(names: Sequence[str], param: str, name: str) -> int:
    if name not in names:
        raise RequestError(400, f"{param}: no model is called `{clip(name, 200)}`", param=param)
    return names.index(name)


def _rfc3339(unix_s: object) -> str:
    """Time in RFC 3339; the epoch, as in Anthropic's API, if it is unknown."""
    try:
        at = datetime.fromtimestamp(unix_s if isinstance(unix_s, int | float) else 0, UTC)
    except (OverflowError, OSError, ValueError):
        at = datetime.fromtimestamp(0, UTC)
    return at.isoformat(timespec="seconds").replace("+00:00", "Z")
