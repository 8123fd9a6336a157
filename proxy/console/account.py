"""Account of one request in plain words, from its breakdown row. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from policies.offload.never import Never
from policies.types import OffloadReason
from proxy.console.phrases import ADMISSIONS, LEGS, OFFLOADS, OUTCOMES, REASONS, RESUMES, STAGES, spoken
from proxy.paths import CANCEL, GENERATION_PATHS, HANDED_OFF, STORED

_SHOWN_INPUTS = 6
_FELL_BACK = "fell_back_"
_OF_STORED = frozenset((STORED, CANCEL))


class AccountPart(NamedTuple):
    """One subject of the account."""

    subject: str
    sentences: tuple[str, ...]


class CandidateLine(NamedTuple):
    """One instance that could have been chosen."""

    instance: str
    chosen: bool
    score: float
    cached_tokens: int | None
    """Prompt tokens predicted to be cached there; None: not known."""
    inputs: str
    skipped: bool


class RequestAccount(NamedTuple):
    """A request in plain words."""

    parts: tuple[AccountPart, ...]
    candidates: tuple[CandidateLine, ...]
    """The best score first; empty if nothing was decided."""


def account_of(row: Mapping[str, Any], started_unix_s: Collection[float] = ()) -> RequestAccount:
    """The account of a row.

    Args:
        row: a row of ``GET /breakdown`` or of a JSONL file, of this or another version.
        started_unix_s: starts of the proxy's processes that answered; none: unknown.
    """
    parts = (
        AccountPart("request", tuple(_request(row, started_unix_s))),
        AccountPart("outcome", tuple(_outcome(row))),
        AccountPart("class", tuple(_class(row))),
        AccountPart("admission", tuple(_admission(row))),
        AccountPart("instance", tuple(_instance(row))),
        AccountPart("hand-off", tuple(_hand_off(row))),
        AccountPart("cache", tuple(_cache(row))),
        AccountPart("attempts", tuple(_attempts(row))),
        AccountPart("times", tuple(_times(row))),
    )
    return RequestAccount(tuple(part for part in parts if part.sentences), tuple(_candidates(row)))


def _request(row: Mapping[str, Any], started_unix_s: Collection[float]) -> Iterator[str]:
    streamed = ", streamed" if row.get("stream") else ""
    yield f"{row.get('endpoint') or 'a request'}{streamed}, received {_time(row.get('arrived_unix_s'))}."
    if session := row.get("session_id"):
        source = row.get("session_source")
        by = "recognised by its prompt" if source == "prefix" else f"named by {source}"
        parent = f", sub-agent of session {row['parent_session_id']}" if row.get("parent_session_id") else ""
        yield f"Session {session} ({by}){parent}." if source else f"Session {session}{parent}."
    if tenant := row.get("tenant"):
        yield f"Tenant {tenant}."
    if normalized := row.get("normalized"):
        yield f"Parts of the prompt were made constant: {', '.join(map(str, normalized))}."
    started = row.get("proxy_started_unix_s")
    if started_unix_s and started not in started_unix_s:
        yield f"Recorded by an earlier process of the proxy, which started {_time(started)}."


def _outcome(row: Mapping[str, Any]) -> Iterator[str]:
    outcome = row.get("outcome")
    status = f" Status {row['status']}." if row.get("status") else ""
    yield f"{spoken(OUTCOMES, outcome)}{status}"
    if (completion := row.get("completion_tokens")) is not None:
        yield f"{_tokens(completion)} {_was(completion)} generated."
    if error := row.get("error"):
        yield f"Error: {error}"


def _class(row: Mapping[str, Any]) -> Iterator[str]:
    name, prompt = row.get("class"), row.get("prompt_tokens")
    if name is None:
        if prompt is not None:
            yield f"None was given, because no instance was chosen. The prompt has {_tokens(prompt)}."
        return
    cached = _cached_on(row, row.get("instance"))
    if cached is None or prompt is None:
        yield f"{name}."
        return
    yield (
        f"{name}: of {_tokens(prompt, 'prompt token')}, {_count(cached)} {_was(cached)} predicted to be cached on "
        f"{row['instance']} and {_count(max(prompt - cached, 0))} to be new."
    )


def _admission(row: Mapping[str, Any]) -> Iterator[str]:
    held_s, reason = row.get("held_s") or 0.0, row.get("admission")
    queued_ms = (row.get("stages_ms") or {}).get("queued")
    if held_s:
        because = f" when it came: {row['held_because']}" if row.get("held_because") else ""
        yield f"It was held for {held_s:.1f} s{because}."
        if reason is not None:
            yield f"It was sent then because {spoken(ADMISSIONS, reason)}."
        else:
            yield "It ended before it was sent."
    elif reason is not None:
        yield f"It was not held: {spoken(ADMISSIONS, reason)}."
    if queued_ms:
        yield f"It waited {queued_ms / 1e3:.2f} s in the queue, because the fleet was at its limits."


def _instance(row: Mapping[str, Any]) -> Iterator[str]:
    instance = row.get("instance")
    if instance is None:
        if row.get("outcome") != "rejected":
            yield "None was chosen."
        return
    if row.get("reason") is None:
        stored = row.get("endpoint") in _OF_STORED
        which = "that has the stored response" if stored else "with the fewest requests in flight"
        yield f"{instance}: it was passed on, without a decision of the policy, to the instance {which}."
        return
    yield f"{instance}, because {spoken(REASONS, row.get('reason'))} (policy {row.get('policy')})."
    candidates = list(_candidates(row))
    ours = next((each for each in candidates if each.chosen), None)
    others = [each for each in candidates if not each.chosen]
    if ours is None or not others:
        return
    best = others[0]
    if best.score < ours.score:
        left_out = ", which a rule left out" if best.skipped else ""
        yield f"Its score was {_score(ours.score)}; {best.instance} had the lowest, {_score(best.score)}{left_out}."
    elif best.score > ours.score:
        yield f"Its score was {_score(ours.score)}, the best of the others {_score(best.score)} ({best.instance})."
    else:
        yield f"Its score was {_score(ours.score)}, as was that of {best.instance}."
    warmest = max(others, key=lambda each: each.cached_tokens or 0)
    if warmest.cached_tokens is not None and warmest.cached_tokens > (ours.cached_tokens or 0):
        yield (
            f"{warmest.instance} was predicted to have more of the prompt cached: {_tokens(warmest.cached_tokens)}, "
            f"against {_count(ours.cached_tokens or 0)}."
        )


def _hand_off(row: Mapping[str, Any]) -> Iterator[str]:
    reason, prefill = row.get("offload_reason"), row.get("prefill_instance")
    if reason is None:
        return
    planner = f" (planner {row['planner']})" if row.get("planner") else ""
    if prefill is not None:
        yield f"{prefill} computed the prompt, and {row.get('instance')} pulled its KV and decoded{planner}."
    elif str(reason).startswith(_FELL_BACK):
        yield f"A hand-off was tried and failed: {spoken(OFFLOADS, reason)}{planner}. Then the whole request was sent."
    else:
        yield f"None: {_not_handed_off(row, reason)}{planner}."
    inputs = row.get("offload_inputs") or {}
    if inputs:
        yield f"The planner's figures: {_inputs(inputs)}."


def _not_handed_off(row: Mapping[str, Any], reason: object) -> str:
    """Reason for which there was no hand-off. ``request_shape`` stands for several, which precede the planner's."""
    if reason == OffloadReason.REQUEST_SHAPE:
        if row.get("planner") == Never.name:
            return spoken(OFFLOADS, OffloadReason.PLANNER_NEVER)
        if (endpoint := row.get("endpoint")) in GENERATION_PATHS and endpoint not in HANDED_OFF:
            return f"requests to {endpoint} are never handed off"
        if row.get("resumed"):
            return "the rest of a broken stream is never handed off"
    return spoken(OFFLOADS, reason)


def _cache(row: Mapping[str, Any]) -> Iterator[str]:
    predicted, actual = row.get("predicted_cached_tokens"), row.get("actual_cached_tokens")
    if predicted is not None:
        source = f" by the {row['index_source']} index" if row.get("index_source") else ""
        yield f"{_tokens(predicted, 'cached token')} {_was(predicted)} predicted{source}."
    if actual is not None:
        if predicted is None:
            yield f"The engine reported {_count(actual)}."
        elif actual == predicted:
            yield "The engine reported the same number."
        else:
            more = "more" if actual > predicted else "fewer"
            yield f"The engine reported {_count(actual)}: {_count(abs(actual - predicted))} {more}."
    elif predicted is not None and row.get("outcome") == "ok":
        yield "The engine did not report how many there were."
    if killer := row.get("cache_killer"):
        yield f"A change since the session's turn before ended the cached prefix: {str(killer).replace('_', ' ')}."


def _attempts(row: Mapping[str, Any]) -> Iterator[str]:
    for number, attempt in enumerate(row.get("attempts") or (), 1):
        kind = " (hand-off)" if attempt.get("offload") else ""
        yield f"Failed attempt {number}, on {attempt.get('instance')}{kind}: {attempt.get('error')}"
    if resume := row.get("resume"):
        times = row.get("resumed") or 0
        done = f"resumed on {times} other engine(s)" if times else "not resumed"
        yield f"The stream broke off and was {done}: {spoken(RESUMES, resume)}."


def _times(row: Mapping[str, Any]) -> Iterator[str]:
    stages = row.get("stages_ms") or {}
    for name in (*(each for each in STAGES if each in stages), *(each for each in stages if each not in STAGES)):
        yield f"{_duration(stages[name])} {spoken(STAGES, name)}."
    for name, leg in (row.get("legs") or {}).items():
        predicted, actual = leg.get("predicted_s", 0.0), leg.get("actual_s", 0.0)
        yield f"{spoken(LEGS, name).capitalize()}: {_duration(actual * 1e3)}, predicted {_duration(predicted * 1e3)}."


def _candidates(row: Mapping[str, Any]) -> Iterator[CandidateLine]:
    scores = [each for each in row.get("scores") or () if isinstance(each.get("score"), int | float)]
    for each in sorted(scores, key=lambda each: each["score"]):
        yield CandidateLine(
            str(each.get("instance")),
            each.get("instance") == row.get("instance"),
            each["score"],
            each.get("cached_tokens"),
            _inputs(each.get("inputs") or {}),
            bool(each.get("skipped")),
        )


def _cached_on(row: Mapping[str, Any], instance: object) -> int | None:
    """Prompt tokens predicted to be cached on an instance; None if the row does not have them."""
    for each in row.get("scores") or ():
        if each.get("instance") == instance and isinstance(each.get("cached_tokens"), int):
            return int(each["cached_tokens"])
    found = row.get("predicted_cached_tokens")
    return found if isinstance(found, int) and row.get("prefill_instance") is None else None


def _inputs(inputs: Mapping[str, Any]) -> str:
    shown = [f"{name} {_score(value)}" for name, value in list(inputs.items())[:_SHOWN_INPUTS]]
    return ", ".join(shown) + (", …" if len(inputs) > _SHOWN_INPUTS else "")


def _count(value: object) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def _tokens(value: object, noun: str = "token") -> str:
    return f"{_count(value)} {noun}{'' if value == 1 else 's'}"


def _was(value: object) -> str:
    return "was" if value == 1 else "were"


def _score(value: object) -> str:
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def _duration(ms: object) -> str:
    if not isinstance(ms, int | float):
        return str(ms)
    return f"{ms:.2f} ms" if ms < 10 else f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1e3:.2f} s"


def _time(unix_s: object) -> str:
    if not isinstance(unix_s, int | float):
        return "at an unknown time"
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
