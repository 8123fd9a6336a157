"""Environments of the clients: ``python -m tests.clients.extra.environments [NAME ...]``, as in ``make test-clients``.

Everything is pinned and hashed by the files in ``locks/``. An environment is made again only when its lock has changed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from uv import find_uv_bin

ROOT = Path(__file__).parents[3]
LOCKS = Path(__file__).parent / "locks"
PYTHON = ("litellm", "langchain", "aiperf", "guidellm")
"""Virtual environments; the lock of each is ``locks/NAME.lock``."""
NODE = "node"
"""Programs from npm; the lock is ``locks/package-lock.json``."""
NAMES = (*PYTHON, NODE)
FOLDER_VARIABLE = "WARMROUTE_CLIENTS"

_INSTALL_S = 600


class ClientInstallError(RuntimeError):
    """An environment could not be made; the message has the failed command."""


def folder_of(name: str) -> Path:
    """Folder of one environment, whether it exists or not."""
    return Path(os.environ.get(FOLDER_VARIABLE) or ROOT / ".venv-clients").absolute() / name


def missing(name: str) -> str | None:
    """Reason why an environment cannot be used as it is; None if it is ready."""
    stamp = folder_of(name) / ".stamp"
    if not stamp.is_file():
        return f"no environment at {folder_of(name)}; run `make test-clients`"
    if stamp.read_text(encoding="utf-8") != _digest(name):
        return f"{folder_of(name)} was made from another lock; run `make test-clients`"
    return None


def make(name: str) -> None:
    """Make one environment, unless it is up to date.

    Raises:
        ClientInstallError: a command failed.
    """
    if missing(name) is None:
        print(f"{name}: up to date", flush=True)
        return
    started_s = time.monotonic()
    folder = folder_of(name)
    shutil.rmtree(folder, ignore_errors=True)
    if name == NODE:
        folder.mkdir(parents=True)
        for file in ("package.json", "package-lock.json"):
            shutil.copy(LOCKS / file, folder)
        # No scripts: the programs of the platform's own packages are started as they are.
        _run(_npm(), "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error", folder=folder)
    else:
        uv = str(find_uv_bin())
        _run(uv, "venv", "--quiet", "--no-python-downloads", "--python", sys.executable, str(folder))
        pip = (uv, "pip", "install", "--quiet", "--python", str(folder / "bin" / "python"), "--no-deps")
        _run(*pip, "--require-hashes", "--requirements", str(LOCKS / f"{name}.lock"))
    (folder / ".stamp").write_text(_digest(name), encoding="utf-8")
    print(f"{name}: ready in {time.monotonic() - started_s:.0f} s", flush=True)


def relock() -> None:
    """Write all locks again from the ``.in`` files and ``package.json``: hashes, and no registry named.

    Raises:
        ClientInstallError: a command failed.
    """
    for name in PYTHON:
        command = (str(find_uv_bin()), "pip", "compile", f"{name}.in", "--universal", "--python-version", "3.11")
        options = ("--generate-hashes", "--no-emit-index-url", "--no-annotate", "--no-header", "--quiet", "--upgrade")
        _run(*command, *options, "--output-file", f"{name}.lock", folder=LOCKS)
    npm = (_npm(), "install", "--package-lock-only", "--ignore-scripts", "--omit-lockfile-registry-resolved")
    _run(*npm, "--no-audit", "--no-fund", folder=LOCKS)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients.extra.environments", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)} (default: all)")
    parser.add_argument("--relock", action="store_true", help="only write the locks again")
    chosen = parser.parse_args(arguments)
    unknown = sorted(set(chosen.names) - set(NAMES))
    if unknown:
        parser.error(f"no such environment: {', '.join(unknown)}")
    try:
        if chosen.relock:
            relock()
            return 0
        for name in chosen.names or NAMES:
            if name == NODE and shutil.which("npm") is None:
                print("node: npm is not installed; the tests of Claude Code and Codex are skipped", flush=True)
                continue
            make(name)
    except ClientInstallError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _digest(name: str) -> str:
    """Hash of what an environment is made from."""
    lock = LOCKS / ("package-lock.json" if name == NODE else f"{name}.lock")
    return hashlib.sha256(sys.version.encode() + lock.read_bytes()).hexdigest()


def _npm() -> str:
    npm = shutil.which("npm")
    if npm is None:
        raise ClientInstallError("npm is not installed")
    return npm


def _run(*command: str, folder: Path = ROOT) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    done = subprocess.run(command, cwd=folder, env=environment, timeout=_INSTALL_S, check=False)
    if done.returncode:
        raise ClientInstallError(f"exit status {done.returncode} from: {' '.join(command)}")


if __name__ == "__main__":
    sys.exit(main())
