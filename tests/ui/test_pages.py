"""Every page of the dashboard shows what the proxy's endpoints answer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.integration.fleet import free_port
from tests.ui.conftest import OpenPage
from tests.ui.rig import LiveProxy, until

pytestmark = [pytest.mark.ui, pytest.mark.first, pytest.mark.timeout(180)]
Screenshot = Callable[[Page, str], None]


def fact(page: Page, name: str) -> str:
    return page.locator(f'[data-fact="{name}"] dd').inner_text()


def number_of(page: Page, figure: str, unit: str) -> int:
    return int(re.findall(rf"([\d,]+) {unit}", page.locator(figure).inner_text())[0].replace(",", ""))


def reached(page: Page, figure: str, unit: str, least: int) -> bool:
    return number_of(page, figure, unit) >= least


def total(proxy: LiveProxy, unit: str) -> int:
    stats = proxy.get("/stats")
    return int(stats["sessions"] if unit == "sessions" else stats["requests"]["finished"])


def handed_over(proxy: LiveProxy) -> list[dict[str, Any]]:
    return [row for row in proxy.get("/breakdown", limit=1000)["rows"] if row["offload_reason"] == "chosen"]


def test_the_fleet_page_shows_each_instance_and_the_charts(proxy: LiveProxy, open_page: OpenPage) -> None:
    until(lambda: proxy.get("/stats")["requests"]["finished"] > 20, "20 requests finished")
    page = open_page()
    expect(page.locator("#status")).to_have_text("Live")
    names = [row["name"] for row in proxy.get("/instances")["instances"]]
    cards = page.locator("#map .card")
    expect(cards).to_have_count(len(names))
    assert cards.locator(".name").all_inner_texts() == names
    expect(cards.first).to_contain_text("healthy")
    expect(page.locator("#fleet-summary")).to_contain_text(f"{len(names)} of {len(names)} healthy")
    # Both counts only grow, so a reading before and one after bound the one shown in between.
    for figure, unit in (("#figure-flight", "sessions"), ("#figure-rate", "finished")):
        before = total(proxy, unit)
        until(partial(reached, page, figure, unit, before), f"{unit} reach {before}")
        assert number_of(page, figure, unit) <= total(proxy, unit)
    assert re.search(r"\d+ %", page.locator("#figure-hit .value").inner_text())
    for chart in page.locator("svg.chart").all()[:3]:
        expect(chart.locator("path").first).to_have_attribute("d", re.compile(r"M[\d. ]+L"))


def test_figures_move_while_requests_are_served(proxy: LiveProxy, open_page: OpenPage) -> None:
    page = open_page()
    expect(page.locator("#status")).to_have_text("Live")
    first = page.locator("#figure-rate .note").inner_text()
    expect(page.locator("#figure-rate .note")).not_to_have_text(first)


def test_decisions_stream_with_their_reasons_and_can_be_filtered(proxy: LiveProxy, open_page: OpenPage) -> None:
    page = open_page("#/decisions")
    rows = page.locator("#page-decisions tbody tr")
    expect(rows.nth(10)).to_be_visible()
    page.locator("#pause").click()
    request_id = rows.first.locator("a").first.get_attribute("title")
    (known,) = proxy.get("/breakdown", request_id=request_id)["rows"]
    cells = rows.first.locator("td").all_inner_texts()
    assert cells[3] == known["class"]
    assert cells[4].endswith(known["instance"])
    assert cells[5] == known["reason"].replace("_", " ")
    page.locator("#filter").fill("engine-1")
    assert all("engine-1" in text for text in rows.all_inner_texts())
    page.locator("#filter").fill("no such thing")
    expect(page.locator("#page-decisions .empty")).to_contain_text("Nothing matches")


def test_a_filter_of_a_paused_stream_searches_the_rows_of_the_pause(proxy: LiveProxy, open_page: OpenPage) -> None:
    page, live = open_page("#/decisions"), open_page("#/decisions")
    expect(page.locator("#page-decisions tbody tr").first).to_be_visible()
    page.locator("#pause").click()
    live.locator("#filter").fill("after-the-pause")
    assert proxy.complete([7] * 32, "after-the-pause").status_code == 200
    expect(live.locator("#page-decisions tbody tr")).to_have_count(1)
    live.wait_for_timeout(300)  # both pages get the same message
    page.locator("#filter").fill("after-the-pause")
    expect(page.locator("#page-decisions .empty")).to_contain_text("Nothing matches")
    page.locator("#pause").click()
    expect(page.locator("#page-decisions tbody tr")).to_have_count(1)


def test_hand_offs_are_drawn_as_flows(proxy: LiveProxy, open_page: OpenPage, screenshot: Screenshot) -> None:
    until(lambda: len(handed_over(proxy)) > 3, "requests were handed over")
    page = open_page("#/flows")
    expect(page.locator("path.flow").first).to_be_attached()
    shown = {tuple(row.locator("a").all_inner_texts()) for row in page.locator("#page-flows tbody tr").all()}
    # Read after the page, which shows more of them all the time.
    pairs = {(row["prefill_instance"], row["instance"]) for row in handed_over(proxy)}
    assert shown
    assert shown <= pairs
    screenshot(page, "flows-light")


def test_a_request_page_shows_its_decision_scores_and_time_line(
    proxy: LiveProxy, open_page: OpenPage, screenshot: Screenshot
) -> None:
    until(lambda: bool(handed_over(proxy)), "a request was handed over")
    row = handed_over(proxy)[-1]
    page = open_page(f"#/request/{row['request_id']}")
    expect(page.locator("#title")).to_have_text(row["request_id"])
    assert fact(page, "Class") == row["class"]
    assert fact(page, "Decode on") == row["instance"]
    assert fact(page, "Prefill on") == row["prefill_instance"]
    assert fact(page, "Reason") == row["reason"].replace("_", " ")
    assert fact(page, "Outcome") == "ok (200)"
    stages = [bar.get_attribute("data-stage") for bar in page.locator("#timeline rect[data-stage]").all()]
    assert stages[-3:] == ["prefill_leg", "decode_leg", "decode"]
    lengths = [float(bar.get_attribute("width") or 0) for bar in page.locator("#timeline rect[data-stage]").all()]
    drawn = lengths[stages.index("prefill_leg")] / sum(lengths)
    assert drawn == pytest.approx(row["stages_ms"]["prefill_leg"] / row["stages_ms"]["total"], abs=0.08)
    assert page.locator("#scores tbody tr").count() == len(row["scores"])
    expect(page.locator("#scores tr.best")).to_contain_text(row["instance"])
    screenshot(page, "request-light")


def test_a_session_page_shows_its_turns(proxy: LiveProxy, open_page: OpenPage, screenshot: Screenshot) -> None:
    until(lambda: any(len(turns_of(proxy, session)) >= 4 for session in sessions_of(proxy)), "a session has four turns")
    session = next(session for session in sessions_of(proxy) if len(turns_of(proxy, session)) >= 4)
    turns = turns_of(proxy, session)
    page = open_page(f"#/session/{session}")
    expect(page.locator("#turns tbody tr")).to_have_count(len(turns))
    expect(page.locator("#figure-turns .value")).to_have_text(str(len(turns)))
    cached, prompts = (sum(row[key] for row in turns) for key in ("actual_cached_tokens", "prompt_tokens"))
    expect(page.locator("#figure-session-hit .value")).to_have_text(f"{cached / prompts:.0%}".replace("%", " %"))
    assert page.locator("#timeline a").count() == len(turns)
    screenshot(page, "session-light")
    page.locator("#turns tbody a").first.click()
    expect(page.locator("#title")).to_have_text(min(turns, key=lambda row: row["arrived_unix_s"])["request_id"])


def test_a_session_page_says_that_it_shows_a_part_of_a_long_session(proxy: LiveProxy, open_page: OpenPage) -> None:
    (row,) = proxy.get("/breakdown", limit=1, outcome="ok")["rows"]
    # The first turn of those shown ends last.
    turns = [
        {**row, "arrived_unix_s": 1e9 - at, "stages_ms": {"total": 400e3 if at == 199 else 1e3}} for at in range(300)
    ]
    page = open_page()
    page.route(
        "**/breakdown?*",
        lambda route: route.fulfill(json={"rows": turns[: int(re.findall(r"limit=(\d+)", route.request.url)[0])]}),
    )
    page.evaluate("location.hash = '#/session/long'")
    expect(page.locator("#turns tbody tr")).to_have_count(200)
    expect(page.locator("#newest")).to_contain_text("the newest 200 turns")
    expect(page.locator("#figure-lasted .value")).to_have_text("6 min 40 s")
    turns[200:] = []
    page.keyboard.press("r")
    expect(page.locator("#newest")).to_have_count(0)
    expect(page.locator("#turns tbody tr")).to_have_count(200)


def sessions_of(proxy: LiveProxy) -> list[str]:
    rows = proxy.get("/breakdown", limit=400)["rows"]
    # Those of the first rows are over, so that their pages do not change.
    return list(dict.fromkeys(row["session_id"] for row in rows if row["outcome"] == "ok" and row["session_id"]))[:6]


def turns_of(proxy: LiveProxy, session: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = proxy.get("/breakdown", session_id=session)["rows"]
    return rows if all(row["outcome"] == "ok" for row in rows) else []


def test_an_instance_page_shows_its_row(proxy: LiveProxy, open_page: OpenPage) -> None:
    page = open_page("#/fleet")
    page.locator('[data-instance="engine-2"]').click()
    row = proxy.get("/instances/engine-2")
    expect(page.locator("h1")).to_have_text("engine-2")
    expect(page.locator('[data-fact="URL"] dd')).to_have_text(row["url"])
    assert fact(page, "Models") == ", ".join(row["models"])
    assert fact(page, "Breaker").startswith("closed")
    expect(page.locator("#page-instance tbody tr").first).to_be_visible()


def test_an_instance_that_returns_is_shown_again_on_its_open_page(proxy: LiveProxy, open_page: OpenPage) -> None:
    page = open_page("#/instance/guest")
    expect(page.locator("#facts .empty")).to_contain_text("No such instance")
    for _ in range(2):
        guest = {"name": "guest", "url": f"http://127.0.0.1:{free_port()}"}
        proxy.client.post("/instances", json=guest).raise_for_status()
        expect(page.locator('[data-drain="guest"]')).to_be_visible()
        assert page.locator("#facts .empty").count() == 0
        proxy.client.delete("/instances/guest").raise_for_status()
        expect(page.locator("#facts .empty")).to_contain_text("No such instance")
        expect(page.locator('[data-drain="guest"]')).to_have_count(0)


@pytest.mark.parametrize(
    ("slowness", "text"), [(None, "as elsewhere"), (1.7, "1.70 times that of the middle instance")]
)
def test_an_instance_page_says_how_slow_it_is(
    proxy: LiveProxy, open_page: OpenPage, slowness: float | None, text: str
) -> None:
    """By a feed with a given slowness: on a busy machine one of equal engines may look slow, or none."""
    with proxy.client.stream("GET", "/ui/feed") as feed:
        state = json.loads(next(line for line in feed.iter_lines() if line.startswith("data: ")).removeprefix("data: "))
    for row in state["instances"]:
        assert "slowness" in row
        row["slowness"] = slowness
    body = f"event: start\ndata: {json.dumps(state)}\n\n"
    page = open_page("#/fleet")
    page.route("**/ui/feed", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    page.reload()
    page.locator('[data-instance="engine-2"]').click()
    expect(page.locator('[data-fact="Prefill time"] dd')).to_have_text(text)


def test_conditions_are_those_of_the_readiness_endpoint(proxy: LiveProxy, open_page: OpenPage) -> None:
    page = open_page("#/health")
    conditions = proxy.get("/ready?verbose")["conditions"]
    expect(page.locator(".condition")).to_have_count(len(conditions))
    for condition in conditions:
        expect(page.locator(f'[data-condition="{condition["name"]}"]')).to_contain_text(condition["detail"])
    if proxy.client.get("/meters").status_code == 404:
        expect(page.locator("#meters")).to_contain_text("no meters")
    else:
        expect(page.locator("#meters tbody tr")).to_have_count(4)


def test_the_line_of_held_requests_counts_those_that_are_not_listed(proxy: LiveProxy, open_page: OpenPage) -> None:
    held = {"request_id": "r", "session_id": "s", "held_s": 3.0, "sentence": "no instance has room"}
    page = open_page("#/control")
    stats = {"holding": {"held": 115, "longest_held_s": 68.1, "line": [held] * 20}}
    page.route("**/stats", lambda route: route.fulfill(json=stats))
    expect(page.locator("#held-others")).to_contain_text("95 more behind them, 115 in all")


def test_shadow_policies_are_chosen_by_click_and_compared_live(
    proxy: LiveProxy, open_page: OpenPage, screenshot: Screenshot
) -> None:
    page = open_page("#/shadow")
    expect(page.locator("#page-shadow .empty")).to_contain_text("No shadow policies are set")
    for name in ("linear", "round_robin"):
        page.get_by_role("checkbox", name=name, exact=True).check()
    page.locator("#apply-shadow").click()
    expect(page.locator("#shadows tbody tr")).to_have_count(2)
    until(lambda: proxy.get("/shadow")["requests"] > 5, "requests were compared")
    expect(page.locator("#shadow-latest tbody tr").nth(3)).to_be_visible()
    figures = {row["name"]: row for row in proxy.get("/shadow")["policies"]}
    for row in page.locator("#shadows tbody tr").all():
        cells = row.locator("td").all_inner_texts()
        # Counts grow while they are read.
        assert 0 < int(cells[2].replace(",", "")) <= proxy.get("/shadow")["requests"]
        assert cells[0] in figures
    screenshot(page, "shadow-light")
    proxy.client.put("/shadow", json={"policies": []}).raise_for_status()


def test_the_shadow_page_shows_agreement_regret_and_failures(open_page: OpenPage) -> None:
    policy = {
        **{"part": "policy", "name": "linear", "params": {}, "requests": 1200, "agreed": 900, "agreement": 0.75},
        **{"regret_s": {"total": 41.5, "mean": 0.0346}, "hit_tokens_given_away": 88_000, "failures": 0},
        **{"last_error": None, "decision_us_mean": 21.4},
    }
    other = {
        **policy,
        "name": "least_loaded",
        "agreement": 0.31,
        "agreed": 372,
        "failures": 2,
        "last_error": "<b>x</b>",
    }
    latest = {
        **{"request_id": "req-1", "unix_s": 1_795_000_000, "live": {"instance": "engine-0", "reason": "lowest_score"}},
        "shadow": {"linear": {"instance": "engine-3", "reason": "lowest_score", "regret_s": 0.25}},
    }
    answer = {"enabled": True, "requests": 1200, "skipped": 3, "policies": [policy, other], "latest": [latest]}
    page = open_page("#/health")
    page.route("**/shadow", lambda route: route.fulfill(json=answer))
    page.keyboard.press("4")
    rows = page.locator("#shadows tbody tr")
    expect(rows).to_have_count(2)
    for text in ("linear", "75 %", "41.5 s", "88.0k", "21.4"):
        expect(rows.first).to_contain_text(text)
    expect(page.locator("#shadow-latest tbody tr").last).to_contain_text("+0.25 s")


def test_an_unknown_request_is_reported(open_page: OpenPage) -> None:
    page = open_page("#/request/req-that-never-was")
    expect(page.locator("#page-request .empty")).to_contain_text("No such request or session")


def test_the_api_page_lists_every_endpoint(proxy: LiveProxy, open_page: OpenPage) -> None:
    page = open_page("", path="/docs")
    paths = proxy.get("/openapi.json")["paths"]
    expect(page.locator("details.endpoint")).to_have_count(sum(len(methods) for methods in paths.values()))
    page.locator('[data-path="/policy"]').last.locator("summary").click()
    expect(page.locator('[data-path="/policy"]').last).to_contain_text("routing policy to apply")


def test_the_end_of_a_long_name_is_visible_among_many_instances(proxy: LiveProxy, open_page: OpenPage) -> None:
    names = [f"cluster-eu-west-1a-h100-node-replica-of-vllm-engine-{number:03}" for number in range(64)]
    row = {**proxy.get("/instances/engine-0"), "healthy": False}
    figures = {"finished": 0, "in_flight": 0, "held": 0, "queued": 0, "sessions": 0, "admission": "never_hold"}
    state = {
        "instances": [{**row, "name": name} for name in names],
        "proxy": figures,
        "minute": {"finished": 0, "failed": 0, "seconds": 60},
        "conditions": [],
    }
    page = open_page("#/control")
    page.evaluate(
        """async (state) => {
            const { default: fleetPage } = await import(
                new URL("pages/fleet.js", document.querySelector("script").src).href
            );
            const made = fleetPage();
            document.querySelector("main").replaceChildren(made.element);
            made.update({ points: [], state });
        }""",
        state,
    )
    expect(page.locator(".card .name").last).to_have_text(names[-1])
    # The right edge of each name's last character, against that of the part of the card that is left for the name.
    cut = page.locator(".card .name").evaluate_all(
        """(shown) => shown.filter((name) => {
            const text = name.lastChild.lastChild ?? name.lastChild;
            const range = document.createRange();
            range.setStart(text, text.length - 3);
            range.setEnd(text, text.length);
            const room = name.parentElement.querySelector(".end").getBoundingClientRect().left;
            return range.getBoundingClientRect().right > room + 1;
        }).length"""
    )
    assert cut == 0


def test_counts_of_an_idle_fleet_have_an_axis_of_whole_numbers_and_minutes_have_no_60_seconds(
    open_page: OpenPage,
) -> None:
    page = open_page("#/control")
    axes, shown = page.evaluate(
        """async () => {
            const at = (file) => new URL(file, document.querySelector("script").src).href;
            const { default: fleetPage } = await import(at("pages/fleet.js"));
            const { seconds } = await import(at("format.js"));
            const made = fleetPage();
            document.querySelector("main").replaceChildren(made.element);
            const proxy = { finished: 0, in_flight: 0, held: 0, queued: 0, sessions: 0, admission: "never_hold" };
            const points = [{ unix_s: 1, requests: 0, failed: 0, in_flight: 0, held: 0, hit_rate: null }];
            made.update({
                points,
                state: { instances: [], proxy, minute: { finished: 0, failed: 0, seconds: 60 }, conditions: [] },
            });
            const axes = [...document.querySelectorAll("main svg.chart")].map((chart) =>
                [...chart.querySelectorAll("text")].slice(0, 3).map((text) => text.textContent));
            return [axes, [119.9, 179.7, 200].map(seconds)];
        }"""
    )
    assert axes[3] == ["0", "1", "2"]
    assert [len(set(figures)) for figures in axes] == [3] * 4
    assert shown == ["119.9 s", "3 min 0 s", "3 min 20 s"]
