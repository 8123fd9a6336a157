"""Flags of `warmroute serve` that name an admission rule and its parameters, or shadow policies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import proxy.server
from proxy.cli import register
from proxy.settings import Settings


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Settings with which the proxy would have been started."""
    started: list[Settings] = []

    def run(settings: Settings, _: Callable[[], Settings]) -> None:
        started.append(settings)

    monkeypatch.setattr(proxy.server, "run", run)
    return started


def serve(*flags: str) -> Any:
    app = typer.Typer()
    register(app)
    return CliRunner().invoke(app, ["serve", "--instance", "http://127.0.0.1:8000", *flags])


def test_rule_and_parameters_are_settings(served: list[Settings]) -> None:
    flags = ("--admission", "session_cap", "--admission-param", "sessions=3", "--admission-param", "keep_s=0.5")
    assert serve(*flags).exit_code == 0
    assert serve().exit_code == 0
    assert served[0].admission.params == {"sessions": 3, "keep_s": 0.5}
    assert [settings.admission.name for settings in served] == ["session_cap", "working_set"]


def test_the_access_log_is_a_setting(served: list[Settings]) -> None:
    assert serve("--access-log", "-").exit_code == 0
    assert serve().exit_code == 0
    assert [settings.logs.access for settings in served] == ["-", None]


def test_shadow_policies_are_settings(served: list[Settings]) -> None:
    assert serve("--shadow", "lmetric", "--shadow", "warm").exit_code == 0
    assert [each.name for each in served[0].shadow.policies] == ["lmetric", "warm"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--shadow", "lmetrik"), "unknown routing policy 'lmetrik'"),
        (("--admission", "sometimes"), "unknown admission rule 'sometimes'"),
        (("--admission", "session_cap", "--admission-param", "sessions"), "KEY=VALUE"),
        (("--admission", "session_cap", "--admission-param", "sessions=many"), "sessions must be an integer"),
        (("--admission", "session_cap", "--admission-param", "sessions=[1"), "not YAML"),
    ],
)
def test_what_names_no_rule_or_parameter_is_refused(served: list[Settings], flags: tuple[str, ...], says: str) -> None:
    answer = serve(*flags)
    assert (answer.exit_code, served) == (2, [])
    assert says in " ".join(answer.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("file:/etc/fleet.yaml", ("file", "/etc/fleet.yaml", None, None)),
        ("dns:engines.internal:8000", ("dns", None, "engines.internal", 8000)),
        ("srv:_http._tcp.engines", ("dns", None, "_http._tcp.engines", None)),
        ("kubernetes:app=engine,tier=a", ("kubernetes", None, None, None)),
        ("ray:demo", ("ray", None, None, None)),
    ],
)
def test_a_source_of_discovery_is_a_setting(served: list[Settings], flag: str, expected: tuple[Any, ...]) -> None:
    assert serve("--discovery", flag).exit_code == 0
    found = served[0].discovery
    path = None if found.file.path is None else str(found.file.path)
    assert (found.source, path, found.dns.name, found.engine.port) == expected
    assert found.kubernetes.selector == ("app=engine,tier=a" if found.source == "kubernetes" else None)
    assert found.ray.fleet == ("demo" if found.source == "ray" else None)
    assert found.dns.srv is flag.startswith("srv:")


@pytest.mark.parametrize("wrong", ["files:x", "file:", "dns:name", "static:x", "kubernetes:"])
def test_a_source_of_another_form_is_refused_with_the_forms(served: list[Settings], wrong: str) -> None:
    answer = serve("--discovery", wrong)
    assert answer.exit_code == 2
    assert "dns:NAME:PORT" in " ".join(answer.output.split())
