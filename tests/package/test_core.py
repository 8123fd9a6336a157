"""The package without extras, in a fresh environment: it serves, and names the extra of the commands that need one."""

from __future__ import annotations

import sys

import pytest

from tests.package.conftest import Built, Installation, free_ports, install, wait_for

pytestmark = [pytest.mark.package, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def core(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    return install(built, tmp_path_factory.mktemp("core"), f"{sys.version_info.major}.{sys.version_info.minor}")


def test_the_core_serves(core: Installation) -> None:
    assert core.run("serve", "--help").returncode == 0
    engine, port = free_ports(2)
    with core.running("serve", "--port", str(port), "--instance", f"http://127.0.0.1:{engine}") as log:
        wait_for(f"http://127.0.0.1:{port}/health", log)


@pytest.mark.parametrize("command", [("report", "a.jsonl", "b.jsonl"), ("replay", "a.jsonl"), ("demo",)])
def test_the_core_names_the_extra_of_a_command_that_needs_one(command: tuple[str, ...], core: Installation) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (core.folder / name).touch()
    done = core.run(*command)
    assert done.returncode == 2
    assert done.stderr.startswith("error: this command needs ")
    assert done.stderr.endswith("pip install 'warmroute[lab]'\n")
    assert len(done.stderr.splitlines()) == 1
