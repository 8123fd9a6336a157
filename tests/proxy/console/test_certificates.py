"""Commands at a proxy that requires client certificates: ``top``, ``explain``, ``doctor`` and ``replay``."""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from typer.testing import CliRunner

from tests.proxy.conftest import StartProxy
from warmroute import build

COMMANDS = ("top", "explain", "doctor", "replay")
TURN = {"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.0, "input_length": 20, "output_length": 3, "turn": 1}
BODY = {"model": "stub", "prompt": list(range(40)), "max_tokens": 4}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the proxy's files, those of a client that its authority signed, and a stranger's."""
    folder, authority = tmp_path_factory.mktemp("tls"), trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    server, client = authority.issue_cert("127.0.0.1"), authority.issue_cert("operator")
    server.private_key_and_cert_chain_pem.write_to_path(folder / "server.pem")
    client.private_key_and_cert_chain_pem.write_to_path(folder / "both.pem")
    client.cert_chain_pems[0].write_to_path(folder / "client.pem")
    client.private_key_pem.write_to_path(folder / "client.key")
    expired = authority.issue_cert("127.0.0.1", not_after=datetime(2024, 1, 1, tzinfo=UTC))
    expired.private_key_and_cert_chain_pem.write_to_path(folder / "expired.pem")
    trustme.CA().issue_cert("stranger").private_key_and_cert_chain_pem.write_to_path(folder / "stranger.pem")
    key = load_pem_private_key(client.private_key_pem.bytes(), None)
    encrypted = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    (folder / "encrypted.key").write_bytes(encrypted)
    (folder / "text.pem").write_text("no certificate")
    (folder / "trace.jsonl").write_text(json.dumps({**TURN, "type": "text", "hash_ids": [1, 2]}) + "\n")
    return folder


async def call(files: Path, command: str, url: str, *names: str) -> tuple[int, str]:
    """Exit status and output of a command with the files of these options, in a thread: the proxy runs in this one."""
    (files / "run.jsonl").unlink(missing_ok=True)
    first = {
        "top": ("top", "--once", "--url", url),
        "explain": ("explain", "mine", "--url", url),
        "doctor": ("doctor", "--json", "--engine-python", sys.executable, "--proxy", url),
        "replay": ("replay", str(files / "trace.jsonl"), "-o", str(files / "run.jsonl"), "--endpoint", url),
    }[command]
    arguments = [*first, *(name if name.startswith("--") else str(files / name) for name in names)]
    result = await asyncio.to_thread(CliRunner(env={"COLUMNS": "400"}).invoke, build(), arguments)
    if command != "doctor" or result.exit_code == 2:
        return result.exit_code, result.output
    [found] = [one for one in json.loads(result.stdout)["findings"] if one["check"] == "conditions"]
    return {"ok": 0}.get(found["status"], 2), f"{found['found']}; {found['fix']}"


@pytest.mark.parametrize("newest", ["1.2", "1.3"])
async def test_a_client_certificate_is_presented_and_its_lack_has_a_remedy(
    start_proxy: StartProxy, files: Path, monkeypatch: pytest.MonkeyPatch, newest: str
) -> None:
    tls = {"certificate": files / "server.pem", "key": files / "server.pem", "client_ca": files / "ca.pem"}
    url = (await start_proxy(1, tls=tls)).url.replace("http://", "https://")
    made = ssl.create_default_context

    def create(**options: Any) -> ssl.SSLContext:
        context = made(**options)
        context.maximum_version = ssl.TLSVersion.TLSv1_2 if newest == "1.2" else ssl.TLSVersion.TLSv1_3
        return context

    monkeypatch.setattr(ssl, "create_default_context", create)
    trusted = ("--ca-file", "ca.pem")
    for command in COMMANDS:
        for names in (("--cert-file", "both.pem"), ("--cert-file", "client.pem", "--cert-key-file", "client.key")):
            status, output = await call(files, command, url, *trusted, *names)
            assert status == (1 if command == "explain" else 0), output
        status, output = await call(files, command, url, *trusted)
        assert (status, "give one with --cert-file and --cert-key-file" in output) == (2, True), output
        status, output = await call(files, command, url, *trusted, "--cert-file", "stranger.pem")
        assert (status, "--cert-file must be of an authority" in output) == (2, True), output
        status, output = await call(files, command, url, *trusted, "--cert-file", "expired.pem")
        assert (status, ", and valid" in output) == (2, True), output


@pytest.mark.parametrize("command", COMMANDS)
async def test_a_proxy_whose_certificate_has_expired_needs_another_one(
    start_proxy: StartProxy, files: Path, command: str
) -> None:
    tls = {"certificate": files / "expired.pem", "key": files / "expired.pem"}
    url = (await start_proxy(1, tls=tls)).url.replace("http://", "https://")
    status, output = await call(files, command, url, "--ca-file", "ca.pem")
    assert (status, "certificate has expired" in output, "renew its certificate" in output) == (2, True, True), output
    assert "--ca-file" not in output


async def test_a_replay_says_how_to_trust_an_endpoint_and_which_scheme_one_serves(
    start_proxy: StartProxy, files: Path
) -> None:
    tls = {"certificate": files / "server.pem", "key": files / "server.pem"}
    url = (await start_proxy(1, tls=tls)).url.replace("http://", "https://")
    status, output = await call(files, "replay", url)
    assert (status, "give the authority of its certificate with --ca-file" in output) == (2, True), output
    assert (await call(files, "replay", url, "--ca-file", "ca.pem"))[0] == 0
    status, output = await call(files, "replay", url.replace("https://", "http://"))
    assert (status, "if it serves HTTPS, begin its URL with https://" in output) == (2, True), output
    plain = (await start_proxy(1)).url.replace("http://", "https://")
    status, output = await call(files, "replay", plain)
    assert (status, "if it serves plain HTTP, begin its URL with http://" in output) == (2, True), output


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("--cert-key-file", "client.key"), "--cert-key-file is the key of --cert-file: give that too"),
        (("--cert-file", "none.pem"), "--cert-file {0}/none.pem: No such file or directory"),
        (
            ("--cert-file", "client.pem", "--cert-key-file", "none.key"),
            "--cert-key-file {0}/none.key: No such file or directory",
        ),
        (("--cert-file", "text.pem"), "--cert-file {0}/text.pem is not a PEM certificate with its unencrypted"),
        (("--cert-file", "client.pem"), "(or give its key with --cert-key-file)"),
        (
            ("--cert-file", "client.pem", "--cert-key-file", "encrypted.key"),
            "--cert-file {0}/client.pem and --cert-key-file {0}/encrypted.key are not a PEM certificate",
        ),
    ],
    ids=["a key alone", "no file", "no key file", "no certificate", "a certificate without its key", "encrypted"],
)
@pytest.mark.parametrize("command", COMMANDS)
async def test_files_that_cannot_be_used_are_named_by_their_option(
    files: Path, command: str, names: tuple[str, ...], message: str
) -> None:
    status, output = await call(files, command, "https://127.0.0.1:9", *names)
    assert (status, message.format(files) in output) == (2, True), output
