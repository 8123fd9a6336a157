"""The package itself: its files, and its commands in fresh environments, run from an unrelated folder."""

from __future__ import annotations

import tarfile
import zipfile
from contextlib import ExitStack
from email import message_from_string

import pytest

import warmroute
from tests.package.conftest import PYTHONS, ROOT, Built, Installation, free_ports, install, wait_for

pytestmark = [pytest.mark.package, pytest.mark.first, pytest.mark.timeout(600)]


def shipped() -> set[str]:
    """Files of the source tree that a wheel has."""
    files = {path for name in warmroute.PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()}
    kept = {path for path in files if "__pycache__" not in path.parts and path.suffix != ".pyc"}
    return {
        "warmroute.py",
        "warmroute_man.py",
        "warmroute_names.py",
        "warmroute_tls.py",
        "warmroute_yaml.py",
        *(path.relative_to(ROOT).as_posix() for path in kept),
    }


# files


def test_the_wheel_has_the_packages_with_their_data_and_nothing_else(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == shipped()
    for needed in (
        "configs/demo.yaml",
        "configs/fleets/sim-4x.yaml",
        "configs/hardware/h20.yaml",
        "launch/cpu_engine/plugin/pyproject.toml",
        "launch/cpu_engine/requirements.lock",
        "proxy/py.typed",
    ):
        assert needed in names
    assert [name for name in names if name.startswith("tests/")] == []
    assert any(name.endswith("/report.html.j2") for name in names)


def test_the_metadata_name_license_extras_and_command(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        info = f"warmroute-{warmroute.__version__}.dist-info"
        metadata = message_from_string(wheel.read(f"{info}/METADATA").decode())
        license_text = wheel.read(f"{info}/licenses/LICENSE").decode()
        entry_points = wheel.read(f"{info}/entry_points.txt").decode()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Apache License" in license_text
    assert set(metadata.get_all("Provides-Extra", [])) >= {"lab", "tokenizer", "engines", "ray", "otel", "redis"}
    assert entry_points.split() == ["[console_scripts]", "warmroute", "=", "warmroute:main"]


def test_the_source_distribution_has_what_make_test_needs(built: Built) -> None:
    with tarfile.open(built.sdist) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert shipped() <= names
    expected = {"LICENSE", "Makefile", "README.md", "SECURITY.md", "pyproject.toml", "requirements.lock"}
    assert expected <= names
    assert {"tests/conftest.py", "docs/architecture.md"} <= names


# everything that the extra `lab` brings


@pytest.fixture(scope="module", params=PYTHONS)
def lab(request: pytest.FixtureRequest, built: Built, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    return install(built, tmp_path_factory.mktemp("lab"), request.param, "[lab]")


def test_the_version_is_that_of_the_source(lab: Installation) -> None:
    assert lab.run("--version").stdout == f"warmroute {warmroute.__version__}\n"


def test_a_served_fleet_is_replayed_and_reported(lab: Installation) -> None:
    *engines, port = free_ports(3)
    urls = [f"http://127.0.0.1:{engine}" for engine in engines]
    proxy = f"http://127.0.0.1:{port}"
    made = lab.run(
        "trace", "synth", "-o", "trace.jsonl", "--requests", "40", "--length-scale", "0.1", "--rate-per-s", "4"
    )
    assert made.returncode == 0, made.stderr
    with ExitStack() as stack:
        for engine in engines:
            log = stack.enter_context(
                lab.running("sim", "engine", "--port", str(engine), "--role", "none", "--engine-speed", "20")
            )
        for url in urls:
            wait_for(f"{url}/health", log)
        named = [part for url in urls for part in ("--instance", url)]
        log = stack.enter_context(lab.running("serve", "--port", str(port), *named))
        wait_for(f"{proxy}/ready", log)
        replayed = lab.run("replay", "trace.jsonl", "--endpoint", proxy, "--arrival-speed", "20", "-o", "run.jsonl")
        assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    reported = lab.run("report", "run.jsonl", "-o", "report.html")
    assert reported.returncode == 0, reported.stdout + reported.stderr
    assert "<svg" in (lab.folder / "report.html").read_text(encoding="utf-8")


def test_shipped_fleets_are_found_by_name(lab: Installation) -> None:
    done = lab.run("up", "sim-4x", "--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "-m sim" in done.stdout
