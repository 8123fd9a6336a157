"""Figures of one shadow, and the newest live decisions beside the shadows' ones."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from policies.admission.base import Admit, Hold
from policies.shadow import HELD, SENT, ShadowVerdict
from policies.types import Decision, PolicyPart

KEPT = 50
"""Newest decisions kept."""


@dataclass(slots=True)
class ShadowFigures:
    """Totals of one shadow since it was configured; each total only grows."""

    part: PolicyPart
    label: str
    params: dict[str, Any]
    agreed: int = 0
    differed: int = 0
    live_worse_s: float = 0.0
    """Regret of decisions whose live choice was estimated to cost more, seconds."""
    live_better_s: float = 0.0
    """The same where the shadow's choice was estimated to cost more."""
    given_away_by_live: int = 0
    """Cached tokens that the shadow's D had in excess of the live D."""
    given_away_by_shadow: int = 0
    """Cached tokens that the live D had in excess of the shadow's."""
    answers: dict[str, int] = field(default_factory=dict)
    """Decisions by answer: sent or held, offloaded or stayed; empty for policies."""
    decisions: int = 0
    """Decisions timed, failed ones included."""
    seconds: float = 0.0
    """Time of those decisions."""
    failures: int = 0
    last_error: str | None = None
    in_a_row: int = 0
    """Failures since the last decision that succeeded."""
    paused: bool = False

    @property
    def requests(self) -> int:
        """Decisions compared."""
        return self.agreed + self.differed

    def compared(self, verdict: ShadowVerdict) -> None:
        """Count one comparison."""
        if verdict.agreed:
            self.agreed += 1
        else:
            self.differed += 1
        if verdict.regret_s > 0:
            self.live_worse_s += verdict.regret_s
        elif verdict.regret_s < 0:
            self.live_better_s -= verdict.regret_s
        if verdict.hit_tokens > 0:
            self.given_away_by_live += verdict.hit_tokens
        else:
            self.given_away_by_shadow -= verdict.hit_tokens
        if verdict.answer:
            self.answers[verdict.answer] = self.answers.get(verdict.answer, 0) + 1

    def failed(self, error: str, pause_after: int) -> bool:
        """Count one failure; True if the shadow is paused by it."""
        self.failures += 1
        self.in_a_row += 1
        self.last_error = error
        if self.in_a_row < pause_after:
            return False
        self.paused = True
        self.last_error = f"paused after {self.in_a_row} failures in a row: {error}"
        return True

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        requests, regret_s = self.requests, self.live_worse_s - self.live_better_s
        return {
            "part": self.part.value,
            "name": self.label,
            "params": self.params,
            "requests": requests,
            "agreed": self.agreed,
            "agreement": round(self.agreed / requests, 6) if requests else None,
            "regret_s": {
                "total": round(regret_s, 6),
                "mean": round(regret_s / requests, 9) if requests else None,
                "live_worse": round(self.live_worse_s, 6),
                "live_better": round(self.live_better_s, 6),
            },
            "hit_tokens_given_away": self.given_away_by_live,
            "hit_tokens_given_away_by_shadow": self.given_away_by_shadow,
            "answers": dict(self.answers),
            "failures": self.failures,
            "last_error": self.last_error,
            "paused": self.paused,
            "decision_us_mean": round(self.seconds / self.decisions * 1e6, 3) if self.decisions else None,
        }


class _Latest(NamedTuple):
    unix_s: float
    decision: Decision | None
    admission: Admit | Hold | None
    shadow: dict[str, ShadowVerdict]


class LatestDecisions:
    """The newest live decisions by request, each with the shadows' ones; at most ``KEPT``."""

    def __init__(self) -> None:
        self._rows: OrderedDict[str, _Latest] = OrderedDict()

    def note(
        self, request_id: str, unix_s: float, live: Decision | Admit | Hold, shadow: dict[str, ShadowVerdict]
    ) -> None:
        """Add to the request's row, which becomes the newest. ``shadow`` is kept, not copied: this runs every time."""
        rows = self._rows
        row = rows.pop(request_id, None)
        if row is not None:
            shadow = {**row.shadow, **shadow}
        if isinstance(live, Decision):
            row = _Latest(unix_s, live, row.admission if row is not None else None, shadow)
        else:
            row = _Latest(unix_s, row.decision if row is not None else None, live, shadow)
        rows[request_id] = row
        if len(rows) > KEPT:
            rows.popitem(last=False)

    def clear(self) -> None:
        """Forget all of them."""
        self._rows.clear()

    def as_list(self) -> list[dict[str, Any]]:
        """JSON-ready, newest first."""
        return [
            {
                "request_id": request_id,
                "unix_s": round(row.unix_s, 3),
                "live": _live(row),
                "shadow": {label: _shown(verdict) for label, verdict in row.shadow.items()},
            }
            for request_id, row in reversed(self._rows.items())
        ]


def _live(row: _Latest) -> dict[str, Any]:
    decision, admission = row.decision, row.admission
    live: dict[str, Any] = {"instance": None, "reason": None}
    if decision is not None:
        live = {
            "instance": decision.decode_on,
            "reason": decision.reason.value,
            "prefill_instance": decision.prefill_on,
            "offload_reason": decision.offload.reason.value,
        }
    if admission is not None:
        live["admission"] = SENT if isinstance(admission, Admit) else HELD
        live["admission_reason"] = admission.reason.value
    return live


def _shown(verdict: ShadowVerdict) -> dict[str, Any]:
    row: dict[str, Any] = {
        "instance": verdict.instance,
        "reason": str(verdict.reason),
        "regret_s": round(verdict.regret_s, 6),
        "agreed": verdict.agreed,
    }
    if verdict.answer:
        row["answer"] = verdict.answer
    return row
