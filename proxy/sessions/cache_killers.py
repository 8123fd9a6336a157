"""Detector of cache killers: changes between two turns of a session that end the cached prefix early.

Each turn is compared after its answer, so no request waits for it. Chats, messages and responses are compared: the
prompt of a completion was rendered by the client. Prompts with media of over 8 KiB are not compared either.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from policies.row import Row
from proxy.request.parse import Parsed
from proxy.sessions.kept_turn import (
    FAR_BYTES,
    SAMPLE_BYTES,
    KeptTurn,
    Parting,
    TurnText,
    examined,
    extends,
    keep,
    lead_parting,
    parting,
    precedes,
    tools_of,
)
from proxy.sessions.killer_rules import REMEDIES, KillerRule, excerpt, rule_of
from proxy.sessions.turn_texts import turn_text
from proxy.settings.sessions import CacheKillerSettings

_CONVERSATIONS_PER_SESSION = 4
"""Clients send prompts of other kinds under the session's id: titles, summaries, sub-agents."""
_ROLE = b'"role"'


class CacheKiller(NamedTuple):
    """One finding."""

    request_id: str
    session_id: str
    at_unix_s: float
    model: str
    rule: KillerRule
    exact: bool
    """True if ``position_bytes`` is the first byte that differs; else the block of it begins there."""
    position_bytes: int
    """Position in the text of the conversation: system prompt or instructions, if not a message, then the messages."""
    position_tokens: int
    """Tokens before it, estimated."""
    message: int | None
    """Number of the message it is in, from 0; None: before the first, in a system prompt that is no message."""
    history_tokens: int
    """Tokens of the earlier prompt from the position on."""
    lost_tokens: int
    """Those of them that the engine did not have in its cache, if it reported that."""
    before: str
    was: str
    now: str


class _Match(NamedTuple):
    """The conversation that a turn continues."""

    kept: KeptTurn
    found: Parting | None
    """None: the turn extends it."""


class CacheKillers:
    """The last turns of sessions, least recently used first out, and the findings. O(log n) per turn that extends."""

    def __init__(self, settings: CacheKillerSettings, text_block_bytes: int) -> None:
        self._block_bytes = text_block_bytes
        self._sessions: OrderedDict[str, list[KeptTurn]] = OrderedDict()
        self._conversations = 0
        self._found: deque[CacheKiller] = deque(maxlen=settings.kept)
        self.compared = 0
        """Turns that were compared with an earlier one."""
        self.turns: Counter[KillerRule] = Counter()
        """Findings by rule."""
        self.lost_tokens: Counter[KillerRule] = Counter()
        self.apply(settings)

    def apply(self, settings: CacheKillerSettings) -> None:
        """Other bounds and rules of display, for turns from now on."""
        self._settings = settings
        if self._found.maxlen != settings.kept:
            self._found = deque(self._found, maxlen=settings.kept)
        if not settings.enabled:
            self._sessions.clear()
            self._conversations = 0
        self._evict()

    def __len__(self) -> int:
        return self._conversations

    def observe(self, parsed: Parsed, row: Row) -> CacheKiller | None:
        """Compare an answered request with its session's turns before, and keep it; returns a finding, if any."""
        turn = turn_text(parsed, self._block_bytes) if self._settings.enabled and row.session_id else None
        if turn is None or row.session_id is None:
            return None
        others = self._sessions.pop(row.session_id, [])
        match = _match(others, turn)
        prompt_tokens = row.prompt_tokens or 0
        if match is None:
            others.insert(0, keep(turn, prompt_tokens))
            self._conversations += 1
            if len(others) > _CONVERSATIONS_PER_SESSION:
                others.pop()
                self._conversations -= 1
            self._sessions[row.session_id] = others
            self._evict()
            return None
        self.compared += 1
        kept, found = match
        others.remove(kept)
        same_tools = found is None or found.same_tools
        moved = found is not None and found.same_tools and found.position >= SAMPLE_BYTES
        window_at = max(SAMPLE_BYTES, found.position - SAMPLE_BYTES // 2) if found and moved else kept.window_at
        earlier_bytes = kept.length - kept.lead if turn.continues else 0
        others.insert(0, keep(turn, prompt_tokens, window_at, kept.tools if same_tools else None, earlier_bytes))
        self._sessions[row.session_id] = others
        if found is None:
            return None
        killer = self._killer(turn, kept, found, row.request_id, row.session_id, row.actual_cached_tokens)
        if killer.history_tokens < self._settings.min_tokens:
            return None
        killer = killer._replace(at_unix_s=row.arrived_unix_s)
        self._found.append(killer)
        self.turns[killer.rule] += 1
        self.lost_tokens[killer.rule] += killer.lost_tokens
        return killer

    def explain(self, parsed: Parsed, session_id: str | None) -> dict[str, Any] | None:
        """The finding if this request were the session's next turn; nothing is kept. None: none, or unknown session."""
        turn = turn_text(parsed, self._block_bytes) if session_id else None
        if turn is None or session_id is None:
            return None
        match = _match(self._sessions.get(session_id, []), turn)
        if match is None or match.found is None:
            return None
        killer = self._killer(turn, match.kept, match.found, "", session_id, None)
        return _as_dict(killer) if killer.history_tokens >= self._settings.min_tokens else None

    def as_dict(self, limit: int, session_id: str | None = None, rule: str | None = None) -> dict[str, Any]:
        """Totals by rule and the newest findings, newest first; JSON-ready."""
        return {
            "enabled": self._settings.enabled,
            "redacted": not self._settings.show_text,
            "compared_turns": self.compared,
            "conversations": self._conversations,
            "rules": {
                each.value: {
                    "turns": self.turns[each],
                    "lost_tokens": self.lost_tokens[each],
                    "remedy": REMEDIES[each],
                }
                for each in KillerRule
                if self.turns[each]
            },
            "found": list(self._select(limit, session_id, rule)),
        }

    def _select(self, limit: int, session_id: str | None, rule: str | None) -> Iterator[dict[str, Any]]:
        for killer in reversed(self._found):
            if limit <= 0:
                return
            if session_id in {None, killer.session_id} and rule in {None, killer.rule.value}:
                limit -= 1
                yield _as_dict(killer)

    def _killer(
        self, turn: TurnText, kept: KeptTurn, found: Parting, request_id: str, session_id: str, cached: int | None
    ) -> CacheKiller:
        reachable = round(kept.prompt_tokens * found.position / max(1, kept.length))
        history = kept.prompt_tokens - reachable
        lost = history if cached is None else max(0, kept.prompt_tokens - max(cached, reachable))
        redacted = not self._settings.show_text
        before, now = excerpt(turn.text, found.position, redacted=redacted) if found.same_tools else ("", "")
        _, was = excerpt(found.was, found.was_at, redacted=redacted)
        roles = bytes(turn.text[turn.lead : found.position]).count(_ROLE)
        return CacheKiller(
            request_id,
            session_id,
            0.0,
            turn.scope[0],
            rule_of(found, turn.text, kept.block_bytes),
            found.exact,
            found.position,
            reachable,
            None if found.position < turn.lead else max(0, roles - 1),
            history,
            min(lost, history),
            before,
            was,
            now,
        )

    def _evict(self) -> None:
        while self._conversations > self._settings.conversations:
            _, gone = self._sessions.popitem(last=False)
            self._conversations -= len(gone)


def _match(others: list[KeptTurn], turn: TurnText) -> _Match | None:
    """The kept turn that this one continues: the longest that it extends, else the one of which it has most."""
    if turn.continues:
        before = [kept for kept in others if precedes(kept, turn)]
        kept = max(before, key=lambda each: each.chain[0], default=None)
        return None if kept is None else _Match(kept, lead_parting(kept, turn))
    extended = [kept for kept in others if extends(kept, turn)]
    if extended:
        return _Match(max(extended, key=lambda kept: kept.length), None)
    if not others:
        return None
    tools, text = tools_of(turn.tools), examined(turn)
    parted = [(kept, found) for kept in others if (found := parting(kept, turn, text, tools)) is not None]
    if not parted:
        moved = parting(others[0], turn, text, tools, FAR_BYTES)
        return _Match(others[0], moved) if moved is not None else None
    return _Match(*max(parted, key=lambda each: (each[1].found, each[1].position)))


def _as_dict(killer: CacheKiller) -> dict[str, Any]:
    return {**killer._asdict(), "rule": killer.rule.value}
