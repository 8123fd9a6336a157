"""Freshness of a run's fleet, by the run's own files and by its cache hits.

A baseline measured on engines that had replayed the same trace before once faked a 44 % gain. The proof that the
launcher keeps (``fresh.json``) is read where there is one; and since a proof can be missing, the hits themselves are
held against what the trace allows: no request can find more cached than an earlier request of the same run computed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from replayer.compare.pairing import silence_as_zero
from replayer.records.counted import counted
from replayer.records.json_errors import BAD_JSON
from replayer.records.runs import RequestRecord, Run
from replayer.traces.trace import Trace, TraceRequest

FRESH_FILE = "fresh.json"
SLACK_TOKENS = 64
"""Allowance for templates and rounding in the hits of one request."""
MAX_IMPOSSIBLE_SHARE = 0.001
"""Share of all prompt tokens that may be cached beyond the bound before the run counts as warm."""
MAX_APC_ABOVE_IDEAL = 0.01


def stale_reasons(run: Run, *, directory: Path | None = None, trace: Trace | None = None) -> list[str]:
    """Reasons to count the run as measured on a warm fleet; empty when there are none.

    Args:
        run: the run.
        directory: where its file lies; a ``fresh.json`` there is read.
        trace: the trace it replayed; without it the hits are checked less closely.
    """
    reasons = _stated(run)
    if directory is not None:
        reasons += _proof(directory / FRESH_FILE)
    records = silence_as_zero(run.records)
    if all(record.cached_tokens is None for record in records):
        return reasons
    reasons += _first_requests(records)
    # A trace that was read otherwise than by the run, whose header does not say how, has other sessions and turns.
    known = trace is not None and {_key(one) for one in records} <= {_key(one) for one in trace.requests}
    reasons += _beyond_trace(records, trace) if trace is not None and known else _above_ideal(run, records)
    return reasons


def engines_of(directory: Path) -> set[str]:
    """Identities of a run's engines by the proof beside it: engine ids, and processes by pid and start."""
    try:
        proof: Any = msgspec.json.decode((directory / FRESH_FILE).read_bytes())
    except (OSError, *BAD_JSON):
        return set()
    names: set[str] = set()
    for engine in (proof.get("engines") or []) if isinstance(proof, dict) else []:
        names.update(f"engine id {one}" for one in engine.get("engine_ids") or [])
        if engine.get("pid") and engine.get("process_started_unix_s"):
            names.add(f"pid {engine['pid']} started at {engine['process_started_unix_s']}")
    return names


def _stated(run: Run) -> list[str]:
    """Reasons in the run's header: options.fresh is false, or an object with "fresh" false and "reason"."""
    stated: Any = run.header.options.get("fresh")
    if isinstance(stated, dict):
        reason = stated.get("reason") or "no reason given"
        return [] if stated.get("fresh", True) else [f"its header says the fleet was not fresh ({reason})"]
    return ["its header says the fleet was not fresh"] if stated is False else []


def _proof(path: Path) -> list[str]:
    """Reasons in the launcher's proof; none where it is missing."""
    try:
        proof: Any = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        return []
    except (OSError, *BAD_JSON) as error:
        return [f"{path} cannot be read ({error})"]
    if not isinstance(proof, dict) or proof.get("kind") == "simulated":
        return []
    engines = proof.get("engines") or []
    reasons = [
        f"{path.name}: {engine.get('instance', 'an engine')}: {problem}"
        for engine in engines
        for problem in engine.get("problems") or []
    ]
    if not engines:
        reasons.append(f"{path.name} names no engine")
    gpus = proof.get("gpus") or {}
    if gpus.get("status") == "foreign":
        reasons += [f"{path.name}: {one}" for one in gpus.get("foreign") or ["other processes compute on its GPUs"]]
    if proof.get("fresh") is False and not reasons:
        reasons.append(f"{path.name} says that the fleet was not fresh")
    return reasons


def _first_requests(records: list[RequestRecord]) -> list[str]:
    """Before the first token comes back from anywhere, some request must have found nothing cached."""
    sent = [record for record in records if record.sent_s is not None]
    answered_s = min((record.first_token_s for record in sent if record.first_token_s is not None), default=None)
    first = [record for record in sent if answered_s is not None and (record.sent_s or 0.0) <= answered_s]
    # One that failed may have computed what the others found.
    hits = [record.cached_tokens for record in first if record.cached_tokens is not None]
    if not hits or len(hits) < len(first) or min(hits) <= SLACK_TOKENS:
        return []
    earliest = min(first, key=lambda record: record.sent_s or 0.0)
    return [
        f"its first request ({earliest.session_id}, turn {earliest.turn}) already found {earliest.cached_tokens:,} of "
        f"{earliest.prompt_tokens or earliest.input_length:,} prompt tokens cached"
    ]


def _above_ideal(run: Run, records: list[RequestRecord]) -> list[str]:
    """The run's APC against that of one infinite cache, which the replayer computed from the plan."""
    ideal = run.header.offered.get("ideal_apc")
    known = [record for record in records if record.cached_tokens is not None]
    prompts = sum(record.prompt_tokens or 0 for record in known)
    if not isinstance(ideal, float) or not prompts:
        return []
    # The ideal is of all requests. Where those failed that had most to compute, the others' APC may be above it, but
    # their hits not above those of the whole plan less what the failed ones repeat of their own sessions.
    failed = [record for record in records if record.cached_tokens is None]
    possible = ideal * (prompts + sum(record.input_length for record in failed))
    possible -= sum(record.own_prefix_tokens or 0 for record in failed)
    # Engines also cache what they generate, which the next turn may repeat; the ideal counts prompts only.
    outputs = sum(record.completion_tokens or 0 for record in records)
    bound = possible / prompts
    found = sum(record.cached_tokens or 0 for record in known) / prompts
    if found <= bound + outputs / prompts + MAX_APC_ABOVE_IDEAL:
        return []
    return [f"its APC of {found:.3f} is above the {bound:.3f} of one infinite cache that starts empty"]


def _beyond_trace(records: list[RequestRecord], trace: Trace) -> list[str]:
    """Every request's hits against all that any other request sent before its first token could have cached."""
    by_chat = {_key(request): request for request in trace.requests}
    size = trace.block_tokens
    sent = sorted((record for record in records if record.sent_s is not None), key=lambda record: record.sent_s or 0.0)
    ends = {
        id(record): end
        for record in sent
        if (end := record.first_token_s if record.first_token_s is not None else record.finished_s) is not None
    }
    outputs = {(record.session_id, record.turn): record.completion_tokens or 0 for record in records}
    senders: dict[int, int] = {}
    waiting = iter(sent)
    upcoming = next(waiting, None)
    excess_tokens = impossible = prompts = 0
    for record in sorted((one for one in sent if id(one) in ends), key=lambda one: ends[id(one)]):
        while upcoming is not None and (upcoming.sent_s or 0.0) < ends[id(record)]:
            for block in set(_blocks(by_chat, upcoming, size)):
                senders[block] = senders.get(block, 0) + 1
            upcoming = next(waiting, None)
        if record.cached_tokens is None:
            continue
        prompts += record.prompt_tokens or record.input_length
        own = _blocks(by_chat, record, size)
        bound = size * _shared_prefix(own, senders) + outputs.get((record.session_id, record.turn - 1), 0)
        if (beyond := record.cached_tokens - bound) > size + SLACK_TOKENS:
            impossible += 1
            excess_tokens += beyond
    if not prompts or excess_tokens <= MAX_IMPOSSIBLE_SHARE * prompts:
        return []
    return [
        f"{counted(impossible, 'request')} found more cached than the trace's earlier requests could have left "
        f"({excess_tokens:,} tokens, {excess_tokens / prompts:.1%} of all prompt tokens)"
    ]


def _key(one: RequestRecord | TraceRequest) -> tuple[str, int, int]:
    return one.session_id, one.turn, one.chat_id


def _blocks(by_chat: dict[tuple[str, int, int], Any], record: RequestRecord, size: int) -> list[int]:
    request = by_chat.get(_key(record))
    return [] if request is None else list(request.hash_ids[: request.full_blocks(size)])


def _shared_prefix(ids: list[int], senders: dict[int, int]) -> int:
    """Leading blocks that some *other* request sent (its own sending is counted too); ids are chained, so bisect."""
    known, unknown = -1, len(ids)
    while unknown - known > 1:
        middle = (known + unknown) // 2
        if senders.get(ids[middle], 0) > 1:
            known = middle
        else:
            unknown = middle
    return known + 1
