"""Writer of run files: a crash loses at most the line being written, and an interrupted run can be resumed."""

from __future__ import annotations

import fcntl
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from replayer.records.counted import counted
from replayer.records.runs import RecordError, RequestRecord, RunEnd, RunHeader, encode_line, read_run

_SAME = {
    "trace_sha256": "a trace of SHA-256",
    "time_scale": "--arrival-speed",
    "think_scale": "--think-speed",
    "clock_scale": "--engine-speed",
    "max_inflight_sessions": "--max-inflight-sessions",
    "request_limit": "--request-limit",
    "seed": "--seed",
    "model": "--model",
}
"""Fields of the header, and the options that set them."""
_SAME_OPTIONS = {
    "trace_options": "options of the trace",
    "block_tokens": "--block-tokens",
    "idle_gap_cap_s": "--idle-gap-cap-s",
    "timeout_s": "--timeout-s",
    "prompt_mode": "--prompt-mode",
    "token_low": "--token-low",
    "token_high": "--token-high",
}
"""Likewise, of the header's options."""


class Journal:
    """An open run file. Use as a context manager; every line is flushed to the operating system.

    Args:
        path: run file; created unless ``resume``.
        header: header of the run. On resume it must agree with the file's in everything that decides what is
            sent where, and how long an answer may take.
        resume: continue an existing file; a missing one is created.

    Raises:
        RecordError: the file exists (without resume), is no regular file, is complete, belongs to another run, or is
            being written by another process.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, header: RunHeader, *, resume: bool = False) -> None:
        self.path = path
        self.recorded: dict[str, RequestRecord] = {}
        """Records found on resume, by request id."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            # Reading a device such as /dev/full never ends, nor does opening a pipe that nobody reads.
            raise RecordError(f"{path}: is no regular file; give the name of a new one as --output")
        if not resume and path.exists() and path.stat().st_size:
            raise RecordError(f"{path}: exists already; give another --output, or --resume to continue it")
        self.ok = self.count = 0
        self._broken = False
        # Neither way of opening truncates: until it is locked, the file may be another process's.
        self._file: IO[bytes] = path.open("r+b" if path.exists() else "xb")
        try:
            self._lock()
            self._continue(header)
            self._write(header)
        except (OSError, RecordError):
            self.close()
            raise

    def _lock(self) -> None:
        """Lock the file against other writers; the lock ends with this process, even if it is killed."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RecordError(
                f"{self.path}: another replay is writing it; wait for its end, or give another --output"
            ) from error
        except OSError:
            return  # a file system without locks

    def _continue(self, header: RunHeader) -> None:
        """Take over what a run before has written, and go to the end of its last whole line."""
        content = self.path.read_bytes()
        end = content.rfind(b"\n") + 1
        if end:
            self._check(header)
            self.count = len(self.recorded)
            self.ok = sum(record.ok for record in self.recorded.values())
            header.options = header.options | {"resumed_after_requests": self.count}
        # A crash may have left an incomplete last line.
        self._file.seek(end)
        self._file.truncate()

    def _check(self, header: RunHeader) -> None:
        run = read_run(self.path)
        compared: list[tuple[str, object, object]] = [("--endpoint", _root(run.header), _root(header))]
        compared += [(given, getattr(run.header, name), getattr(header, name)) for name, given in _SAME.items()]
        compared += [
            (given, run.header.options.get(name), header.options.get(name)) for name, given in _SAME_OPTIONS.items()
        ]
        for name, before, now in compared:
            if before != now:
                raise RecordError(
                    f"{self.path}: was made with {name} {_shown(before)}, now {_shown(now)}; resume with the same "
                    "settings, or give another --output"
                )
        if run.end is not None and run.incomplete:
            raise RecordError(f"{self.path}: {run.incomplete}; it cannot be resumed, replay again to another --output")
        if run.end is not None:
            raise RecordError(f"{self.path}: is complete ({counted(run.end.requests, 'request')}); nothing to resume")
        self.recorded = {record.request_id: record for record in run.records}

    def _write(self, item: RunHeader | RequestRecord | RunEnd) -> None:
        try:
            self._file.write(encode_line(item))
            self._file.flush()
        except OSError as error:
            self._broken = True
            raise RecordError(
                f"{self.path}: cannot be written ({error.strerror}); it has {counted(self.count, 'record')}, "
                "continue with --resume once that is fixed"
            ) from error

    def add(self, record: RequestRecord) -> None:
        """Write one request's record. Raises RecordError: it cannot be written."""
        self._write(record)
        self.count += 1
        self.ok += record.ok

    def finish(self, finished_unix_s: float) -> None:
        """Write the line that marks the run complete. Raises RecordError: it cannot be written."""
        self._write(RunEnd(finished_unix_s=finished_unix_s, requests=self.count, ok=self.ok))

    def close(self) -> None:
        """Close the file."""
        try:
            self._file.close()
        except OSError:
            if not self._broken:  # else it is the rest of the line that was refused before
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _root(header: RunHeader) -> str:
    """The endpoint without ``/v1``, which it may be given with or without."""
    return header.endpoint.rstrip("/").removesuffix("/v1")


def _shown(value: object) -> str:
    return "not set" if value is None else str(value)
