"""Session accounts that are fed by session and tokens, without a routing step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from policies.admission.accounts import SessionAccounts
from policies.admission.turns import Turn
from policies.costs.formulas import PrefillModel
from policies.types import RequestView

MODEL = PrefillModel()


class Sessions(SessionAccounts):
    """Accounts of sessions whose requests are numbered; ``end`` ends the first of a session that is in flight."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._turns: defaultdict[str, list[Turn]] = defaultdict(list)
        self._number = 0

    def begin(self, name: str, prompt_tokens: int, now_s: float, instance: str = "", *, single: bool = False) -> None:
        """A request of the session is sent; ``single``: it has none, and ``name`` is its own."""
        self._number += 1
        request_id, session = (name, None) if single else (f"{name}-{self._number}", name)
        request = RequestView(request_id, prompt_tokens, session_id=session)
        self._turns[name].append(self.sent(request, instance, 0, MODEL, now_s))

    def end(self, name: str, now_s: float) -> None:
        """A request of the session has ended."""
        self.ended(self._turns[name].pop(0), now_s, None, MODEL)

    def computed_before(self, session: str, request_id: str, hashes: Sequence[int], block_tokens: float) -> int:
        """Tokens of a prompt that is sent now which had been computed for its session before."""
        request = RequestView(request_id, round(len(hashes) * block_tokens), tuple(hashes), block_tokens, session)
        return self.sent(request, "", 1 << 40, MODEL, 0.0).before_tokens
