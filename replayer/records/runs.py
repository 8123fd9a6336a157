"""Record of a run: one JSON line for the run, one for each request, and one that marks it complete.

Lines are written whole and flushed, so a crash can break only the last one; `read_run` tolerates that and nothing else.
All times are engine seconds (wall seconds x ``clock_scale``), offsets from the start of the run unless said otherwise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from replayer.records.counted import counted
from replayer.records.idle import IdleCosts
from replayer.records.json_errors import BAD_JSON

SCHEMA = 1
"""Version of the record schema this module reads and writes."""


class RecordError(ValueError):
    """A run file that cannot be read; the message names file, line and remedy."""


class RunHeader(msgspec.Struct, kw_only=True, tag_field="kind", tag="run"):
    """First line: trace, endpoint and settings of the replay."""

    schema: int = SCHEMA
    label: str = ""
    trace: str = ""
    trace_sha256: str = ""
    endpoint: str = ""
    model: str = ""
    time_scale: float = 1.0
    """Arrivals of the trace are divided by this."""
    think_scale: float = 1.0
    """Think times between the turns of one session are divided by this."""
    clock_scale: float = 1.0
    """Engine seconds per wall second; recorded times are wall seconds times this."""
    max_inflight_sessions: int | None = None
    request_limit: int | None = None
    seed: int = 0
    started_unix_s: float = 0.0
    warmroute_version: str = ""
    offered: dict[str, Any] = msgspec.field(default_factory=dict)
    """Offered load of the plan as computed before the run (``replayer.replay.plan.OfferedLoad``)."""
    cut_session: str | None = None
    """Session of which the request limit left only the first turns."""
    idle_costs: IdleCosts = IdleCosts()
    """Costs for the idle times of sessions (`replayer.records.sessions`)."""
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    """Other settings of the replay, for the record."""


class RequestRecord(msgspec.Struct, kw_only=True, tag_field="kind", tag="request"):
    """Result of one request. Every planned request of a complete run has exactly one."""

    request_id: str
    session_id: str
    turn: int
    chat_id: int
    trace_timestamp_s: float
    """Arrival in the trace, unscaled."""
    scheduled_s: float
    """Due time by the open-loop plan, or by the previous turn's end plus think time."""
    sent_s: float | None = None
    """Time at which the client began to send it; null when it did not."""
    first_token_s: float | None = None
    finished_s: float | None = None
    ttft_s: float | None = None
    """From sent to the first event that carries a token."""
    ttft_scheduled_s: float | None = None
    tpot_s: float | None = None
    """(last token - first token) / (completion tokens - 1); null below two tokens."""
    e2e_s: float | None = None
    e2e_scheduled_s: float | None = None
    input_length: int = 0
    """Prompt tokens in the trace."""
    output_length: int = 0
    """Output tokens in the trace, at least 1."""
    wait_s: float | None = None
    """Wait of the plan before this turn, after scaling; 0 for a session's first turn, null in older files."""
    wait_after_end: bool = False
    """True: ``wait_s`` counts from the previous turn's end, else from its due time."""
    own_prefix_tokens: int | None = None
    """Prompt tokens, in full blocks, that repeat the session's previous prompt; null in older files."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    """Cached prompt tokens as the engine reports them; null when it does not (see `read_run` on 0)."""
    ok: bool = False
    error: str | None = None
    http_status: int | None = None
    instance: str | None = None
    prefill_instance: str | None = None
    request_class: str | None = None
    """The proxy's decision-time class header (by predicted cached tokens)."""
    reason: str | None = None
    predicted_cached_tokens: int | None = None

    @property
    def new_tokens(self) -> int | None:
        """Prompt tokens the engine computed (prompt - cached actual); None when the engine did not report them."""
        if self.prompt_tokens is None or self.cached_tokens is None:
            return None
        return self.prompt_tokens - self.cached_tokens


class Latencies(NamedTuple):
    """The latency fields of a `RequestRecord`, in seconds; None where the request got too few tokens."""

    ttft_s: float | None
    ttft_scheduled_s: float | None
    tpot_s: float | None
    e2e_s: float
    e2e_scheduled_s: float


def latencies(
    *,
    scheduled_s: float,
    sent_s: float,
    first_token_s: float | None,
    last_token_s: float | None,
    finished_s: float,
    completion_tokens: int | None,
) -> Latencies:
    """Latencies of one request from its points in time, all in seconds on one clock.

    TTFT and E2E are counted from ``sent_s`` and, as ``*_scheduled_s``, from ``scheduled_s``. TPOT is
    (last token - first token) / (completion tokens - 1); None below two tokens.
    """
    tpot_s = None
    if first_token_s is not None and last_token_s is not None and completion_tokens is not None:
        tpot_s = (last_token_s - first_token_s) / (completion_tokens - 1) if completion_tokens > 1 else None
    return Latencies(
        None if first_token_s is None else first_token_s - sent_s,
        None if first_token_s is None else first_token_s - scheduled_s,
        tpot_s,
        finished_s - sent_s,
        finished_s - scheduled_s,
    )


class RunEnd(msgspec.Struct, kw_only=True, tag_field="kind", tag="end"):
    """Last line of a complete run."""

    finished_unix_s: float
    requests: int
    ok: int


class Run(NamedTuple):
    """A run read from its file. ``end`` is None when the run was interrupted; it can be resumed."""

    header: RunHeader
    records: list[RequestRecord]
    end: RunEnd | None
    resumed_after: int | None = None
    """Requests recorded when the run was resumed for the first time; None if it was not, or before its first record."""

    @property
    def incomplete(self) -> str:
        """Reason why the file does not hold the whole run; empty if it does."""
        if self.end is None:
            return "its last line is missing"
        if self.end.requests != len(self.records):
            counts = counted(self.end.requests, "request")
            return f"the file is damaged: its last line counts {counts}, it has {len(self.records)}"
        return ""


_DECODER = msgspec.json.Decoder(RunHeader | RequestRecord | RunEnd)
_ENCODER = msgspec.json.Encoder()
_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd")
"""First bytes of gzip and zstd files."""


def encode_line(record: RunHeader | RequestRecord | RunEnd) -> bytes:
    """One record as a JSON line, newline included."""
    return _ENCODER.encode(record) + b"\n"


def read_run(path: str | Path) -> Run:
    """Read a run file.

    A last line without a newline is left by a crash while writing and is ignored. Where a request was recorded twice (a
    run resumed by hand), the later record counts.

    vLLM leaves ``cached_tokens`` out of the usage where it is 0. A request without the figure therefore counts as 0
    where its instance gave the figure for other requests of the run; otherwise misses would drop out of every hit rate.

    Raises:
        RecordError: not a run file, a schema this version does not know, or a broken line that is not the last.
        OSError: the file cannot be read.
    """
    path = Path(path)
    data = path.read_bytes()
    if data.startswith(_COMPRESSED):
        raise RecordError(f"{path}: a compressed file; run files are read as they were written: unpack it first")
    complete = data[: data.rfind(b"\n") + 1]
    header: RunHeader | None = None
    end: RunEnd | None = None
    resumed_after: int | None = None
    records: dict[str, RequestRecord] = {}
    for number, line in enumerate(complete.splitlines(), 1):
        if not line.strip():
            continue
        try:
            item = _DECODER.decode(line)
        except BAD_JSON as error:
            hint = "is this a file written by `warmroute replay`?" if number == 1 else "remove the line or replay again"
            raise RecordError(f"{path}:{number}: not a run record ({error}); {hint}") from error
        if isinstance(item, RunHeader):
            if item.schema != SCHEMA:
                raise RecordError(f"{path}:{number}: record schema {item.schema}, this version reads {SCHEMA}")
            header = header or item
            resumed_after = resumed_after or len(records) or None
        elif header is None:
            raise RecordError(
                f"{path}:{number}: the first line must be the run header; the file has lost its beginning"
            )
        elif isinstance(item, RunEnd):
            end = item
        else:
            records[item.request_id] = item
            end = None
    if header is None:
        raise RecordError(f"{path}: no run header; the file is empty or was cut before the first line was written")
    complete_records = list(records.values())
    _fill_zero_hits(complete_records)
    return Run(header, complete_records, end, resumed_after)


def _fill_zero_hits(records: list[RequestRecord]) -> None:
    reporting = {record.instance for record in records if record.cached_tokens is not None}
    for record in records:
        if record.cached_tokens is None and record.prompt_tokens is not None and record.instance in reporting:
            record.cached_tokens = 0
