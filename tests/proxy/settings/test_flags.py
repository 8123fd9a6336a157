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


def test_an_engine_with_ranks_is_an_instance_for_each(served: list[Settings]) -> None:
    flags = ("--instance", "http://h:8001,data_parallel_size=2,name=big,events_url=tcp://h:5557")
    assert serve(*flags).exit_code == 0
    assert [(each.name, each.url, each.events_url) for each in served[0].instances] == [
        ("127.0.0.1:8000", "http://127.0.0.1:8000", None),
        ("big/0", "http://h:8001", "tcp://h:5557"),
        ("big/1", "http://h:8001", "tcp://h:5558"),
    ]


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("http://h:8001,ranks=2", "'ranks=2': give KEY=VALUE after the URL's comma, KEY one of name, bootstrap_url"),
        ("http://h:8001,2", "'2': give KEY=VALUE"),
        ("http://h:8001,http://h:8002", "each engine has an --instance"),
        ("http://h:8001,", "'': give KEY=VALUE"),
        ("http://h:8001,url=http://h:8002", "url is given twice"),
        ("http://h:8001,name=a,name=b", "'name=b': name is given twice"),
        ("http://h:8001,api_key=secret", "give api_key_env"),
        ("http://h:8001,data_parallel_size=two", "data_parallel_size: Input should be a valid integer"),
        ("http://h:8001,data_parallel_size=0", "data_parallel_size: Input should be greater than or equal to 1"),
        ("http://h:8001,data_parallel_size=2,events_url=ipc:///e", "give the tcp endpoint of rank 0"),
        ("data_parallel_size=2", "is not an http:// or https:// URL"),
    ],
)
def test_what_is_no_engine_is_refused(served: list[Settings], flag: str, says: str) -> None:
    answer = serve("--instance", flag)
    assert (answer.exit_code, served) == (2, [])
    assert says in " ".join(answer.output.replace("│", " ").split())
    assert "secret" not in answer.output


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
