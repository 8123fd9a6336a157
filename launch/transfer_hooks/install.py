"""Put the hooks beside an engine Python's vLLM, take them away again, and say whether they are there.

They are two additions, a module and its metadata; no file of vLLM or Mooncake is changed.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
from pathlib import Path

import msgspec

from launch.doctor.facts import EnginePython
from launch.doctor.probes.python import ask_python
from launch.doctor.versions import MOONCAKE_PACKAGES, VLLM_PACKAGES
from launch.transfer_hooks import warmroute_transfer_hooks as plugin

MODULE = "warmroute_transfer_hooks.py"
METADATA = f"warmroute_transfer_hooks-{plugin.VERSION}.dist-info"
_ALL_METADATA = "warmroute_transfer_hooks-*.dist-info"
_CONNECTOR = "vllm/mooncake_connector.py"


class HooksError(Exception):
    """Hooks that cannot be installed, removed or verified; the message says why, and the remedy."""


class HooksReport(msgspec.Struct, frozen=True, kw_only=True):
    """Transfer path of one engine Python, and the hooks in it."""

    python: str
    vllm: str | None
    """Version; None where its distribution has another name than the known ones."""
    mooncake: dict[str, str]
    """Distributions of Mooncake -> version."""
    files: dict[str, str]
    """File of the transfer path -> SHA-256."""
    digest: str
    """One SHA-256 over all of them."""
    made_for: str | None
    """Version of vLLM that the hooks know this connector as; None: they do not."""
    hooks: str
    """absent, applied, or different: of another version of this project, or changed."""


def verify(python: str) -> HooksReport:
    """Describe an engine Python's transfer path and hooks.

    Raises:
        HooksError: it cannot be run, or has no vLLM with a Mooncake connector.
    """
    engine = _asked(python)
    lines = "".join(f"{name} {sha}\n" for name, sha in sorted(engine.transfer_path.items()))
    return HooksReport(
        python=python,
        vllm=_version(engine),
        mooncake={name: version for name, version in engine.packages.items() if name in MOONCAKE_PACKAGES},
        files=engine.transfer_path,
        digest=hashlib.sha256(lines.encode()).hexdigest(),
        made_for=plugin.CONNECTORS.get(engine.transfer_path[_CONNECTOR]),
        hooks=_hooks_in(_site(engine)),
    )


def apply(python: str) -> HooksReport:
    """Install the hooks; hooks of another version are replaced.

    Raises:
        HooksError: the connector is not one that they were made for, or a file cannot be written.
    """
    engine = _asked(python)
    sha = engine.transfer_path[_CONNECTOR]
    if sha not in plugin.CONNECTORS:
        version, known = _version(engine) or "unknown", sorted(plugin.CONNECTORS.values())
        why = "its connector is not the released one, was it patched?" if version in known else "another version"
        raise HooksError(
            f"{python}: the hooks were made for vLLM {' and '.join(known)}, not for this one, {version} ({why}): "
            f"mooncake_connector.py has SHA-256 {sha}"
        )
    site = _site(engine)
    source = Path(plugin.__file__).read_bytes()
    try:
        _remove(site)
        (site / MODULE).write_bytes(source)
        # The metadata last and at once: vLLM loads what it names.
        unfinished = site / f"{METADATA}.tmp"
        unfinished.mkdir()
        for name, text in _metadata(source).items():
            (unfinished / name).write_text(text, encoding="utf-8")
        os.replace(unfinished, site / METADATA)
    except OSError as error:
        raise HooksError(f"{site}: cannot be written ({error.strerror})") from error
    return verify(python)


def revert(python: str) -> HooksReport:
    """Remove the hooks, compiled files included; nothing where there are none.

    Raises:
        HooksError: a file cannot be removed.
    """
    site = _site(_asked(python))
    try:
        _remove(site)
    except OSError as error:
        raise HooksError(f"{site}: cannot be written ({error.strerror})") from error
    return verify(python)


def _asked(python: str) -> EnginePython:
    engine = ask_python(python)
    if engine.error is not None:
        raise HooksError(f"{python}: {engine.error}")
    if _CONNECTOR not in engine.transfer_path:
        raise HooksError(f"{python}: no vLLM with a Mooncake connector; give the engines' Python with --python")
    return engine


def _site(engine: EnginePython) -> Path:
    assert engine.site is not None
    return Path(engine.site)


def _version(engine: EnginePython) -> str | None:
    return next((engine.packages[name] for name in VLLM_PACKAGES if name in engine.packages), None)


def _hooks_in(site: Path) -> str:
    there = [*site.glob(_ALL_METADATA), *site.glob(MODULE)]
    if not there:
        return "absent"
    module = site / MODULE
    source = Path(plugin.__file__).read_bytes()
    whole = module.is_file() and module.read_bytes() == source and [site / METADATA] == list(site.glob(_ALL_METADATA))
    return "applied" if whole else "different"


def _remove(site: Path) -> None:
    for folder in (*site.glob(_ALL_METADATA), *site.glob(f"{METADATA}.tmp")):
        shutil.rmtree(folder)
    module = site / MODULE
    for file in (module, *site.glob(f"__pycache__/{module.stem}.*.pyc")):
        file.unlink(missing_ok=True)


def _metadata(source: bytes) -> dict[str, str]:
    """Files of the ``.dist-info`` folder: with them vLLM finds the entry point, and pip can remove all of it."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(source).digest()).rstrip(b"=").decode()
    names = ("METADATA", "entry_points.txt", "INSTALLER", "RECORD")
    return {
        "METADATA": f"Metadata-Version: 2.1\nName: warmroute-transfer-hooks\nVersion: {plugin.VERSION}\n",
        "entry_points.txt": "[vllm.general_plugins]\nwarmroute_transfer_hooks = warmroute_transfer_hooks:register\n",
        "INSTALLER": "warmroute\n",
        "RECORD": f"{MODULE},sha256={digest},{len(source)}\n" + "".join(f"{METADATA}/{name},,\n" for name in names),
    }
