"""Record of one finished run, small enough to keep many: a gzipped JSON file with figures of each request.

A file is written whole under another name and renamed, so an interrupted run leaves none and is repeated.
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from bench.routers.plan import RunLength
from replayer.records.runs import RequestRecord, Run, RunEnd, RunHeader, latencies

SUFFIX = ".json.gz"
SCHEMA = 1
_DIGITS = 5
"""Of seconds: a hundredth of a millisecond."""


class RoutersConditions(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions that runs must share to be compared, and to count when a comparison continues."""

    trace_sha256: str
    prompt_mode: str
    think_speed: float
    """Think times pass this many times faster."""
    idle_gap_cap_s: float
    request_limit: int | None
    length_scale: float
    seed: int
    token_low: int
    token_high: int
    engine_speed: float
    engines: int


class EngineCounters(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of one engine, or their increase. Tokens."""

    prompt_tokens: float = 0.0
    """Of requests that were prefilled, cached ones included."""
    cached_tokens: float | None = None
    """Of these, not computed; None: the engine does not count them."""
    lookup_tokens: float = 0.0
    """Looked up in the prefix cache: a request that waits for room is counted at every step."""
    hit_tokens: float = 0.0
    """Of these, found."""
    pulled_tokens: float = 0.0
    """KV that came from another engine."""
    preemptions: float = 0.0

    def since(self, before: EngineCounters) -> EngineCounters:
        """Increase from an earlier reading."""
        known = self.cached_tokens is not None and before.cached_tokens is not None
        return EngineCounters(
            prompt_tokens=self.prompt_tokens - before.prompt_tokens,
            cached_tokens=(self.cached_tokens or 0.0) - (before.cached_tokens or 0.0) if known else None,
            lookup_tokens=self.lookup_tokens - before.lookup_tokens,
            hit_tokens=self.hit_tokens - before.hit_tokens,
            pulled_tokens=self.pulled_tokens - before.pulled_tokens,
            preemptions=self.preemptions - before.preemptions,
        )


class CacheProof(msgspec.Struct, frozen=True):
    """Hits of one probe prompt by an engine's own counter: while it was cached, and after the cache was emptied."""

    engine: str
    warm_hit_tokens: float
    empty_hit_tokens: float


class RequestFigures(msgspec.Struct, frozen=True, array_like=True):
    """One request; times are engine seconds from the start of the run."""

    request_id: str
    session_id: str
    turn: int
    chat_id: int
    trace_timestamp_s: float
    due_s: float
    sent_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    end_s: float | None
    input_length: int
    output_length: int
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    wait_s: float | None
    wait_after_end: bool
    own_prefix_tokens: int | None
    instance: str | None
    prefill_instance: str | None
    error: str | None

    @classmethod
    def of(cls, record: RequestRecord) -> RequestFigures:
        """Figures of a replayer's record."""
        last_s = record.first_token_s
        if last_s is not None and record.tpot_s is not None and record.completion_tokens is not None:
            last_s += record.tpot_s * (record.completion_tokens - 1)
        return cls(
            record.request_id,
            record.session_id,
            record.turn,
            record.chat_id,
            record.trace_timestamp_s,
            round(record.scheduled_s, _DIGITS),
            _rounded(record.sent_s),
            _rounded(record.first_token_s),
            _rounded(last_s),
            _rounded(record.finished_s),
            record.input_length,
            record.output_length,
            record.prompt_tokens,
            record.completion_tokens,
            record.cached_tokens,
            _rounded(record.wait_s),
            record.wait_after_end,
            record.own_prefix_tokens,
            record.instance,
            record.prefill_instance,
            record.error,
        )

    def record(self) -> RequestRecord:
        """The replayer's record again, for its comparison."""
        sent_s, end_s = self.sent_s, self.end_s
        times = {}
        if sent_s is not None and end_s is not None:
            times = latencies(
                scheduled_s=self.due_s,
                sent_s=sent_s,
                first_token_s=self.first_token_s,
                last_token_s=self.last_token_s,
                finished_s=end_s,
                completion_tokens=self.completion_tokens,
            )._asdict()
        return RequestRecord(
            request_id=self.request_id,
            session_id=self.session_id,
            turn=self.turn,
            chat_id=self.chat_id,
            trace_timestamp_s=self.trace_timestamp_s,
            scheduled_s=self.due_s,
            sent_s=sent_s,
            first_token_s=self.first_token_s,
            finished_s=end_s,
            **times,
            input_length=self.input_length,
            output_length=self.output_length,
            wait_s=self.wait_s,
            wait_after_end=self.wait_after_end,
            own_prefix_tokens=self.own_prefix_tokens,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self.cached_tokens,
            ok=self.error is None,
            error=self.error,
            instance=self.instance,
            prefill_instance=self.prefill_instance,
        )


class RouterRecord(msgspec.Struct, kw_only=True):
    """One finished run."""

    schema: int = SCHEMA
    label: str
    repeat: int
    load: float
    """Sessions arrive this many times faster than in the trace."""
    conditions: RoutersConditions
    router: str
    """Version and settings."""
    command: list[str]
    hardware: str
    engine_versions: list[str]
    pool_tokens: list[int]
    """KV pool of each engine."""
    planned: int
    """Requests of the plan; fewer figures: the run was cut off."""
    total_s: float
    """Wall seconds of the whole run, setup included."""
    router_cpu_s: float
    """CPU seconds of the router's processes during the replay."""
    proofs: list[CacheProof]
    counters: list[EngineCounters]
    """Increase of each engine's counters during the replay."""
    evidence: list[str] = []
    """Lines of the router's own metrics that show how it decided."""
    header: RunHeader
    requests: list[RequestFigures]

    @property
    def length(self) -> RunLength:
        """Its duration, for estimates."""
        return RunLength(self.load, self.label, self.total_s)

    @property
    def cut(self) -> bool:
        """True if the time limit of a run ended it."""
        return len(self.requests) < self.planned

    def run(self) -> Run:
        """The run as the comparison reads it."""
        records = [each.record() for each in self.requests]
        ok = sum(record.ok for record in records)
        end = None if self.cut else RunEnd(finished_unix_s=0.0, requests=len(records), ok=ok)
        return Run(self.header, records, end)


class TokenTotals(NamedTuple):
    """Tokens of all engines in one run."""

    prompt: float
    cached: float

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that was not computed."""
        return self.cached / self.prompt if self.prompt else 0.0


def totals_of(counters: Sequence[EngineCounters]) -> TokenTotals:
    """Prompt tokens and cached ones by the engines' counters, each request once where the engines count them so."""
    if all(each.cached_tokens is not None for each in counters):
        return TokenTotals(
            sum(each.prompt_tokens for each in counters), sum(each.cached_tokens or 0 for each in counters)
        )
    return TokenTotals(sum(each.lookup_tokens for each in counters), sum(each.hit_tokens for each in counters))


class RouterRecordError(ValueError):
    """Records that cannot be read or do not belong together; the message has the remedy."""


_DECODER = msgspec.json.Decoder(RouterRecord)


def write_record(record: RouterRecord, folder: Path, name: str) -> Path:
    """Write a record under its final name once it is complete on disk."""
    folder.mkdir(parents=True, exist_ok=True)
    path, partial = folder / f"{name}{SUFFIX}", folder / f"{name}.partial"
    partial.write_bytes(gzip.compress(msgspec.json.encode(record), mtime=0))
    partial.replace(path)
    return path


def read_record(path: Path) -> RouterRecord:
    """Read a record. Raises RouterRecordError."""
    try:
        record = _DECODER.decode(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, msgspec.MsgspecError) as error:
        raise RouterRecordError(f"{path}: not a record of this comparison ({error}); delete it to repeat it") from error
    if record.schema != SCHEMA:
        raise RouterRecordError(f"{path}: schema {record.schema}, this version reads {SCHEMA}")
    return record


def read_records(folder: Path) -> dict[str, RouterRecord]:
    """All records of a folder by name; empty where there is none. Raises RouterRecordError."""
    return {path.name.removesuffix(SUFFIX): read_record(path) for path in sorted(folder.glob(f"*{SUFFIX}"))}


def refuse_others(records: dict[str, RouterRecord], conditions: RoutersConditions) -> None:
    """Raise RouterRecordError if a record was made under other conditions."""
    for name, record in records.items():
        for field in RoutersConditions.__struct_fields__:
            before, now = getattr(record.conditions, field), getattr(conditions, field)
            if before != now and record.conditions.prompt_mode == conditions.prompt_mode:
                raise RouterRecordError(
                    f"{name} was made with {field} = {before!r}, now {now!r}: continue with the same, or give another "
                    "--output"
                )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, _DIGITS)
