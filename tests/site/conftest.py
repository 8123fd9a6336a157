"""Fixtures of the tests of documentation."""

from __future__ import annotations

from tests.proxy.conftest import start_proxy

__all__ = ["start_proxy"]  # a fixture of these tests as well
