"""Pages of the live dashboard in headless Chromium."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.ui.rig import KEY, LiveProxy, Traffic, live_proxy

# A page that has lost the proxy tries again up to 5 s later, which is Playwright's default. The timeout of a context
# does not apply to `expect`.
expect.set_options(timeout=20_000)

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
OpenPage = Callable[..., Page]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is on the PATH: `make browser` installs one")
    with sync_playwright() as playwright:
        # Nothing but pages of the test is opened, so the sandbox, which root cannot use, is not needed.
        running = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        try:
            yield running
        finally:
            running.close()


@pytest.fixture(scope="session")
def proxy(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Iterator[LiveProxy]:
    """A proxy with four engines and traffic."""
    assert browser.is_connected()
    with live_proxy(tmp_path_factory.mktemp("ui")) as running, Traffic(running):
        yield running


@pytest.fixture
def open_page(browser: Browser, proxy: LiveProxy) -> Iterator[OpenPage]:
    """``open_page("#/fleet")``: a page of the dashboard, with the admin key.

    Afterwards: no request left the proxy, no script failed, and nothing was refused by the content security policy.
    """
    contexts: list[BrowserContext] = []
    requested: list[str] = []
    errors: list[str] = []

    def opened(where: str = "#/fleet", *, key: bool = True, path: str = "/ui/", scheme: str = "light") -> Page:
        context = browser.new_context(
            viewport={"width": 1360, "height": 850},
            color_scheme="dark" if scheme == "dark" else "light",
            timezone_id="UTC",
        )
        contexts.append(context)
        context.set_default_timeout(15_000)
        page = context.new_page()
        page.on("request", lambda request: requested.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if "Security Policy" in message.text else None)
        if key:
            context.add_init_script(f"sessionStorage.setItem('warmroute-admin-key', '{KEY}')")
        page.goto(f"{proxy.url}{path}{where}")
        return page

    try:
        yield opened
    finally:
        for context in contexts:
            context.close()
    assert requested
    assert [url for url in requested if not url.startswith((f"{proxy.url}/", "data:"))] == []
    assert errors == []


@pytest.fixture
def screenshot() -> Callable[[Page, str], None]:
    """Write a picture of the page to the folder in WARMROUTE_SCREENSHOTS, if that is set."""
    folder = os.environ.get("WARMROUTE_SCREENSHOTS")

    def take(page: Page, name: str) -> None:
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            page.evaluate("document.activeElement?.blur()")
            page.screenshot(
                path=Path(folder) / f"dashboard-{name}.png", clip={"x": 0, "y": 0, "width": 1360, "height": 720}
            )

    return take
