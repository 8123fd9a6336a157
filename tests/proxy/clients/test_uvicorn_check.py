"""The start-up check of uvicorn's private names."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import uvicorn
from typer.testing import CliRunner
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from proxy.clients.uvicorn_check import SUPPORTED, UnsupportedUvicornError, check_uvicorn
from warmroute import build

ROOT = Path(__file__).parents[3]


def test_the_locked_uvicorn_has_every_name() -> None:
    check_uvicorn()


def test_the_supported_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"uvicorn{SUPPORTED}" in project["dependencies"]


def test_a_missing_method_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(HttpToolsProtocol, "_start_asgi_task")
    with pytest.raises(UnsupportedUvicornError) as refused:
        check_uvicorn()
    assert str(refused.value) == (
        f"uvicorn {uvicorn.__version__} lacks HttpToolsProtocol._start_asgi_task, which the proxy's listener is built "
        f"on: pip install 'uvicorn{SUPPORTED}'"
    )


def test_a_missing_attribute_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def renamed(self: RequestResponseCycle) -> None:
        self.is_complete = False  # type: ignore[attr-defined]

    monkeypatch.setattr(RequestResponseCycle, "__init__", renamed)
    with pytest.raises(UnsupportedUvicornError, match=r"lacks .*RequestResponseCycle\.response_complete"):
        check_uvicorn()


def test_a_missing_class_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(httptools_impl, "HttpToolsProtocol")
    with pytest.raises(UnsupportedUvicornError, match=r"lacks uvicorn\.protocols\.http\.httptools_impl\.HttpTools"):
        check_uvicorn()


def test_serve_refuses_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(HttpToolsProtocol, "_unset_keepalive_if_required")
    result = CliRunner().invoke(build(), ["serve", "--instance", "http://127.0.0.1:1"])
    assert result.exit_code == 2
    assert "lacks HttpToolsProtocol._unset_keepalive_if_required" in result.output
    assert "pip install 'uvicorn" in result.output
