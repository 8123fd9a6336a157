"""Access, control, keyboard, themes, reconnecting, and texts of clients that try to be HTML."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from tests.ui.conftest import OpenPage
from tests.ui.rig import HOSTILE, KEY, LiveProxy, until

pytestmark = [pytest.mark.ui, pytest.mark.first, pytest.mark.timeout(180)]


def test_the_page_asks_for_the_key_and_keeps_it_for_the_tab(open_page: OpenPage) -> None:
    page = open_page(key=False)
    expect(page.locator("#status")).to_have_text("Key needed")
    expect(page.locator("#map .card")).to_have_count(0)
    page.get_by_role("button", name="Enter the key").click()
    page.locator("#key-field").fill("wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_have_text("Key needed")
    page.keyboard.press("k")
    page.locator("#key-field").fill(KEY)
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_have_text("Live")
    page.reload()
    expect(page.locator("#status")).to_have_text("Live")
    assert KEY not in page.url
    assert page.evaluate("localStorage.length + document.cookie.length") == 0


def test_a_key_in_the_address_is_taken_out_of_it(open_page: OpenPage) -> None:
    page = open_page(f"#key={KEY}", key=False)
    expect(page.locator("#status")).to_have_text("Live")
    assert page.url.endswith("/ui/#/fleet")


def test_a_key_that_is_not_percent_encoded_leaves_a_page_that_asks_for_another(open_page: OpenPage) -> None:
    page = open_page("#key=50%", key=False)
    expect(page.locator("#status")).to_have_text("Key needed")
    assert page.url.endswith("/ui/#/fleet")


def test_the_policy_is_switched_by_click(proxy: LiveProxy, open_page: OpenPage) -> None:
    before = proxy.get("/policy")
    page = open_page("#/control")
    page.locator("#policy").select_option("lmetric")
    page.locator("#planner").select_option("never")
    page.locator("#apply-policy").click()
    expect(page.locator(".toast")).to_contain_text("lmetric decides, planner never")
    now = proxy.get("/policy")
    assert (now["name"], now["planner"]) == ("lmetric", "never")
    expect(page.locator("#policy-line")).to_contain_text("Policy lmetric, planner never")
    page.locator("#policy-params").fill('{"no_such": 1}')
    page.locator("#apply-policy").click()
    expect(page.locator(".toast.bad")).to_contain_text("no_such")
    proxy.client.put(
        "/policy",
        json={
            "name": before["name"],
            "params": before["params"],
            "planner": before["planner"],
            "planner_params": before["planner_params"],
        },
    ).raise_for_status()


def test_an_instance_is_drained_and_undrained_by_click(proxy: LiveProxy, open_page: OpenPage) -> None:
    page = open_page("#/control")
    button = page.locator('[data-drain="engine-3"]')
    button.click()
    page.get_by_role("button", name="Cancel").click()
    assert proxy.get("/instances/engine-3")["draining"] is False
    button.click()
    page.locator("#confirm").click()
    expect(page.locator('[data-drain="engine-3"]')).to_have_text("Undrain")
    assert proxy.get("/instances/engine-3")["draining"] is True
    page.keyboard.press("1")
    expect(page.locator('[data-instance="engine-3"]')).to_contain_text("draining")
    page.locator('[data-instance="engine-3"]').click()
    page.locator('[data-drain="engine-3"]').click()
    expect(page.locator('[data-drain="engine-3"]')).to_have_text("Drain")
    assert proxy.get("/instances/engine-3")["draining"] is False


def test_without_the_key_nothing_can_be_changed(proxy: LiveProxy, open_page: OpenPage) -> None:
    page = open_page("#/control", key=False)
    expect(page.locator("#page-control")).to_contain_text("An admin key is needed")
    expect(page.locator("[data-drain]")).to_have_count(0)


def test_the_keyboard_is_enough(open_page: OpenPage) -> None:
    page = open_page()
    expect(page.locator("#status")).to_have_text("Live")
    titles = ["Fleet", "Decisions", "Hand-offs", "Shadow policies", "Health", "Control"]
    for number, title in enumerate(titles, 1):
        page.keyboard.press(str(number))
        expect(page.locator("h1")).to_have_text(title)
        expect(page.locator('nav [aria-current="page"]')).to_contain_text(title)
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keyboard shortcuts")).to_be_visible()
    page.keyboard.press("1")  # a dialog keeps the keys
    expect(page.locator("h1")).to_have_text("Control")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.keyboard.press("2")
    expect(page.locator("h1")).to_have_text("Decisions")  # the page changes after the key was handled
    page.keyboard.press("p")
    expect(page.locator("#pause")).to_have_text("Resume")
    page.keyboard.press("/")
    expect(page.locator("#search")).to_be_focused()
    page.keyboard.type("1t?")
    expect(page.locator("h1")).to_have_text("Decisions")
    assert page.locator("#search").input_value() == "1t?"
    page.keyboard.press("Escape")
    expect(page.locator("#search")).not_to_be_focused()
    page.keyboard.press("1")
    # Cards are links in the order of tabs, and keep the focus while their figures change.
    page.locator('[data-instance="engine-0"]').focus()
    page.keyboard.press("Tab")
    expect(page.locator('[data-instance="engine-1"]')).to_be_focused()
    page.wait_for_timeout(2200)
    expect(page.locator('[data-instance="engine-1"]')).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("engine-1")


def test_a_search_finds_requests_and_sessions(proxy: LiveProxy, open_page: OpenPage) -> None:
    until(lambda: bool(proxy.get("/breakdown", limit=5)["rows"]), "requests finished")
    row = proxy.get("/breakdown", limit=5)["rows"][0]
    page = open_page()
    for wanted, title in ((row["request_id"], "Request"), (row["session_id"], "Session")):
        page.keyboard.press("/")
        page.keyboard.type(wanted)
        page.keyboard.press("Enter")
        expect(page.locator("h1")).to_have_text(title)
        expect(page.locator("#title")).to_have_text(wanted)
        page.locator("main").focus()


def background(page: Page) -> int:
    """Brightness of the page, 0 to 255."""
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return max(int(part) for part in re.findall(r"\d+", colour)[:3])


def test_dark_is_the_systems_choice_until_the_switch_is_used(
    open_page: OpenPage, screenshot: Callable[[Page, str], None]
) -> None:
    light, dark = open_page(), open_page(scheme="dark")
    expect(light.locator("html")).to_have_attribute("data-theme", "light")
    expect(dark.locator("html")).to_have_attribute("data-theme", "dark")
    assert background(light) > 200
    assert background(dark) < 60
    expect(dark.locator("#map .card").first).to_be_visible()
    dark.wait_for_timeout(1500)
    screenshot(light, "fleet-light")
    screenshot(dark, "fleet-dark")
    dark.keyboard.press("t")
    expect(dark.locator("html")).to_have_attribute("data-theme", "light")
    dark.reload()
    assert background(dark) > 200


def test_texts_of_clients_are_never_html(proxy: LiveProxy, open_page: OpenPage) -> None:
    answer = proxy.complete([5, 6, 7] * 300, HOSTILE)
    assert answer.status_code == 200
    request_id = answer.headers["x-request-id"]
    bad = proxy.client.post(
        "/v1/completions",
        json={"model": HOSTILE, "prompt": [1], "max_tokens": 1},
        headers={"x-session-id": HOSTILE, "x-request-id": "hostile-error"},
    )
    assert bad.status_code == 404
    (known,) = proxy.get("/breakdown", request_id=request_id)["rows"]
    assert known["session_id"] == HOSTILE
    page = open_page(f"#/request/{request_id}")
    expect(page.locator('[data-fact="Session"] a')).to_have_attribute("title", HOSTILE)
    page.locator('[data-fact="Session"] a').click()
    expect(page.locator("#title")).to_have_text(HOSTILE)
    expect(page.locator("#turns tbody tr").first).to_be_visible()
    page.goto(f"{proxy.url}/ui/#/instance/{HOSTILE}")
    expect(page.locator("h1")).to_have_text(HOSTILE)
    page.goto(f"{proxy.url}/ui/#/request/{bad.headers['x-request-id']}")
    expect(page.locator("#error")).to_contain_text("does not exist")
    page.keyboard.press("2")
    expect(page.locator("#page-decisions tbody tr").first).to_be_visible()
    assert page.locator("main img").count() == 0
    assert "owned" not in page.title().replace(HOSTILE, "")


def test_the_page_reconnects_after_the_proxy_restarts(proxy: LiveProxy, open_page: OpenPage) -> None:
    page = open_page()
    expect(page.locator("#status")).to_have_text("Live")
    proxy.stop()
    try:
        expect(page.locator("#status")).to_have_text("Reconnecting")
        expect(page.locator(".banner.bad")).to_contain_text("No live data")
        # The last figures stay.
        expect(page.locator("#map .card")).to_have_count(4)
    finally:
        proxy.start()
    expect(page.locator("#status")).to_have_text("Live")
    expect(page.locator(".banner.bad")).to_be_hidden()


def test_tabs_in_the_background_leave_the_browsers_connections_to_others(open_page: OpenPage) -> None:
    def hide(page: Page, hidden: bool) -> None:  # headless pages are always visible
        page.evaluate(
            "hidden => { Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });"
            " document.dispatchEvent(new Event('visibilitychange')); }",
            hidden,
        )

    first = page = open_page()
    for _ in range(7):  # a browser opens six connections to a host
        expect(page.locator("#status")).to_have_text("Live")
        hide(page, True)
        page = first.context.new_page()
        page.goto(first.url)
    expect(page.locator("#status")).to_have_text("Live")
    hide(first, False)
    expect(first.locator("#status")).to_have_text("Live")
    expect(first.locator(".side .foot")).to_contain_text("2 viewers")


def test_an_engine_that_dies_is_shown_as_down(proxy: LiveProxy, open_page: OpenPage) -> None:
    page = open_page()
    expect(page.locator("#status")).to_have_text("Live")
    engine = proxy.engines[3]
    engine.kill()
    try:
        card = page.locator('[data-instance="engine-3"]')
        expect(card).to_have_class(re.compile("bad"))
        expect(card).to_contain_text("engine: no figures")
        expect(page.locator("#fleet-summary")).to_contain_text("3 of 4 healthy")
        page.keyboard.press("5")
        expect(page.locator('[data-condition="instances"]')).to_contain_text("not met")
        expect(page.locator('[data-condition="instances"] .remedy')).to_contain_text("GET /instances")
    finally:
        engine.start()
    page.keyboard.press("1")
    expect(page.locator("#fleet-summary")).to_contain_text("4 of 4 healthy", timeout=30_000)
    expect(page.locator('[data-instance="engine-3"]')).to_contain_text("engine 0 + 0 waiting")
