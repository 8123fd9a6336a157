"""Output files of commands: refused where a command also reads them, replaced in one step, removed on signals."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO

_OPENED = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/")
_BEGIN_BYTES = 1024
_REPORT = b'<meta name="generator" content="warmroute report">'
"""In the first bytes of every report."""


class OverwritesInputError(ValueError):
    """The output is one of the inputs."""


class ExistingOutputError(ValueError):
    """The output exists already."""


def refuse_inputs(output: Path, inputs: Iterable[Path]) -> None:
    """Refuse an output that is one of the inputs, by whatever path or link.

    Args:
        output: file to write.
        inputs: files that are read, or folders whose files are; missing ones are left to their readers.

    Raises:
        OverwritesInputError: it is one of them.
        OSError: a path cannot be looked up.
    """
    # Only regular files: a terminal may well be both input and output.
    if not output.is_file():
        return
    for given in inputs:
        for path in given.rglob("*") if given.is_dir() else [given]:
            if path.is_file() and output.samefile(path):
                same = "" if output == path else f" (the same file as {path})"
                raise OverwritesInputError(f"{output}{same} is an input and would be overwritten; give another output")


def refuse_existing(output: Path) -> None:
    """Refuse an output that exists and has content; pipes, devices and what the process has open are none of these.

    Raises:
        ExistingOutputError: it does.
        OSError: the path cannot be looked up.
    """
    if output.is_file() and not str(output).startswith(_OPENED) and output.stat().st_size:
        raise ExistingOutputError(f"{output}: already exists; give another name, or remove it")


def refuse_other_than_report(output: Path) -> None:
    """Refuse an output that exists and is neither empty nor an earlier report, so that no measured run or page is lost.

    Raises:
        ExistingOutputError: it is another file.
        OSError: it cannot be read.
    """
    if not output.is_file() or str(output).startswith(_OPENED):
        return
    with output.open("rb") as file:
        begin = file.read(_BEGIN_BYTES)
    if begin and _REPORT not in begin:
        raise ExistingOutputError(
            f"{output}: already exists and was not written by warmroute report; give another name, or remove it"
        )


@contextmanager
def replacing(path: Path, *, new: bool = False) -> Iterator[IO[bytes]]:
    """Open a file that takes the place of ``path`` when the block ends; a block that fails leaves the old one, or none.

    What is not a regular file, such as a pipe, and what the process has open as ``/dev/stdout``, is written directly.

    Args:
        path: the file.
        new: it must not exist when the block ends: another process may have made it meanwhile.

    Raises:
        FileExistsError: it is to be new and exists.
        OSError: it cannot be written, with its path.
    """
    direct = path.exists() and (not path.is_file() or str(path).startswith(_OPENED))
    # A link to a pipe resolves to a name without a file, so only others are resolved.
    target = path if direct else Path(os.path.realpath(path))
    written = target if direct else target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with written.open("wb") as file:
            yield file
        if not direct:
            if new and os.path.lexists(target):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
            written.replace(target)
    except BaseException as error:
        if not direct:
            with suppress(OSError):
                written.unlink(missing_ok=True)
        # An error of write() has no path, one of open() that of the file beside it.
        if isinstance(error, OSError) and error.filename in (None, str(written)):
            raise OSError(error.errno, error.strerror or str(error), str(path)) from error
        raise


def not_written(error: OSError, output: Path, option: str = "--output") -> str:
    """Text for a user about an output that cannot be written, with the option that names it."""
    return f"cannot write {error.filename or output}: {error.strerror or error}; choose another {option}"


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Let the first SIGTERM or SIGHUP raise SystemExit in the block, as Ctrl-C raises KeyboardInterrupt: clean-up runs.

    The exit code is 128 + the signal's number. For the main thread; a signal that is ignored (nohup) stays so.
    """
    signals = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) != signal.SIG_IGN]

    def stop(signum: int, _: FrameType | None) -> None:
        for each in signals:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + signum)

    before = {each: signal.signal(each, stop) for each in signals}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
