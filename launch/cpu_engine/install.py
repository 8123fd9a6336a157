"""Install the CPU engines: ``python -m launch.cpu_engine.install --venv .venv-engines``, as in ``make engines``.

Five steps: system libraries, a virtual environment, the packages of ``requirements.lock``, the plug-in, the tiny model.
Each of the last three leaves a stamp in the environment and is repeated only when its inputs have changed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).parent
LOCK = HERE / "requirements.lock"
PLUGIN = HERE / "plugin"
PLUGIN_FILES = ("pyproject.toml", "warmroute_mooncake_cpu.py")
MODEL = "tiny-model"
"""Folder of the tiny model inside the environment."""

LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "libtcmalloc_minimal.so.4": "libtcmalloc-minimal4",
}
"""Shared library -> Debian package. Mooncake links to the first two; vLLM 0.18.1 needs the third preloaded."""

_PYTHON = (3, 11)
_DISK_BYTES = 9 * 10**9


class InstallError(RuntimeError):
    """The installation cannot continue; the message names the remedy."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m launch.cpu_engine.install", description=__doc__)
    parser.add_argument("--venv", type=Path, default=Path(".venv-engines"), help="environment (default .venv-engines)")
    parser.add_argument("--force", action="store_true", help="repeat every step")
    parser.add_argument("--relock", action="store_true", help="only regenerate requirements.lock from requirements.in")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.relock:
            relock()
        else:
            install(chosen.venv.absolute(), force=chosen.force)
    except InstallError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def install(venv: Path, *, force: bool = False) -> None:
    """Run the steps that are not up to date.

    Raises:
        InstallError: a step failed.
    """
    started_s = time.monotonic()
    check_platform(venv)
    python = venv / "bin" / "python"
    _step("system libraries", lambda: install_libraries(missing_libraries()))
    _step("environment", lambda: make_environment(venv))
    steps: list[tuple[str, str, Callable[[], None]]] = [
        ("packages", digest([LOCK]), lambda: install_packages(python)),
        ("plug-in", digest([PLUGIN / name for name in PLUGIN_FILES]), lambda: install_plugin(python)),
        ("tiny model", digest([LOCK, HERE / "tiny_model.py"]), lambda: make_model(python, venv / MODEL)),
    ]
    for name, made_from, work in steps:
        stamp = venv / f".{name.replace(' ', '-')}.stamp"
        if not force and stamp.is_file() and stamp.read_text() == made_from:
            print(f"{name}: up to date", flush=True)
            continue
        stamp.unlink(missing_ok=True)
        _step(name, work)
        stamp.write_text(made_from)
    print(f"CPU engines ready in {venv} ({time.monotonic() - started_s:.0f} s)", flush=True)


def check_platform(venv: Path) -> None:
    """Check the requirements before the first step.

    Raises:
        InstallError: wrong system, processor or Python, or too little disk space.
    """
    machine = os.uname().machine
    if sys.platform != "linux" or machine != "x86_64":
        raise InstallError(f"the CPU engines need Linux on x86_64, this is {sys.platform} on {machine}")
    if sys.version_info[:2] != _PYTHON:
        wanted = ".".join(map(str, _PYTHON))
        raise InstallError(
            f"the lock is for Python {wanted}, this is {sys.version.split()[0]}: "
            f"make .venv with it (make PYTHON=/path/to/python{wanted} setup) and try again"
        )
    free = shutil.disk_usage(next(folder for folder in (venv, *venv.parents) if folder.is_dir())).free
    if free < _DISK_BYTES and not (venv / ".packages.stamp").exists():
        raise InstallError(f"{venv}: {free / 1e9:.1f} GB free, about {_DISK_BYTES / 1e9:.0f} GB needed")


def missing_libraries() -> list[str]:
    """Debian packages of the system libraries that the loader does not find."""
    return [package for library, package in LIBRARIES.items() if not _loads(library)]


def _loads(library: str) -> bool:
    # In a child: an allocator loaded into this process could not be unloaded again.
    probe = f"import ctypes; ctypes.CDLL({library!r})"
    child = subprocess.run([sys.executable, "-I", "-c", probe], check=False, capture_output=True, timeout=60)
    return child.returncode == 0


def install_libraries(packages: Sequence[str]) -> None:
    """Install Debian packages, if permitted.

    Raises:
        InstallError: not permitted, or apt-get failed.
    """
    if not packages:
        return
    command = f"apt-get install --yes --no-install-recommends {' '.join(packages)}"
    if shutil.which("apt-get") is None:
        raise InstallError(
            f"these Debian packages are missing (install them or their libraries): {', '.join(packages)}"
        )
    if os.geteuid() != 0:
        raise InstallError(f"system libraries are missing; run this as root and try again:\n  {command}")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    _run(["apt-get", "update", "--quiet=2"], env=quiet)
    _run([*command.split(), "--quiet=2"], env=quiet)
    still = missing_libraries()
    if still:
        raise InstallError(f"apt-get installed {', '.join(packages)}, but the loader still lacks: {', '.join(still)}")


def make_environment(venv: Path) -> None:
    """Create an empty virtual environment with this Python, unless there is one."""
    python = venv / "bin" / "python"
    if python.exists():
        return
    _run([_uv(), "venv", "--quiet", "--clear", "--no-python-downloads", "--python", sys.executable, str(venv)])


def install_packages(python: Path) -> None:
    """Install the lock's packages, by hash, and nothing else.

    Not ``uv pip sync``: this step must not remove the plug-in, which the lock does not list.
    """
    pip = [_uv(), "pip", "install", "--quiet", "--python", str(python), "--no-deps", "--require-hashes"]
    _run([*pip, "--requirements", str(LOCK)])


def install_plugin(python: Path) -> None:
    """Install our plug-in, built with the setuptools of the lock, so that nothing unpinned is fetched."""
    pip = [_uv(), "pip", "install", "--quiet", "--python", str(python), "--no-deps", "--no-build-isolation"]
    with tempfile.TemporaryDirectory() as copy:  # setuptools writes beside its sources
        for name in PLUGIN_FILES:
            shutil.copy(PLUGIN / name, copy)
        _run([*pip, "--reinstall", copy])


def make_model(python: Path, folder: Path) -> None:
    """Make the tiny model with the engines' own Python."""
    root = HERE.parents[1]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(root)}
    _run([str(python), "-m", "launch.cpu_engine.tiny_model", str(folder)], env=offline)


def relock() -> None:
    """Resolve ``requirements.in`` again and write ``requirements.lock``: versions and hashes, no registry named."""
    command = [_uv(), "pip", "compile", str(HERE / "requirements.in"), "--override", str(HERE / "overrides.txt")]
    command += ["--python-version", ".".join(map(str, _PYTHON)), "--python-platform", "x86_64-manylinux_2_28"]
    command += ["--generate-hashes", "--no-emit-index-url", "--no-annotate", "--no-header", "--quiet", "--upgrade"]
    _run([*command, "--output-file", str(LOCK)])


def digest(files: Sequence[Path]) -> str:
    """Hash of a step's inputs: file names, their contents, and the Python in use."""
    sha = hashlib.sha256(sys.version.encode())
    for path in files:
        sha.update(path.name.encode() + b"\0" + path.read_bytes())
    return sha.hexdigest()


def _uv() -> str:
    from uv import find_uv_bin

    try:
        return str(find_uv_bin())
    except FileNotFoundError as error:
        raise InstallError(f"uv is not installed beside {sys.executable}: run `make setup`") from error


def _step(name: str, work: Callable[[], None]) -> None:
    print(f"{name} ...", flush=True)
    started_s = time.monotonic()
    work()
    print(f"{name}: done in {time.monotonic() - started_s:.1f} s", flush=True)


def _run(command: list[str], env: dict[str, str] | None = None) -> None:
    """Run a command with its output shown.

    Raises:
        InstallError: it failed.
    """
    code = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, check=False).returncode
    if code:
        raise InstallError(f"exit status {code} from: {' '.join(command)}")


if __name__ == "__main__":
    sys.exit(main())
