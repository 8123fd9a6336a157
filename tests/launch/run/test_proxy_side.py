"""The launcher and its proxy: stopping it while it serves, reading its admin side behind keys and TLS."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import signal
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import trustme
import yaml

from launch.fleet.file import FleetFile, parse_fleet
from launch.run.proxy_access import ProxyAccess
from launch.run.recycling import RowsRefusedError, instance_rows
from launch.run.signals import run_until_signal
from launch.run.state import read_state
from launch.run.supervisor import PROXY_CONFIG, Fleet
from tests.launch.conftest import fleet_values

pytestmark = pytest.mark.usefixtures("leaves_nothing")
KEY = {"name": "oncall", "sha256": hashlib.sha256(b"wr-of-an-operator").hexdigest()}


def fleet_with(stop_grace_s: float = 3, **proxy: Any) -> FleetFile:
    values = fleet_values(count=1, stop_grace_s=stop_grace_s)
    return parse_fleet({**values, "proxy": {**values["proxy"], **proxy}})


async def stream(url: str, max_tokens: int) -> AsyncIterator[str]:
    """The events of a stream."""
    body = {"model": "warm-sim", "prompt": "x", "max_tokens": max_tokens, "stream": True}
    async with (
        httpx.AsyncClient(timeout=60, trust_env=False) as client,
        client.stream("POST", f"{url}/v1/completions", json=body) as answer,
    ):
        async for line in answer.aiter_lines():
            if line:
                yield line


@pytest.mark.fleet
async def test_a_stop_waits_for_the_proxys_requests_and_only_then_stops_engines(tmp_path: Path) -> None:
    async with Fleet(fleet_with(stop_grace_s=0.1, grace_s=60), tmp_path) as fleet:
        events = stream(fleet.fleet.proxy_url(), 150)  # longer than stop_grace_s
        assert (await anext(events)).startswith("data: ")
        rest = asyncio.create_task(collect(events))
    assert (await rest)[-1] == "data: [DONE]"
    assert {process.name: process.exit_code for process in read_state(tmp_path).processes}["proxy"] == 0


@pytest.mark.fleet
async def test_a_stop_in_a_hurry_ends_streams_with_an_error_event(tmp_path: Path) -> None:
    hurry = asyncio.Event()
    async with Fleet(fleet_with(grace_s=600), tmp_path, hurry=hurry) as fleet:
        events = stream(fleet.fleet.proxy_url(), 30_000)
        assert (await anext(events)).startswith("data: ")
        rest = asyncio.create_task(collect(events))
        asyncio.get_running_loop().call_later(0.3, hurry.set)
    assert "error" in json.loads((await rest)[-1].removeprefix("data: "))
    assert read_state(tmp_path).status == "stopped"


async def collect(events: AsyncIterator[str]) -> list[str]:
    return [event async for event in events]


def test_further_signals_hurry_the_clean_up() -> None:
    hurry = asyncio.Event()

    async def work() -> int:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            assert not hurry.is_set()
            os.kill(os.getpid(), signal.SIGTERM)
            await hurry.wait()
            raise
        return 0

    assert run_until_signal(work(), on_second=hurry.set) == 130
    assert hurry.is_set()


def test_the_proxy_is_killed_only_after_its_own_grace_period() -> None:
    assert fleet_with(grace_s=30, drain_delay_s=5).proxy_stop_s == 45
    assert fleet_with().proxy_stop_s == 40
    assert fleet_with(grace_s=1, stop_grace_s=100).proxy_stop_s == 100


class Certificates(NamedTuple):
    """TLS settings with a certificate for a name that is not the address the launcher connects to."""

    authority: trustme.CA
    settings: dict[str, str]


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder, authority = tmp_path_factory.mktemp("tls"), trustme.CA()
    issued = authority.issue_cert("proxy.example.com")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    for number, blob in enumerate((*issued.cert_chain_pems, authority.cert_pem)):
        blob.write_to_path(folder / "chain.pem", append=number > 0)
    authority.cert_pem.write_to_path(folder / "ca.pem")
    return Certificates(authority, {"certificate": str(folder / "chain.pem"), "key": str(folder / "key.pem")})


@pytest.fixture
def secured(tls: Certificates, tmp_path: Path) -> Callable[[str], FleetFile]:
    """Makes a fleet whose proxy has keys, TLS or both."""

    def make(kind: str) -> FleetFile:
        if kind == "keys":
            return fleet_with(keys={"admin": [KEY]})
        if kind == "tls":
            return fleet_with(tls=tls.settings)
        (tmp_path / "keys.yaml").write_text(yaml.safe_dump({"admin": [KEY]}))
        mutual = {**tls.settings, "client_ca": str(Path(tls.settings["certificate"]).with_name("ca.pem"))}
        base = fleet_with()
        admin = {"port": base.proxy_port + 1}
        return fleet_with(keys={"file": str(tmp_path / "keys.yaml")}, tls=mutual, admin=admin)

    return make


@pytest.mark.fleet
@pytest.mark.parametrize("kind", ["keys", "tls", "keys file, client certificates, admin listener"])
async def test_the_launcher_reads_recycle_requests_behind_keys_and_tls(
    kind: str, secured: Callable[[str], FleetFile], tmp_path: Path
) -> None:
    async with Fleet(secured(kind), tmp_path / "run") as fleet:
        rows = await instance_rows(fleet.proxy_access)
        assert [row["name"] for row in rows] == ["inst-0"]
        assert fleet.proxy_access.admin_url.startswith("http://" if kind == "keys" else "https://")
        if kind == "keys":
            with pytest.raises(RowsRefusedError, match="it answers 401"):
                await instance_rows(ProxyAccess(fleet.fleet))  # the key of another launcher
        written = "".join(path.read_text() for path in (tmp_path / "run").iterdir())
        assert "wr-" not in written
        assert ("launcher-" in (tmp_path / "run" / PROXY_CONFIG).read_text()) == (kind != "tls")


def test_a_key_is_added_only_where_the_admin_side_is_closed_without() -> None:
    open_side = fleet_with()
    assert ProxyAccess(open_side).with_key(open_side.proxy_config()) == open_side.proxy_config()
    assert not fleet_with(keys={"client": [KEY]}).admin_needs_key()
    exposed = fleet_with(host="0.0.0.0", keys={"client": [KEY]})
    assert exposed.admin_needs_key()
    assert exposed.admin_url().startswith("http://127.0.0.1:")
    keyed = ProxyAccess(exposed).with_key(exposed.proxy_config())["keys"]
    assert keyed["client"] == [KEY]
    assert [set(key) for key in keyed["admin"]] == [{"name", "sha256"}]


def test_the_generated_settings_are_for_their_owner_only(tmp_path: Path) -> None:
    fleet = fleet_with(engine_key="sk-of-the-engines-0123")
    path = tmp_path / PROXY_CONFIG
    path.write_text("an earlier one, which others can read")
    ProxyAccess(fleet).write_config(fleet.proxy_config(), path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert yaml.safe_load(path.read_text())["engine_key"] == "sk-of-the-engines-0123"


async def test_another_certificate_of_the_same_authority_is_refused(tls: Certificates) -> None:
    fleet = fleet_with(tls=tls.settings)
    access = ProxyAccess(fleet)
    access.read_certificate()
    other = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.authority.issue_cert("127.0.0.1").configure_cert(other)
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", fleet.proxy_port, ssl=other)
    async with server:
        with pytest.raises(RowsRefusedError, match="CERTIFICATE_VERIFY_FAILED"):
            await instance_rows(access)


async def test_a_renewed_certificate_is_trusted_beside_the_one_before(tls: Certificates, tmp_path: Path) -> None:
    chain, key = [Path(shutil.copy(tls.settings[each], tmp_path)) for each in ("certificate", "key")]
    fleet = fleet_with(tls={"certificate": str(chain), "key": str(key)})
    access = ProxyAccess(fleet)
    access.read_certificate()
    before, after = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    before.load_cert_chain(chain, key)
    renewed = tls.authority.issue_cert("proxy.example.com")
    renewed.configure_cert(after)
    chain.write_text("-----BEGIN CERTIFICATE-----\nhalf")
    for written in (False, True):
        if written:
            renewed.cert_chain_pems[0].write_to_path(chain)
        for context, trusted in ((before, True), (after, written)):
            server = await asyncio.start_server(
                lambda _, writer: writer.close(), "127.0.0.1", fleet.proxy_port, ssl=context
            )
            async with server:
                if trusted:
                    assert await instance_rows(access) == []  # no answer, but no refusal
                else:
                    with pytest.raises(RowsRefusedError, match="CERTIFICATE_VERIFY_FAILED"):
                        await instance_rows(access)


def test_a_certificate_file_that_is_gone_is_named(tls: Certificates, tmp_path: Path) -> None:
    copy = tmp_path / "chain.pem"
    copy.write_bytes(Path(tls.settings["certificate"]).read_bytes())
    access = ProxyAccess(fleet_with(tls={**tls.settings, "certificate": str(copy)}))
    copy.unlink()
    with pytest.raises(ValueError, match=r"proxy\.tls\.certificate .*chain\.pem"):
        access.read_certificate()
