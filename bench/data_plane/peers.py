"""The peers: ``python -m bench.data_plane.peers`` installs them into their own virtual environment, pinned by hash.

``requirements-peers.txt`` is written from ``requirements-peers.in`` by::

    uv pip compile bench/data_plane/requirements-peers.in --python-version 3.11 --generate-hashes \\
      --no-emit-index-url --no-annotate --no-header --output-file bench/data_plane/requirements-peers.txt
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path
from typing import Annotated

import typer

REPOSITORY = Path(__file__).resolve().parents[2]
PEERS_VENV = REPOSITORY / ".venv-peers"
PEERS_BIN = PEERS_VENV / "bin"
REQUIREMENTS = Path(__file__).with_name("requirements-peers.txt")


def peer_version(name: str, requirements: Path = REQUIREMENTS) -> str:
    """The pinned version of a peer. Raises KeyError for one that is not pinned."""
    for line in requirements.read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}=="):
            return line.removeprefix(f"{name}==").split()[0]
    raise KeyError(name)


def main(
    venv_folder: Annotated[Path, typer.Option("--venv", help="Virtual environment to install them into.")] = PEERS_VENV,
) -> None:
    """Install vLLM Router and SGLang's gateway (wheels for Linux) into their own virtual environment."""
    python = venv_folder / "bin" / "python"
    if not python.exists():
        venv.create(venv_folder, with_pip=True)
        (venv_folder / ".gitignore").write_text("*\n", encoding="utf-8")
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--require-hashes"]
    done = subprocess.run([*command, "--no-deps", "-r", str(REQUIREMENTS)], timeout=900, check=False)
    if done.returncode:
        typer.secho(
            "pip could not install the peers; their wheels are for Linux on x86-64 and arm64", fg="red", err=True
        )
        sys.exit(1)
    typer.echo(
        f"installed in {venv_folder}: {', '.join(f'{n} {peer_version(n)}' for n in ('vllm-router', 'sglang-router'))}"
    )


if __name__ == "__main__":
    typer.run(main)
