"""Clients in environments of their own. Run by ``make test-clients``; any other run skips them with a reason."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.clients.extra import environments
from tests.clients.extra.rig import Client, Platform, Recorded

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs the environments unless it was asked for: they take minutes, the registries and 9 GB."""
    if "clients_extra" in (config.getoption("markexpr") or "").split():
        return
    for item in items:
        if item.get_closest_marker("clients_extra") and HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="run by `make test-clients`"))


@pytest.fixture
def client_of(tmp_path: Path) -> Iterator[Callable[[str], Client]]:
    """``client_of(ENVIRONMENT)``: a client in an empty home folder. Skips the test where the environment is missing."""
    # AIPerf puts sockets there, whose paths may have 107 characters.
    temporary = tempfile.TemporaryDirectory(prefix="wr-", ignore_cleanup_errors=True)

    def of(name: str) -> Client:
        if name == environments.NODE and shutil.which("npm") is None:
            pytest.skip("npm is not installed")
        reason = environments.missing(name)
        if reason is not None:
            pytest.skip(reason)
        return Client(environments.folder_of(name), tmp_path, Path(temporary.name))

    with temporary:
        yield of


@pytest.fixture
def platform() -> Platform:
    """The platform's own packages in the environment of npm. Skips the test on a platform without them."""
    found = Platform.here()
    if found is None:
        pytest.skip("the clients have no program for this platform in their locks")
    return found


@pytest_asyncio.fixture(loop_scope="module")
async def recorded(fleet_url: str) -> Recorded:
    """Rows that the fleet's proxy records from now on."""
    recorded = Recorded(fleet_url)
    await recorded.skip()
    return recorded


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """Folder of a tokenizer with one token per byte, for clients that count tokens themselves."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path / "tokenizer"
    folder.mkdir()
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=vocabulary | {"<|end|>": len(vocabulary)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "model_max_length": 100_000}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
