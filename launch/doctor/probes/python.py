"""List the engine software of another Python without importing any of it."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping

import msgspec

from launch.doctor.facts import EnginePython
from launch.doctor.versions import ASKED_PACKAGES

_TIMEOUT_S = 60.0
"""A cold virtual environment of 7 GB on a slow disk takes a while to answer even this."""

# Runs in the engines' Python. `find_spec` of a top-level package locates it and runs none of its code.
_QUESTION = r"""
import glob, hashlib, importlib.metadata as metadata, importlib.util, json, os, platform, re, subprocess, sys
answer = {"python": platform.python_version(), "packages": {}, "mooncake_missing": [], "mooncake_linked": {},
          "mooncake_bundled": []}
for name in json.loads(sys.argv[1]):
    try:
        answer["packages"][name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
def folder(name):
    spec = importlib.util.find_spec(name)
    places = list(spec.submodule_search_locations or []) if spec else []
    return places[0] if places else None
torch = folder("torch")
if torch and os.path.exists(os.path.join(torch, "version.py")):
    with open(os.path.join(torch, "version.py"), encoding="utf-8") as file:
        found = re.search(r"^cuda[^=\n]*=\s*'([^']+)'", file.read(), re.M)
    answer["torch_cuda"] = found.group(1) if found else None
openmp = os.path.join(sys.prefix, "lib", "libiomp5.so")
answer["openmp"] = openmp if os.path.exists(openmp) else None
mooncake = folder("mooncake")
for name in os.listdir(mooncake) if mooncake else []:
    if name.startswith("engine") and name.endswith(".so"):
        try:
            linked = subprocess.run(["ldd", os.path.join(mooncake, name)], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.SubprocessError):
            continue
        answer["mooncake_missing"] += re.findall(r"^\s*(\S+) => not found", linked.stdout, re.M)
        answer["mooncake_linked"].update(re.findall(r"^\s*(lib(?:fabric|efa)\S*) => (/\S+)", linked.stdout, re.M))
if mooncake:
    # auditwheel puts the libraries that it bundles beside the package.
    for beside in glob.glob(os.path.join(os.path.dirname(mooncake), "mooncake*.libs")):
        names = [name for name in sorted(os.listdir(beside)) if re.match(r"lib(fabric|efa)\b", name)]
        answer["mooncake_bundled"] += [os.path.join(beside, name) for name in names]
vllm = folder("vllm")
answer["site"] = os.path.dirname(vllm) if vllm else None
connector = os.path.join(vllm, "distributed/kv_transfer/kv_connector/v1/mooncake") if vllm else ""
answer["transfer_path"] = {}
for prefix, place, pattern in (("vllm", connector, r".+\.py"), ("mooncake", mooncake, r"engine.*\.so")):
    for name in sorted(os.listdir(place)) if place and os.path.isdir(place) else []:
        if re.fullmatch(pattern, name) and os.path.getsize(os.path.join(place, name)):
            with open(os.path.join(place, name), "rb") as file:
                answer["transfer_path"][prefix + "/" + name] = hashlib.sha256(file.read()).hexdigest()
print(json.dumps(answer))
"""


def ask_python(executable: str, environment: Mapping[str, str] | None = None) -> EnginePython:
    """Engine software of a Python; `EnginePython.error` has the reason when it could not be run.

    Args:
        executable: the Python.
        environment: where it differs from this process's: that of an engine, whose LD_LIBRARY_PATH decides which
            libraries its Mooncake loads.
    """
    variables = dict(os.environ)
    if environment is not None and "LD_LIBRARY_PATH" in environment:
        variables["LD_LIBRARY_PATH"] = environment["LD_LIBRARY_PATH"]
    try:
        done = subprocess.run(
            [executable, "-c", _QUESTION, json.dumps(ASKED_PACKAGES)],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
            stdin=subprocess.DEVNULL,
            env=variables,
            cwd=tempfile.gettempdir(),  # `-c` puts the current folder first, and ours contains packages
        )
    except OSError as error:
        return EnginePython(executable=executable, error=f"cannot be run ({error.strerror})")
    except subprocess.TimeoutExpired:
        return EnginePython(executable=executable, error=f"did not answer within {_TIMEOUT_S:g} s")
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().splitlines()[-1:] or ["no message"]
        return EnginePython(executable=executable, error=f"could not list its packages ({last[0]})")
    try:
        return msgspec.convert({"executable": executable, **json.loads(done.stdout)}, EnginePython)
    except (ValueError, TypeError) as error:
        return EnginePython(executable=executable, error=f"gave an invalid answer ({error}); is it a Python?")
