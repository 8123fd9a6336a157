"""Recordings: each request's time, engine and result, read from the files of a run.

A recording is a folder with

* ``run.jsonl`` or ``run.jsonl.gz``: the run file of ``warmroute replay``;
* ``arm.json`` (optional): ``label``, ``transport`` (how KV moved) and ``skip_first_s`` (seconds from the start in which
  engines still compiled kernels: simulated, but not compared), as ``bench.elastic_ab`` and experiments write it.

Prompts are in the trace that was replayed: the run file names its SHA-256, and requests are found by their chat id.
"""

from __future__ import annotations

import gzip
import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec

from replayer.records.runs import RecordError, RequestRecord, Run, read_run
from replayer.traces.trace import Trace

RUN_FILE = "run.jsonl"
ARM_FILE = "arm.json"


class RecordingError(ValueError):
    """A recording that cannot be simulated; the message says why and what to do."""


class RecordedArm(msgspec.Struct, kw_only=True):
    """The fields of ``arm.json`` that a re-simulation needs."""

    label: str = ""
    transport: str | None = None
    skip_first_s: float = 0.0


class Sent(NamedTuple):
    """One request as it was sent, with its record. Times are engine seconds; ``sent_s`` is counted from the start."""

    record: RequestRecord
    sent_s: float
    instance: str
    keys: list[int]
    """The trace's block ids."""
    prompt_tokens: int
    output_tokens: int
    compared: bool
    """False within the first seconds that the recording leaves out."""


class Recording(NamedTuple):
    """Requests in the order in which they were sent."""

    name: str
    block_tokens: int
    note: RecordedArm
    sent: list[Sent]
    failed: int
    """Requests without an answer; they are not simulated."""

    @property
    def instances(self) -> list[str]:
        """Every instance that a request went to, sorted."""
        used = {each.instance for each in self.sent}
        return sorted(used | {each.record.prefill_instance for each in self.sent if each.record.prefill_instance})


def find_recordings(folders: list[Path]) -> list[Path]:
    """The recordings among ``folders`` and below them, sorted.

    Raises:
        RecordingError: a folder has none.
    """
    found: list[Path] = []
    for folder in folders:
        here = {path.parent for name in (RUN_FILE, f"{RUN_FILE}.gz") for path in folder.rglob(name)}
        if not here:
            raise RecordingError(f"{folder}: no {RUN_FILE} or {RUN_FILE}.gz in it; name a folder that has one")
        found += sorted(here)
    return list(dict.fromkeys(found))


def read_recording(folder: Path, trace: Trace, name: str = "") -> Recording:
    """Read a recording of a replay of ``trace``.

    Raises:
        RecordingError: it is not one, it is of another trace, or nothing in it was answered.
    """
    run = _read_run(folder)
    if run.header.trace_sha256 != trace.sha256:
        recorded = f"{run.header.trace or 'another trace'} (SHA-256 {run.header.trace_sha256[:12]}...)"
        raise RecordingError(
            f"{folder}: recorded with {recorded}, not with {trace.name} ({trace.sha256[:12]}...): "
            "give the trace it was recorded with"
        )
    note = RecordedArm()
    if (folder / ARM_FILE).exists():
        try:
            note = msgspec.json.decode((folder / ARM_FILE).read_bytes(), type=RecordedArm)
        except msgspec.MsgspecError as error:
            raise RecordingError(f"{folder / ARM_FILE}: {error}") from error
    requests = {request.chat_id: request for request in trace.requests}
    sent = []
    for record in run.records:
        if not record.ok or record.sent_s is None or record.first_token_s is None or record.instance is None:
            continue
        request = requests.get(record.chat_id)
        if request is None or request.input_length != record.input_length:
            raise RecordingError(
                f"{folder}: request {record.request_id} is not in {trace.name}: give the trace it was recorded with"
            )
        sent.append(
            Sent(
                record,
                record.sent_s,
                record.instance,
                list(request.hash_ids),
                record.prompt_tokens or record.input_length,
                record.completion_tokens or record.output_length,
                record.sent_s >= note.skip_first_s,
            )
        )
    if not any(each.compared for each in sent):
        raise RecordingError(f"{folder}: no request in it was answered after the first {note.skip_first_s:g} s")
    sent.sort(key=lambda each: each.sent_s)
    return Recording(
        name or note.label or folder.name, trace.block_tokens, note, sent, failed=len(run.records) - len(sent)
    )


def _read_run(folder: Path) -> Run:
    packed = folder / f"{RUN_FILE}.gz"
    try:
        if not packed.exists():
            return read_run(folder / RUN_FILE)
        with tempfile.TemporaryDirectory() as scratch:
            plain = Path(scratch) / RUN_FILE
            plain.write_bytes(gzip.decompress(packed.read_bytes()))
            return read_run(plain)
    except (RecordError, OSError) as error:
        raise RecordingError(f"{folder}: {error}") from error
