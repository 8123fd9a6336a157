"""Command ``top``: its figures, its frames, and a proxy that goes and comes back."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import pty
import sys
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from proxy.breakdown import Breakdown
from proxy.console.figures import RecentRows, TopAnswers, TopPage, figures_of
from proxy.console.frames import frame
from proxy.console.top import poll
from proxy.settings import load_settings
from tests.integration.fleet import free_port
from tests.proxy.conftest import StartProxy, serving
from tests.proxy.exchange.test_held_requests import ONE_AT_A_TIME, GatedEngine
from tests.proxy.stub_engine import StubEngine
from tests.proxy.ui.test_feed import data_of, feed_of
from warmroute import build

BODY = {"model": "stub", "prompt": list(range(40)), "max_tokens": 4}
NOW_S = 1_800_000_000.0
ROOT = Path(__file__).parents[3]


def page(rows: list[dict[str, Any]], after: int = 0, started: float = 1.0) -> TopPage:
    answer = {"rows": rows, "next": {"before": None, "after": after}, "proxy_started_unix_s": started}
    return msgspec.json.decode(msgspec.json.encode(answer), type=TopPage)


def row(
    number: int, instance: str = "e0", ago_s: float = 1.0, request_class: str = "WARM", **fields: Any
) -> dict[str, Any]:
    return {
        "row": number,
        "instance": instance,
        "arrived_unix_s": NOW_S - ago_s,
        "outcome": "ok",
        "class": request_class,
        "reason": "lowest_score",
        "stream": True,
        "prompt_tokens": 100,
        "actual_cached_tokens": 80,
        "stages_ms": {"first_byte": 50.0, "total": 200.0},
        **fields,
    }


def instance(name: str, **fields: Any) -> dict[str, Any]:
    return {
        "name": name,
        "healthy": True,
        "draining": False,
        "breaker": {"state": "closed"},
        "requests": 3,
        "prefilling": 1,
        "in_flight": {"WARM": 2, "HEAVY": 1},
        "engine": {"running": 2, "waiting": 4, "kv_usage": 0.5},
        **fields,
    }


def answers(instances: list[dict[str, Any]], conditions: list[dict[str, Any]] | None = None) -> TopAnswers:
    stats = {
        "requests": {"in_flight": 9},
        "admission": {"in_flight": 7},
        "holding": {"held": 2, "rule": "working_set"},
        "policy": "linear",
    }
    return TopAnswers(instances, stats, conditions or [], page([]))


def drawn(shown: Any, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    with console.capture() as captured:
        console.print(shown)
    return captured.get()


def test_figures_are_those_of_the_window_per_instance() -> None:
    recent = RecentRows()
    rows = [
        row(1, ago_s=100.0),
        *(row(number, ago_s=10.2) for number in range(2, 62)),
        row(62, "e1", request_class="HEAVY"),
    ]
    rows.append(row(63, "e1", outcome="upstream_error", actual_cached_tokens=None, stages_ms={"total": 1.0}))
    recent.add(page(rows, 63), 200)
    figures = figures_of(answers([instance("e0"), instance("e1", draining=True)]), recent, NOW_S)
    draining, busy = figures.instances
    assert (draining.name, draining.state, draining.recent.failed) == ("e1", "draining", 1)
    assert (busy.state, busy.requests, busy.waiting, busy.kv_usage) == ("ok", 3, 4, 0.5)
    assert busy.classes == (2, 0, 1)
    assert busy.recent.hit_rate == 0.8
    assert busy.recent.ttft_ms == 50.0
    assert abs(busy.recent.per_s - 1.0) < 1e-9
    assert figures.last[0].row == 63
    assert recent.cursor == 63


@pytest.mark.parametrize(
    ("started_ago_s", "count", "limit", "per_s"),
    [(600.0, 1, 200, 1 / 60), (20.0, 1, 200, 1 / 20), (600.0, 10, 10, 2.0), (0.1, 1, 200, 1.0)],
    ids=["one after idle minutes", "soon after the start", "more rows than were asked for", "at the start"],
)
def test_rates_are_over_the_window_or_the_part_of_it_that_the_rows_cover(
    started_ago_s: float, count: int, limit: int, per_s: float
) -> None:
    recent = RecentRows()
    recent.add(page([row(number, ago_s=5.2) for number in range(1, count + 1)], count, NOW_S - started_ago_s), limit)
    assert figures_of(answers([]), recent, NOW_S).recent.per_s == pytest.approx(per_s)


def test_mistakes_of_clients_are_no_failures() -> None:
    recent = RecentRows()
    outcomes = ("ok", "rejected", "engine_refused", "client_gone", "shutdown", "stream_broken", "no_instance")
    recent.add(page([row(number, outcome=outcome) for number, outcome in enumerate(outcomes, 1)], 7), 200)
    assert figures_of(answers([]), recent, NOW_S).recent.failed == 2


def test_a_poll_that_is_behind_begins_again_with_the_newest_rows_and_so_does_a_restart() -> None:
    recent = RecentRows()
    recent.add(page([row(1)], 1), 200)
    recent.add(page([row(2), row(3)], 3), limit=2)
    assert recent.behind
    recent.skip()
    recent.add(page([row(8), row(9)], 9), limit=2)
    assert (recent.cursor, recent.behind, [each.row for each in recent.last(10)]) == (9, False, [9, 8])
    recent.add(page([row(1)], 1, started=2.0), 200)
    assert (recent.cursor, [each.row for each in recent.last(10)]) == (1, [1])


class ManyRows:
    """Answers of a proxy whose requests end one after the other, ``per_s`` each second."""

    def __init__(self, per_s: float, count: int) -> None:
        self.per_s = per_s
        self.numbers = range(1, count + 1)
        self.failed = frozenset({count - 250})
        self.pages = 0

    def get(self, path: str, **_: Any) -> dict[str, Any]:
        return {"/instances": {"instances": [instance("e0")]}, "/stats": {}}.get(path, {})

    def read(
        self, _path: str, _kind: type[TopPage], limit: int, before: int | None = None, after: int | None = None
    ) -> TopPage:
        self.pages += 1
        newest = self.numbers[-1]
        if after is not None:
            numbers = self.numbers[after : after + limit]
        else:
            end = newest if before is None else before - 1
            numbers = self.numbers[max(0, end - limit) : end]
        rows = [
            row(
                number,
                ago_s=0.2 - number / self.per_s,
                outcome="upstream_error" if number in self.failed else "ok",
            )
            for number in numbers
        ]
        answer = {
            "rows": rows,
            "next": {
                "before": numbers[0] if numbers and numbers[0] > 1 else None,
                "after": numbers[-1] if numbers else newest,
            },
            "proxy_started_unix_s": NOW_S - 3600,
            "unix_s": NOW_S + newest / self.per_s,
        }
        return msgspec.json.decode(msgspec.json.encode(answer), type=TopPage)


@pytest.mark.parametrize(
    ("per_s", "span_s"), [(10.0, 60.0), (500.0, 4.0)], ids=["the whole window", "as much as is read"]
)
def test_the_first_frame_has_the_figures_of_the_seconds_that_it_names(per_s: float, span_s: float) -> None:
    figures = poll(cast(Any, ManyRows(per_s, 10_000)), RecentRows())
    assert figures.recent.per_s == pytest.approx(per_s, rel=0.02)
    assert figures.recent.failed == 1
    assert figures.span_s == pytest.approx(span_s, rel=0.02)
    assert f"(last {span_s:.0f} s)" in drawn(frame(figures, "u", None, None))


@pytest.mark.parametrize("more", [900, 9_000], ids=["behind by pages", "behind by more than it reads"])
def test_rates_are_right_after_a_pause_in_which_many_requests_ended(more: int) -> None:
    api, recent = ManyRows(50.0, 3_000), RecentRows()
    poll(cast(Any, api), recent)
    api.numbers = range(1, 3_000 + more + 1)
    api.pages = 0
    assert poll(cast(Any, api), recent).recent.per_s == pytest.approx(50.0, rel=0.02)
    assert api.pages <= 20


@pytest.mark.parametrize("width", [30, 40, 60, 80])
@pytest.mark.parametrize("height", [12, 16, 24])
def test_a_small_terminal_shows_instances_apart_and_counts_the_others(width: int, height: int) -> None:
    recent = RecentRows()
    names = [f"engine-with-a-long-name-{number:02}" for number in range(64)]
    recent.add(page([row(number, names[number % 64]) for number in range(1, 200)], 199), 200)
    figures = figures_of(answers([instance(each) for each in names]), recent, NOW_S)
    lines = drawn(frame(figures, "http://localhost:9090", None, height, width), width).rstrip("\n").splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    head = next(number for number, line in enumerate(lines) if line.startswith("instance"))
    counted = next(number for number, line in enumerate(lines) if " more instances" in line)
    shown = [line.split()[0] for line in lines[head + 1 : counted]]
    assert shown
    assert [each[-2:] for each in shown] == [f"{number:02}" for number in range(len(shown))]
    assert f"{64 - len(shown)} more instances" in lines[counted]
    assert "state" in lines[head].split()


def test_ten_lines_of_forty_columns_show_an_instance_and_count_the_others() -> None:
    fleet = [instance(f"inst-{number}") for number in range(4)]
    figures = figures_of(answers(fleet), RecentRows(), NOW_S)
    lines = drawn(frame(figures, "http://localhost:9090", None, 10, 40), 40).rstrip("\n").splitlines()
    assert len(lines) <= 10
    assert lines[-2].split()[:2] == ["inst-0", "ok"]
    assert "3 more instances" in lines[-1]


def test_sixty_four_instances_fit_eighty_columns_and_a_small_terminal() -> None:
    recent = RecentRows()
    names = [f"engine-with-a-long-name-{number:02}" for number in range(64)]
    recent.add(page([row(number, names[number % 64]) for number in range(1, 200)], 199), 200)
    fleet = [instance(name, requests=number) for number, name in enumerate(names)]
    fleet[5] = instance(names[5], healthy=False, requests=0)
    problem = {"name": "instances", "ok": False, "detail": "63 of 64 instances", "remedy": "GET /instances"}
    figures = figures_of(answers(fleet, [problem, {"name": "policy", "ok": True}]), recent, NOW_S)
    text = drawn(frame(figures, "http://localhost:9090", None, 24))
    lines = text.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert "63/64 instances ok   in flight 7   held 2" in text
    assert "instances: 63 of 64 instances -> GET /instances" in text
    assert "policy:" not in text
    assert " down " in next(line for line in lines if line.startswith("engine-"))
    assert "more instances, less loaded" in text
    assert "lowest_score" in text
    assert len(drawn(frame(figures, "u", None, None)).splitlines()) > 64


def test_the_last_figures_stay_while_the_proxy_does_not_answer() -> None:
    assert "refused" in drawn(frame(None, "http://localhost:9090", "no answer: refused", 24))
    figures = figures_of(answers([instance("e0")]), RecentRows(), NOW_S)
    text = drawn(frame(figures, "http://localhost:9090", "no answer: refused", 24))
    assert "no answer: refused" in text
    assert "e0" in text


async def test_one_frame_of_a_running_proxy(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(2)
    await proxy.client.post("/v1/completions", json={**BODY, "stream": True})
    proxy.engines[1].mode = "sick"
    runner = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"})
    await proxy.until(lambda: not proxy.core.instances["inst-1"].healthy)
    shown = await asyncio.to_thread(runner.invoke, build(), ["top", "--once", "--url", proxy.url])
    assert shown.exit_code == 0, shown.output
    assert "1/2 instances ok" in shown.output
    assert "instances: 1 of 2 instances can be sent requests" in shown.output
    assert "WARM" in shown.output
    nobody = await asyncio.to_thread(runner.invoke, build(), ["top", "--once", "--url", "http://127.0.0.1:9"])
    assert (nobody.exit_code, "no answer from" in nobody.output) == (2, True)


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"admission": ONE_AT_A_TIME}, "in flight 1   held 2   queued 0"),
        ({"limits": {"max_in_flight_per_instance": 1}}, "in flight 1   held 0   queued 2"),
    ],
    ids=["held", "queued"],
)
async def test_requests_that_wait_are_not_in_flight(
    start_proxy: StartProxy, settings: dict[str, Any], shown: str
) -> None:
    engine = GatedEngine()
    proxy = await start_proxy(engines=[engine], **settings)

    def ask(session: str) -> asyncio.Task[Any]:
        headers = {"x-session-id": session}
        return asyncio.create_task(proxy.client.post("/v1/completions", json=BODY, headers=headers))

    tasks = [ask("a")]
    await proxy.until(lambda: engine.running == 1)
    tasks += [ask("b"), ask("c")]
    await proxy.until(lambda: len(proxy.core.holding) + proxy.core.admission.waiting == 2)
    arguments = ["top", "--once", "--url", proxy.url]
    result = await asyncio.to_thread(CliRunner(env={"COLUMNS": "100"}).invoke, build(), arguments)
    assert shown in result.output
    assert "warmroute_in_flight 1.0" in (await proxy.client.get("/metrics")).text
    assert data_of(feed_of(proxy).compute(NOW_S))["proxy"]["in_flight"] == 1
    engine.open.set()
    assert {(await task).status_code for task in tasks} == {200}


@pytest.mark.parametrize(
    ("url", "error", "remedy"),
    [
        (
            "https://proxy:9090",
            httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate"),
            "--ca-file",
        ),
        ("http://proxy:9090", httpx.RemoteProtocolError("Server disconnected"), "https://"),
        (
            "https://proxy:9090",
            httpx.ConnectError("[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1006)"),
            "begin --url with http://",
        ),
        ("https://proxy:9090", httpx.RemoteProtocolError("Server disconnected"), "tls.client_ca"),
        ("https://proxy:9090", httpx.ConnectError("refused"), "is the proxy running?"),
    ],
    ids=["unknown authority", "HTTP to a port with TLS", "TLS to a port with HTTP", "no client certificate", "nobody"],
)
def test_a_connection_that_fails_has_its_own_remedy(
    monkeypatch: pytest.MonkeyPatch, url: str, error: Exception, remedy: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(httpx.Client, "get", fail)
    result = CliRunner(env={"COLUMNS": "400"}).invoke(build(), ["top", "--once", "--url", url])
    assert (result.exit_code, remedy in result.output) == (2, True), result.output


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("ftp://h", "give a URL that begins with http:// or https://, as http://127.0.0.1:9090"),
        ("localhost:9090", "give a URL that begins with http:// or https://, as http://127.0.0.1:9090"),
        ("http://a..b", "label empty"),
        (f"http://{'a' * 64}:9090", "label"),
    ],
    ids=["another scheme", "no scheme", "an empty label", "a long label"],
)
@pytest.mark.parametrize("command", [("top", "--once"), ("explain", "some-request")])
def test_a_url_that_is_no_proxy_s_is_refused(command: tuple[str, ...], url: str, problem: str) -> None:
    result = CliRunner(env={"COLUMNS": "400"}).invoke(build(), [*command, "--url", url])
    assert (result.exit_code, f"error: --url {url}: " in result.output, problem in result.output) == (2, True, True)
    assert "is the proxy running?" not in result.output


async def test_an_engine_in_place_of_a_proxy_has_a_remedy() -> None:
    engine = await StubEngine().start()
    result = await asyncio.to_thread(CliRunner().invoke, build(), ["top", "--once", "--url", engine.url])
    await engine.stop()
    assert result.exit_code == 2
    assert "404 Not Found; is a warmroute proxy there? --url names it" in result.output


class Terminal:
    """A terminal with the command in it."""

    def __init__(self) -> None:
        self._master, self.slave = pty.openpty()
        self._seen = bytearray()

    def open(self) -> None:
        asyncio.get_running_loop().add_reader(self._master, self._read)

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            self._seen += os.read(self._master, 65536)

    async def shows(self, text: bytes) -> None:
        """Wait for a text that was not waited for before."""
        for _ in range(600):
            if (at := self._seen.find(text)) >= 0:
                del self._seen[: at + len(text)]
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"{text!r} was not shown: {bytes(self._seen[-2000:])!r}")

    def press(self, key: bytes) -> None:
        os.write(self._master, key)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._master)
        os.close(self._master)


async def test_in_a_terminal_it_survives_a_proxy_that_goes_and_ends_with_q() -> None:
    engine = await StubEngine().start()
    terminal = Terminal()
    terminal.open()
    port = free_port()
    fleet: Any = [{"name": "inst-0", "url": engine.url}]
    settings = load_settings(None, port=port, instances=fleet, log_level="error", grace_s=0.1)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "warmroute", "top", "--url", f"http://127.0.0.1:{port}", "--interval-s", "0.2"),
        stdin=terminal.slave,
        stdout=terminal.slave,
        stderr=terminal.slave,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
        cwd=ROOT,
    )
    os.close(terminal.slave)
    try:
        await terminal.shows(b"no answer from")
        async with serving(settings):
            await terminal.shows(b"1/1 instances ok")
        await terminal.shows(b"no answer from")
        async with serving(settings):
            await terminal.shows(b"1/1 instances ok")
            assert process.returncode is None
        terminal.press(b"q")
        async with asyncio.timeout(30):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        terminal.close()
        await engine.stop()


def test_every_row_field_that_is_shown_is_in_a_row() -> None:
    from policies.row import Row
    from proxy.console.figures import TopRow

    breakdown = Breakdown(1)
    breakdown.close_row(breakdown.open_row(Row("x", "/v1/completions", 1.0)))
    [written] = breakdown.select(1)
    names = {field.encode_name for field in msgspec.structs.fields(TopRow)}
    assert names <= written.keys()


async def test_classes_in_flight_are_in_the_rows_of_instances(start_proxy: StartProxy) -> None:
    engine = StubEngine(prefill_s=30.0)
    proxy = await start_proxy(1, engines=[engine], classes={"medium_tokens": 50, "heavy_tokens": 100})
    sent = [
        asyncio.create_task(
            proxy.client.post("/v1/completions", json={**BODY, "prompt": list(range(start, start + size))})
        )
        for start, size in ((0, 40), (1000, 40), (2000, 200))
    ]
    await proxy.until(lambda: engine.running == 3)
    [shown] = (await proxy.client.get("/instances")).json()["instances"]
    assert shown["in_flight"] == {"WARM": 2, "HEAVY": 1}
    for task in sent:
        task.cancel()
    await asyncio.gather(*sent, return_exceptions=True)
    await proxy.settled()
    assert (await proxy.client.get("/instances/inst-0")).json()["in_flight"] == {}
    assert proxy.core.breakdown.open_rows == set()


@pytest.mark.parametrize("command", [("top", "--once"), ("explain", "some-request")])
@pytest.mark.parametrize("key", ["secret\nx", "sécret"])
def test_a_key_that_cannot_be_sent_is_blamed_and_not_shown(command: tuple[str, ...], key: str) -> None:
    runner = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"})
    result = runner.invoke(build(), [*command, "--url", "http://127.0.0.1:9", "--key", key])
    assert result.exit_code == 2
    assert "correct --key or WARMROUTE_ADMIN_KEY" in result.output
    assert "cret" not in result.output
    assert "--url" not in result.output


def test_an_authority_file_that_cannot_be_used_is_named_by_its_option(tmp_path: Path) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    for file, problem in ((tmp_path / "none.pem", "No such file"), (broken, "")):
        result = CliRunner().invoke(build(), ["top", "--once", "--url", "https://127.0.0.1:9", "--ca-file", str(file)])
        assert result.exit_code == 2
        assert f"--ca-file {file}: {problem}" in result.output
