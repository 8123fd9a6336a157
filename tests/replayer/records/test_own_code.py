"""Files that a class of a user's own is made of."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from replayer.records.own_code import own_code

FILES = {
    "owned.py": "import os, owned_pkg.deep\nfrom policies.types import Choice\ndef late():\n    import owned_late\n",
    "owned_late.py": "import owned_broken\nimport owned\n",
    "owned_broken.py": "def (\n",
    "owned_unused.py": "",
    "owned_pkg/__init__.py": "",
    "owned_pkg/deep.py": "from . import beside\nfrom .inner import thing\nfrom .absent import nothing\n",
    "owned_pkg/beside.py": "",
    "owned_pkg/inner/__init__.py": "from ..cousin import x\n",
    "owned_pkg/inner/thing.py": "",
    "owned_pkg/cousin.py": "import owned_late\n",
    "owned_pkg/unused.py": "",
    "policies/types.py": "",
}


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages are imported on the way to their modules, each test's from a folder of its own."""
    for name in [name for name in sys.modules if name.startswith("owned")]:
        monkeypatch.delitem(sys.modules, name)


def written(folder: Path) -> Path:
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("owned_late", {"owned_late", "owned_broken", "owned", "owned_pkg"}),
        ("owned_pkg.inner", {"owned_pkg", "owned_pkg.inner", "owned_pkg.cousin", "owned_late"}),
        ("owned_unused", {"owned_unused"}),
        ("owned_lost", set()),
        ("owned_lost.part", set()),
        ("policies.types", {"policies.types"}),
    ],
)
def test_modules_of_the_same_folder_are_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, expected: set[str]
) -> None:
    monkeypatch.syspath_prepend(str(written(tmp_path)))
    found = own_code(module)
    assert expected <= found.keys()
    assert not {"owned_unused", "owned_pkg.unused"} & (found.keys() - expected)
    assert not any(name.startswith("policies") for name in found.keys() - expected)
    assert "os" not in found


def test_the_whole_closure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(written(tmp_path)))
    package = {f"owned_pkg{name}" for name in ("", ".deep", ".beside", ".inner", ".inner.thing", ".cousin")}
    found = own_code("owned")
    assert found.keys() == {"owned", "owned_late", "owned_broken", *package}
    assert found["owned_pkg.inner"] == tmp_path / "owned_pkg" / "inner" / "__init__.py"


def test_other_installed_packages_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path / "site-packages")
    monkeypatch.syspath_prepend(str(folder))
    assert own_code("owned_pkg.cousin").keys() == {"owned_pkg.cousin", "owned_pkg"}
