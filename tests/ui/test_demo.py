"""The first minute of a newcomer: ``warmroute demo --ui``, its address in a browser, Ctrl-C."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Browser, expect

from launch.run.state import read_state
from tests.integration.fleet import ROOT
from tests.launch.conftest import free_base

pytestmark = [pytest.mark.ui, pytest.mark.timeout(180)]
_ADDRESS = re.compile(r"Dashboard: (http://\S+/ui/)#key=(wr-[\w-]+)")


def test_a_newcomer_sees_live_decisions_within_a_minute(browser: Browser, tmp_path: Path) -> None:
    run_dir, log = tmp_path / "demo", tmp_path / "demo.log"
    command = [sys.executable, "-m", "launch", "demo", "--ui", "--output", str(run_dir), "--base-port"]
    began_s = time.monotonic()
    with log.open("wb") as output:
        demo = subprocess.Popen([*command, str(free_base())], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    try:
        while (found := _ADDRESS.search(log.read_text())) is None:
            assert demo.poll() is None, log.read_text()
            assert time.monotonic() - began_s < 60, log.read_text()
            time.sleep(0.2)
        processes = [psutil.Process(process.pid) for process in read_state(run_dir).running]
        assert len(processes) == 9
        with browser.new_context() as context:
            page = context.new_page()
            page.goto(f"{found[1]}#key={found[2]}")
            expect(page.locator("#map .card")).to_have_count(8, timeout=15_000)
            page.keyboard.press("2")
            expect(page.locator("#page-decisions tbody tr").nth(3)).to_be_visible(timeout=40_000)
            # The key of the address permits draining.
            page.keyboard.press("6")
            page.locator('[data-drain="inst-7"]').click()
            page.locator("#confirm").click()
            expect(page.locator('[data-drain="inst-7"]')).to_have_text("Undrain")
    finally:
        demo.send_signal(signal.SIGINT)
        demo.wait(timeout=60)
    assert demo.returncode == 130, log.read_text()
    assert not [process for process in processes if process.is_running()]
