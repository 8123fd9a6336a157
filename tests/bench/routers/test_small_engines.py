"""The script that starts small engines: pools and overrides, contradicting settings, the rehearsal without a GPU."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from bench.gpu.engine_shape import QWEN3_06B, EngineShapeError, merged_overrides, pool_tokens, shape
from tests.integration.fleet import ROOT, free_port

SCRIPT = ROOT / "bench" / "gpu" / "small_engines.sh"
QWEN = "Qwen/Qwen3-0.6B"


def test_pools_are_counted_in_whole_blocks_of_all_layers() -> None:
    # As vLLM 0.20.2 reported them for these bytes: docs/head-to-head.md and docs/admission.md.
    assert pool_tokens(QWEN3_06B, 15_000_000_000, 16) == 130_784
    assert pool_tokens(QWEN3_06B, 18_400_000_000, 16) == 160_432
    # An eighth of the KV heads: pools of eight times as many tokens, but for the last block.
    assert pool_tokens({**QWEN3_06B, "num_key_value_heads": 1}, 15_000_000_000, 128) == 8 * 130_784


def test_the_known_model_is_the_one_of_the_models_folder() -> None:
    known = yaml.safe_load((ROOT / "configs" / "models" / "qwen3-0.6b.yaml").read_text())
    dimensions = {key: value for key, value in QWEN3_06B.items() if key != "torch_dtype"}
    assert dimensions == {key: known[key] for key in dimensions}


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({}, 1024),
        ({"torch_dtype": "float32"}, 512),
        ({"dtype": "float32"}, 512),
        ({"num_key_value_heads": None}, 512),
        ({"head_dim": None}, 1024),
        ({"num_hidden_layers": None}, 0),
    ],
)
def test_the_pool_follows_the_configuration(changes: dict[str, Any], tokens: int) -> None:
    config = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 32,
        "head_dim": 8,
        "torch_dtype": "bfloat16",
    }
    assert pool_tokens({**config, **changes}, 1024 * 128, 16) == tokens


def test_overrides_are_added_to_the_context() -> None:
    found = shape(QWEN, '{"num_key_value_heads": 1}', 130_000, 15_000_000_000, 128, random_weights=True)
    assert found == (1_046_272, {"num_key_value_heads": 1, "max_position_embeddings": 130_000})
    assert merged_overrides('{"rope_theta": 5.0}', 100, random_weights=False)["rope_theta"] == 5.0


def test_a_model_that_is_downloaded_has_a_pool_of_unknown_size() -> None:
    assert shape("some/model", "{}", 130_000, 1, 16, random_weights=False)[0] == 0


@pytest.mark.parametrize(
    ("overrides", "block", "pool_bytes", "random_weights", "reason"),
    [
        ("{", 16, 10**11, True, "give a JSON object"),
        ("[1]", 16, 10**11, True, "not a JSON object"),
        ('{"max_position_embeddings": 5}', 16, 10**11, True, "set MAX_MODEL_LEN"),
        ('{"num_key_value_heads": 1}', 16, 10**11, False, "LOAD_FORMAT=dummy"),
        ('{"num_key_value_heads": 3}', 16, 10**11, True, "no multiple of num_key_value_heads 3"),
        ('{"num_key_value_heads": "1"}', 16, 10**11, True, "no positive integer"),
        ("{}", 100, 10**11, True, "no multiple of 16"),
        ("{}", 0, 10**11, True, "no multiple of 16"),
        ("{}", 16, 10**9, True, "does not fit the pool of"),
    ],
)
def test_contradicting_settings_are_refused(
    overrides: str, block: int, pool_bytes: int, random_weights: bool, reason: str
) -> None:
    with pytest.raises(EngineShapeError, match=re.escape(reason)):
        shape(QWEN, overrides, 130_000, pool_bytes, block, random_weights=random_weights)


def run(output: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The script's end. It inherits none of its own variables."""
    own = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "ENGINE_PYTHON": sys.executable, "GPUS": "1"}
    return subprocess.run(
        [str(SCRIPT), str(output)], env=own | environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"SIMULATED": "1", "HF_OVERRIDES": '{"num_key_value_heads": 3}'}, "no multiple of num_key_value_heads 3"),
        ({"SIMULATED": "1", "MODEL": "some/model"}, "set MODEL to a folder"),
        ({"SIMULATED": "1", "BLOCK_SIZE": "100"}, "BLOCK_SIZE: 100"),
        ({"SIMULATED": "1", "TRANSFER": "rdma"}, "TRANSFER: none, tcp or nvlink"),
        ({"HF_OVERRIDES": '{"num_key_value_heads": 1}'}, "set LOAD_FORMAT=dummy"),
        ({"PROFILE": "h20"}, "set SIMULATED=1 too"),
        ({"ENGINE_SPEED": "2"}, "set SIMULATED=1 too"),
        ({"MPS": "25"}, "MPS: 0 or 1"),
        ({"PARTS": "40,40,10,10"}, "PARTS needs MPS=1"),
        ({"MPS": "1", "PARTS": "50,50"}, "PARTS: 2 values for PER_GPU=4 engines"),
        ({"MPS": "1", "PARTS": "60,50,5,5"}, "PARTS: 120 % of a GPU"),
        ({"MPS": "1", "PARTS": "50,,5,5"}, "PARTS: percentages from 1 to 99"),
        ({"NAMES": "a,b,c"}, "NAMES: 4 engines cannot be dealt equally to 3 names"),
        ({"NAMES": "a,,b"}, "NAMES: names of models, separated by commas"),
        ({"NAMES": "a,b,"}, "NAMES: names of models, separated by commas"),
        ({"NAMES": "-a,b c"}, "NAMES: names of models, separated by commas"),
    ],
)
def test_the_script_refuses_before_it_starts_an_engine(
    environment: dict[str, str], reason: str, tmp_path: Path
) -> None:
    ended = run(tmp_path, **environment)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert reason in ended.stdout + ended.stderr
    assert not (tmp_path / "pids").exists()


@pytest.mark.parametrize(
    ("starts", "parts", "names"),
    [(True, "", ""), (True, "40,40,10,10", "small,large"), (False, "", "")],
)
def test_engines_that_share_multiprocessors_end_with_their_service(
    starts: bool, parts: str, names: str, tmp_path: Path
) -> None:
    service, engine, seen = tmp_path / "nvidia-cuda-mps-control", tmp_path / "python", tmp_path / "percentage"
    service.write_text(
        '#!/bin/sh\ntouch "$CUDA_MPS_PIPE_DIRECTORY/control"\nexec sleep 600\n'
        if starts
        else "#!/bin/sh\necho no device\nexit 1\n"
    )
    engine.write_text(
        f'#!/bin/sh\ncase "$1" in *.py) exec {sys.executable} "$@" ;; esac\n'
        # All have begun before the first one ends.
        'while [ "$1" != --served-model-name ]; do shift; done\n'
        f'echo "$CUDA_MPS_ACTIVE_THREAD_PERCENTAGE $2" >> {seen}\n'
        f"until [ $(wc -l < {seen}) = 4 ]; do sleep 0.1; done\nexit 1\n"
    )
    for each in (service, engine):
        each.chmod(0o755)
    output = tmp_path / "fleet"
    with ended_with_the_test(output):
        ended = run(
            output,
            MPS="1",
            PARTS=parts,
            NAMES=names,
            FIRST_PORT=str(free_port()),
            PER_GPU="4",
            GPUS="1",
            LOAD_FORMAT="dummy",
            ENGINE_PYTHON=str(engine),
            PATH=f"{tmp_path}:{os.environ['PATH']}",
        )
        said = ended.stdout + ended.stderr
        assert ended.returncode == 1, said
        assert ("MPS did not start" in said, "no device" in said) == (not starts, not starts)
        assert seen.exists() == starts
        if starts:
            served = ["small", "small", "large", "large"] if names else ["q"] * 4
            expected = zip(parts.split(",") if parts else ["25"] * 4, served, strict=True)
            assert sorted(seen.read_text().splitlines()) == sorted(" ".join(each) for each in expected)
            assert "instance 0 did not become ready" in said
            assert len((output / "pids").read_text().split()) == 5


def first_port() -> int:
    """A port whose companions for events, their replay and hand-overs are free too."""
    while True:
        port = free_port()
        with ExitStack() as held:
            try:
                for each in (1000, 1100, 1200):
                    held.enter_context(socket.create_server(("127.0.0.1", port + each)))
            except OSError:
                continue
            return port


@contextmanager
def ended_with_the_test(output: Path) -> Iterator[None]:
    """End the engines of the script by their ids."""
    try:
        yield
    finally:
        pids = output / "pids"
        for pid in pids.read_text().split() if pids.exists() else []:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


@pytest.mark.fleet
def test_a_rehearsal_has_the_pool_and_the_blocks_of_the_engines(tmp_path: Path) -> None:
    port = first_port()
    overrides = {"num_hidden_layers": 14, "num_attention_heads": 64, "num_key_value_heads": 1}
    with ended_with_the_test(tmp_path):
        ended = run(
            tmp_path,
            SIMULATED="1",
            PER_GPU="1",
            FIRST_PORT=str(port),
            TRANSFER="nvlink",
            BLOCK_SIZE="128",
            HF_OVERRIDES=json.dumps(overrides),
            POOL_BYTES="15000000000",
            PROFILE="h100-nvlink-128",
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "pools of 2092544 tokens" in ended.stdout
        metrics = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30.0, trust_env=False).text
        facts = next(line for line in metrics.splitlines() if line.startswith("vllm:cache_config_info"))
        assert 'block_size="128"' in facts
        assert f'num_gpu_blocks="{2_092_544 // 128}"' in facts
    [instance] = yaml.safe_load((tmp_path / "proxy.yaml").read_text())["instances"]
    assert (instance["role"], instance["transport"]) == ("kv_both", "nvlink")
