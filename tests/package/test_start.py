"""Starting the command line: import names that others have too, extras that are not installed, source trees."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import warmroute

ROOT = Path(warmroute.__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WITHOUT_EXTRAS = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in modules:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

import warmroute
modules = set(warmroute.EXTRAS)
sys.meta_path.insert(0, Missing())
"""
ONE_COMMAND = f"""{WITHOUT_EXTRAS}
sys.argv = ["warmroute", *sys.argv[1:]]
warmroute.main()
"""
EACH_COMMAND = f"""{WITHOUT_EXTRAS}
import gc, json, os
import numpy, pydantic, typer.rich_utils
import launch.fleet.file, proxy.settings, replayer.records.runs
warmroute.build()  # what most commands import, once; each continues in a process of its own
gc.freeze()  # and its collector need not read, and so copy, all of that
ended = []
for arguments in json.loads(sys.argv[1]):
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(writing, 2)
        os.close(reading)
        os.close(writing)
        sys.argv = ["warmroute", *arguments]
        warmroute.main()
        sys.exit()
    os.close(writing)
    with open(reading) as pipe:
        said = pipe.read()
    ended.append([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said])
print(json.dumps(ended))
"""
CORE = (
    ["--help"], ["serve", "--help"], ["report", "--help"], ["up", "--help"], ["doctor", "--help"], ["key", "new"],
)  # fmt: skip
LAB = (
    ["demo"],
    ["replay", "trace.jsonl"],
    ["compare", "a.jsonl", "b.jsonl"],
    ["report", "a.jsonl", "b.jsonl"],
    ["simulate", "trace.jsonl"],
    ["trace", "synth", "-o", "trace.jsonl"],
    ["sim", "fit", "h20"],
    ["analyse", "cache", "trace.jsonl"],
)


def run(*arguments: str, cwd: Path | str = "/", path: tuple[Path, ...] = (ROOT,)) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def names(requirements: list[str]) -> set[str]:
    return {Requirement(each).name for each in requirements}


# other distributions' packages


@pytest.mark.parametrize("file", ["proxy/__init__.py", "launch/__init__.py", "sim.py"])
def test_a_package_that_hides_ours_is_named_with_the_fix(file: str, tmp_path: Path) -> None:
    foreign = tmp_path / file
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("raise SystemExit('the foreign package was imported')\n", encoding="utf-8")
    done = run("-m", "warmroute", "--version", path=(tmp_path, ROOT))
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert f"finds {foreign} instead of warmroute's {ROOT}" in done.stderr
    assert "uv tool install warmroute" in done.stderr


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with our import names as a wheel leaves them, RECORD included."""
    home = tmp_path / "site-packages"
    home.mkdir()
    shutil.copy(ROOT / "warmroute.py", home)
    lines = ["warmroute.py,,"]
    for name in warmroute.PACKAGES:
        text = f'"""{name}, as installed."""\n'.encode()
        (home / name).mkdir()
        (home / name / "__init__.py").write_bytes(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text).digest()).rstrip(b"=").decode()
        lines.append(f"{name}/__init__.py,sha256={digest},{len(text)}")
    info = home / "warmroute-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: warmroute\nVersion: 0.1.0\n", encoding="utf-8")
    (info / "RECORD").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return home


def checked(home: Path) -> str:
    """Last line that the check prints."""
    done = run("-c", "import warmroute; warmroute.check_packages(); print('ours')", path=(home,))
    return (done.stdout + done.stderr).strip().splitlines()[-1]


def test_packages_as_installed_are_accepted(installed: Path) -> None:
    assert checked(installed) == "ours"


def test_a_package_that_another_distribution_has_overwritten_is_named(installed: Path) -> None:
    (installed / "proxy" / "__init__.py").write_text("# proxy.py\n", encoding="utf-8")
    assert f"another distribution has overwritten warmroute's {installed}/proxy/__init__.py" in checked(installed)


def test_a_package_that_was_removed_with_another_distribution_is_named(installed: Path) -> None:
    (installed / "configs" / "__init__.py").unlink()
    assert re.search(r"`import configs` finds .* instead of warmroute's .*/site-packages/configs", checked(installed))


def test_child_processes_ignore_modules_of_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "sim.py").write_text("raise SystemExit('sim.py of the current folder')\n", encoding="utf-8")
    program = (
        "import subprocess, sys, warmroute\n"
        "sys.argv = ['warmroute', '--help']\n"
        "try: warmroute.main()\n"
        "except SystemExit: pass\n"
        "sys.exit(subprocess.run([sys.executable, '-m', 'sim', '--help']).returncode)"
    )
    done = run("-P", "-c", program, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "python -m sim" in done.stdout


def test_a_source_tree_needs_no_installation() -> None:
    done = run("-c", "import os, warmroute; warmroute._keep_the_current_folder_out(); print(os.environ['PYTHONPATH'])",
               cwd=ROOT, path=())  # fmt: skip
    assert done.stdout.strip() == str(ROOT), done.stderr


# extras


@pytest.fixture(scope="module")
def without_extras(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit status and standard error of each command."""
    folder = tmp_path_factory.mktemp("without_extras")
    for name in ("a.jsonl", "b.jsonl", "trace.jsonl"):
        (folder / name).write_text("", encoding="utf-8")
    commands = [*CORE, *LAB]
    done = run("-c", EACH_COMMAND, json.dumps(commands), cwd=folder)
    assert done.returncode == 0, done.stderr
    ended = json.loads(done.stdout)
    return {" ".join(command): (code, said) for command, (code, said) in zip(commands, ended, strict=True)}


@pytest.mark.parametrize("command", [" ".join(command) for command in CORE])
def test_commands_of_the_core_need_no_extra(command: str, without_extras: dict[str, tuple[int, str]]) -> None:
    code, said = without_extras[command]
    assert code == 0, said


@pytest.mark.parametrize("command", [" ".join(command) for command in LAB])
def test_a_command_whose_extra_is_not_installed_names_it(
    command: str, without_extras: dict[str, tuple[int, str]]
) -> None:
    code, said = without_extras[command]
    assert code == 2, said
    expected = r"error: this command needs \w+, which is not installed: pip install 'warmroute\[lab\]'\n"
    assert re.fullmatch(expected, said), said


def test_serve_with_a_tokenizer_names_its_extra(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    config = tmp_path / "proxy.yaml"
    config.write_text(
        f"instances: [{{url: 'http://127.0.0.1:1'}}]\ntokenizer: {{path: {tmp_path}}}\n", encoding="utf-8"
    )
    done = run("-c", ONE_COMMAND, "serve", "--config", str(config))
    assert done.returncode == 2
    assert "tokenizer.path is set, but" in done.stderr
    assert "pip install 'warmroute[tokenizer]'" in done.stderr


def test_extras_install_what_the_errors_say() -> None:
    distributions = {"pynvml": "nvidia-ml-py"}
    for module, extra in warmroute.EXTRAS.items():
        name = distributions.get(module, module)
        assert name in names(PROJECT["optional-dependencies"][extra])
        assert name not in names(PROJECT["dependencies"])


def test_the_engines_extra_is_a_tested_pair() -> None:
    from launch.doctor.versions import TESTED

    pins = set(PROJECT["optional-dependencies"]["engines"])
    tested = [{f"{each.vllm_package}=={each.vllm}", f"{each.mooncake_package}=={each.mooncake}"} for each in TESTED]
    assert any(pair <= pins for pair in tested)


def test_every_package_is_marked_as_typed() -> None:
    assert [name for name in warmroute.PACKAGES if not (ROOT / name / "py.typed").exists()] == []


def test_the_lock_has_what_tests_need_and_no_engines() -> None:
    locked = {line.partition("==")[0] for line in (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()}
    extras = PROJECT["optional-dependencies"]
    needed = names(PROJECT["dependencies"]) | names(extras["lab"]) | names(extras["tokenizer"]) | names(extras["dev"])
    assert {name.lower() for name in needed - {"warmroute"}} <= locked
    assert not locked & (names(extras["engines"]) - names(extras["lab"]))


# a full disk


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_an_output_without_room_is_one_line() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "warmroute", "--help"],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.startswith("error: the standard output cannot be written: No space left on device\n")
