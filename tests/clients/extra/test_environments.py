"""The locks of the clients' environments, and when an environment is made again."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.clients.extra import environments

PINNED = re.compile(r"^([a-z0-9][a-z0-9._-]*)==\S+")


@pytest.mark.parametrize("name", environments.PYTHON)
def test_locks_pin_and_hash_everything_and_name_no_registry(name: str) -> None:
    text = (environments.LOCKS / f"{name}.lock").read_text(encoding="utf-8")
    packages = [line for line in text.splitlines() if line and not line.startswith((" ", "#"))]
    assert [line for line in packages if not PINNED.match(line)] == []
    assert "://" not in text
    assert text.count("--hash=sha256:") >= len(packages)
    asked = (environments.LOCKS / f"{name}.in").read_text(encoding="utf-8").splitlines()
    wanted = {re.sub(r"\[.*]", "", line) for line in asked if not line.startswith("#")}
    assert wanted <= {line.split(" ")[0] for line in packages}


def test_the_lock_of_npm_pins_and_hashes_everything_and_names_no_registry() -> None:
    text = (environments.LOCKS / "package-lock.json").read_text(encoding="utf-8")
    packages = {name: each for name, each in json.loads(text)["packages"].items() if name}
    assert "://" not in text
    assert all(each["integrity"].startswith("sha512-") for each in packages.values())
    asked = json.loads((environments.LOCKS / "package.json").read_text(encoding="utf-8"))["dependencies"]
    assert asked == {name: packages[f"node_modules/{name}"]["version"] for name in asked}


def test_an_environment_is_made_once_and_again_after_another_lock(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[str] = []

    def run(*command: str, folder: Path = tmp_path) -> None:
        ran.append(command[1])
        (tmp_path / "made" / "litellm").mkdir(parents=True, exist_ok=True)

    monkeypatch.setenv(environments.FOLDER_VARIABLE, str(tmp_path / "made"))
    monkeypatch.setattr(environments, "_run", run)
    assert "make test-clients" in str(environments.missing("litellm"))
    environments.make("litellm")
    environments.make("litellm")
    assert ran == ["venv", "pip"]
    assert environments.missing("litellm") is None
    other = tmp_path / "locks"
    other.mkdir()
    (other / "litellm.lock").write_text("other==1.0", encoding="utf-8")
    monkeypatch.setattr(environments, "LOCKS", other)
    assert "another lock" in str(environments.missing("litellm"))


def test_a_failed_command_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*command: str, folder: Path = tmp_path) -> None:
        raise environments.ClientInstallError(f"exit status 1 from: {command[1]}")

    monkeypatch.setenv(environments.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(environments, "_run", fail)
    assert environments.main(["litellm"]) == 1
    assert "error: exit status 1 from: venv" in capsys.readouterr().err
    assert environments.missing("litellm")
    with pytest.raises(SystemExit):
        environments.main(["unknown"])
    assert "no such environment: unknown" in capsys.readouterr().err


def test_without_npm_the_node_programs_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert environments.main(["node"]) == 0
    assert "npm is not installed" in capsys.readouterr().out
