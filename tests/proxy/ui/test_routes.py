"""Pages of the dashboard: their headers, who may load them, and what they may refer to."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from proxy.ui.routes import STATIC
from tests.proxy.access.test_keys import ADMIN, KEY, KEYS, bearer
from tests.proxy.conftest import StartProxy

FILES = sorted(path for path in STATIC.rglob("*") if path.is_file())
SCRIPTS = [path for path in FILES if path.suffix == ".js"]
PAGES = ("/ui/", "/docs", "/ui/static/app.js", "/ui/static/pages/fleet.js")


def name_of(path: Path) -> str:
    return path.relative_to(STATIC).as_posix()


async def test_pages_are_served_with_a_strict_policy(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    for path in PAGES:
        answer = await proxy.client.get(path)
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'self';")
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = await proxy.client.get(path, headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    redirect = await proxy.client.get("/ui")
    assert (redirect.status_code, redirect.headers["location"]) == (307, "ui/")


async def test_every_file_is_served_and_nothing_else(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    for path in FILES:
        answer = await proxy.client.get(f"/ui/static/{name_of(path)}")
        assert (answer.status_code, answer.content) == (200, path.read_bytes())
    async with httpx.AsyncClient(base_url=proxy.url, trust_env=False) as client:
        for name in ("nothing.js", "../routes.py", "%2e%2e/routes.py", "/etc/passwd", "..%2f..%2fapp.py", ""):
            answer = await client.get(f"/ui/static/{name}")
            assert answer.status_code in {400, 404}, name
            assert b"import" not in answer.content


async def test_pages_need_no_key_and_data_does(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1, host="0.0.0.0", keys=KEYS)
    for path in PAGES:
        assert (await proxy.client.get(path)).status_code == 200
        assert (await proxy.client.post(path, headers=bearer(ADMIN))).status_code in {404, 405}
    for headers in ({}, bearer(KEY)):
        assert (await proxy.client.get("/ui/feed", headers=headers)).status_code == 401
    async with proxy.client.stream("GET", "/ui/feed", headers=bearer(ADMIN)) as answer:
        assert answer.status_code == 200
    assert (await proxy.client.get("/ui/other")).status_code == 401


async def test_pages_are_on_the_admin_side_alone(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1, admin={"port": 0})
    for path in (*PAGES, "/ui/feed"):
        assert (await proxy.client.get(path)).json()["error"]["code"] == "wrong_listener"
    admin = f"http://127.0.0.1:{proxy.core.admin_port}"
    async with httpx.AsyncClient(base_url=admin, trust_env=False) as client:
        for path in PAGES:
            assert (await client.get(path)).status_code == 200


async def test_where_the_admin_side_is_closed_the_page_says_why(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1, host="0.0.0.0")
    assert (await proxy.client.get("/ui/")).status_code == 200
    answer = await proxy.client.get("/ui/feed")
    assert answer.status_code == 403
    assert "keys.admin" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_refer_to_nothing_outside(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    found = set(re.findall(r"https?://[^\s\"'`)]+|url\([^)]*\)|@import[^;]*", text))
    assert found <= {"http://www.w3.org/2000/svg"}
    assert text.count("\n") <= 400


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_scripts_build_no_html_from_strings(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc"):
        assert unsafe not in text
    for imported in re.findall(r'from "([^"]+)"', text):
        assert (path.parent / imported).resolve() in FILES


@pytest.mark.parametrize("name", ["index.html", "docs.html"])
def test_documents_have_no_inline_script_or_style(name: str) -> None:
    text = (STATIC / name).read_text(encoding="utf-8")
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", text)
    assert all('src="' in tag for tag in re.findall(r"<script[^>]*>", text))
