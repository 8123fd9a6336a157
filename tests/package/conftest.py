"""The package as a user installs it: built once, installed into fresh environments."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from uv import find_uv_bin

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PYTHONS = ("3.11", "3.13")
"""Versions that the package is installed on: the oldest, and the newest that is tested."""
DECOYS = ("sim.py", "proxy.py", "launch.py", "replayer.py", "configs.py")
"""Files of the folder the commands run in; none of them may be imported."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what builds and installs the package unless it was asked for: it needs minutes and the registries."""
    if "package" in (config.getoption("markexpr") or "").split():
        return
    for item in items:
        if item.get_closest_marker("package") and HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="run by `make test-package`"))


class Built(NamedTuple):
    """The two files of a release."""

    wheel: Path
    sdist: Path


class Installation(NamedTuple):
    """An environment with the wheel, and the unrelated folder that its commands run in."""

    bin: Path
    folder: Path

    def run(self, *arguments: str, timeout_s: float = 150) -> subprocess.CompletedProcess[str]:
        """Run ``warmroute`` to its end."""
        return subprocess.run(
            [str(self.bin / "warmroute"), *arguments],
            cwd=self.folder,
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    @contextmanager
    def running(self, *arguments: str) -> Iterator[Path]:
        """Run ``warmroute`` meanwhile; gives the file that its output goes to."""
        log = self.folder / f"{arguments[0]}-{len(list(self.folder.glob('*.log')))}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [str(self.bin / "warmroute"), *arguments],
                cwd=self.folder,
                env=clean_environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                yield log
            finally:
                process.terminate()
                try:
                    process.wait(20)
                finally:
                    process.kill()


def clean_environment() -> dict[str, str]:
    """The environment without what would let a command find the source tree."""
    return {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}


def find_python(version: str) -> Path | None:
    """An interpreter of this version: this one, one on the path, or one that pyenv installed."""
    named = [Path(folder) / f"python{version}" for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    for python in (Path(sys.executable), *named, *sorted(pyenv.glob(f"{version}.*/bin/python"))):
        if python.exists() and _version(python) == version:
            return python
    return None


def _version(python: Path) -> str:
    program = "import sys; print('%d.%d' % sys.version_info[:2])"
    # A shim on the path may stand for a version that is not chosen: it fails.
    done = subprocess.run([str(python), "-c", program], capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def install(built: Built, folder: Path, version: str, extras: str = "") -> Installation:
    """A fresh environment with the wheel and what it requires, in the locked versions.

    Skips the test where there is no such interpreter.
    """
    python = find_python(version)
    if python is None:
        pytest.skip(f"no Python {version} on this machine")
    environment = folder / "environment"
    uv = find_uv_bin()
    _checked(uv, "venv", "--quiet", "--no-python-downloads", "--python", str(python), str(environment))
    constraints = ("--constraint", str(ROOT / "requirements.lock"))
    requirement = f"warmroute{extras} @ {built.wheel.as_uri()}"
    _checked(
        uv, "pip", "install", "--quiet", "--python", str(environment / "bin" / "python"), *constraints, requirement
    )
    unrelated = folder / "unrelated"
    unrelated.mkdir()
    for decoy in DECOYS:
        text = f"raise SystemExit('{decoy} of the current folder was imported')\n"
        (unrelated / decoy).write_text(text, encoding="utf-8")
    return Installation(environment / "bin", unrelated)


def free_ports(count: int) -> list[int]:
    """Ports to listen on, others in each process of pytest; below the range the kernel hands out itself."""
    found: list[int] = []
    first = 24_101 + 1_000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for port in range(first, first + 1_000):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise OSError("no free ports")


def wait_for(url: str, log: Path, *, bound_s: float = 150) -> None:
    """Wait until this answers with status 200."""
    ends_s = time.monotonic() + bound_s
    while not _answers(url):
        assert time.monotonic() < ends_s, f"{url}: no answer; {log.read_text(encoding='utf-8')}"
        time.sleep(0.2)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def _checked(*command: str) -> None:
    done = subprocess.run(
        command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Source distribution, and the wheel made from it; by the first process of pytest that needs them."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "dist"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # held for a build at most, which has a limit
        if not (folder / "built").exists():
            _checked(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT))
            (folder / "built").touch()
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return Built(wheel, sdist)
