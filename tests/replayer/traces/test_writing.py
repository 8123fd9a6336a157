"""Trace files appear when they are complete."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from replayer.traces.formats import bailian
from replayer.traces.loading import load
from replayer.traces.synth import SynthOptions, synthetic_trace
from replayer.traces.trace import TraceRequest
from tests.full_disk import limited_to

REPOSITORY = Path(__file__).resolve().parents[3]
REQUESTS = synthetic_trace(SynthOptions(requests=40, seed=3, length_scale=0.1)).requests


def cut() -> Iterator[TraceRequest]:
    """Requests that end with Ctrl-C."""
    yield from REQUESTS[:20]
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz", "trace.jsonl.zst"])
def test_half_a_trace_is_not_left_behind(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with pytest.raises(KeyboardInterrupt):
        bailian.write(path, cut())
    assert list(tmp_path.iterdir()) == []
    bailian.write(path, REQUESTS)
    with pytest.raises(KeyboardInterrupt):
        bailian.write(path, cut())
    with limited_to(100), pytest.raises(OSError, match=name):
        bailian.write(path, REQUESTS)
    assert list(tmp_path.iterdir()) == [path]
    assert load(path).requests == REQUESTS


PROGRAM = """
import os, signal, sys
from replayer.traces.formats import bailian

to_row, stop = bailian.to_row, int(sys.argv.pop())

def stopping(request):
    os.kill(os.getpid(), stop)
    return to_row(request)

bailian.to_row = stopping
import warmroute
warmroute.main()
"""


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("command", ["synth", "sample", "repeat"])
def test_a_command_that_is_stopped_leaves_no_file(tmp_path: Path, command: str, stop: signal.Signals) -> None:
    bailian.write(trace := tmp_path / "trace.jsonl", REQUESTS)
    given = [] if command == "synth" else [str(trace)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "trace", command, *given, "-o", str(tmp_path / "out.jsonl"), str(int(stop))],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (128 + stop, "")
    assert list(tmp_path.iterdir()) == [trace]


def test_the_folder_of_a_trace_is_made(tmp_path: Path) -> None:
    bailian.write(path := tmp_path / "new folder" / "trâce" / "trace.jsonl", REQUESTS)
    assert load(path).requests == REQUESTS


def test_links_and_pipes_stay_what_they_are(tmp_path: Path) -> None:
    (link := tmp_path / "link.jsonl").symlink_to(tmp_path / "real.jsonl")
    bailian.write(link, REQUESTS)
    assert link.is_symlink()
    assert load(tmp_path / "real.jsonl").requests == REQUESTS
    os.mkfifo(pipe := tmp_path / "pipe")
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        bailian.write(pipe, REQUESTS[:1])
        assert os.read(reading, 10)
    finally:
        os.close(reading)
    assert pipe.is_fifo()


@pytest.mark.parametrize("redirected", [True, False])
def test_a_trace_can_be_written_to_the_standard_output(tmp_path: Path, redirected: bool) -> None:
    program = (
        "from pathlib import Path; from replayer.traces.formats import bailian; "
        "from tests.replayer.traces.test_writing import REQUESTS; bailian.write(Path('/dev/stdout'), REQUESTS[:2])"
    )
    with (path := tmp_path / "out").open("wb") as file:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=file if redirected else subprocess.PIPE, cwd=REPOSITORY, check=True
        )
    written = path.read_bytes() if redirected else done.stdout
    assert len(written.splitlines()) == 2
    assert list(tmp_path.iterdir()) == [path]
