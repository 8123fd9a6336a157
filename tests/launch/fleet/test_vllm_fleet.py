"""vLLM fleet files: every contradiction is named, every shipped file gives the exact flags and environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.engines.commands import KINDS, ProcessSpec, engine_specs
from launch.engines.vllm import resolve_model, resolve_python
from launch.fleet.file import FLEETS, FleetError, FleetFile, load_fleet, parse_fleet
from launch.fleet.overrides import MODEL_VARIABLE, PYTHON_VARIABLE, apply_overrides
from launch.run.transport import proven_transport
from policies.types import Transport
from proxy.settings import load_settings

GOOD: dict[str, Any] = {"kind": "vllm", "count": 2, "model": "m"}
PD = [{"role": "kv_producer", "count": 2}, {"role": "kv_consumer", "count": 2}]
REMOTE = {"url": "http://10.0.0.2:8000", "role": "kv_both", "bootstrap_url": "http://10.0.0.2:8998"}


def without(*keys: str, **values: Any) -> dict[str, Any]:
    return {key: value for key, value in {**GOOD, **values}.items() if key not in keys}


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (PYTHON_VARIABLE, MODEL_VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (without("model"), "model: required with kind vllm"),
        (without("count"), "count: Field required"),
        (without(sim={}), "sim: is for kind sim"),
        ({"kind": "sim", "count": 1, "vllm": {}}, "vllm: is for kind vllm"),
        ({"kind": "sim", "groups": [{"count": 1, "devices": [0]}]}, "groups.0: vllm, devices and model are for kind"),
        (without(groups=PD), "groups: with groups, give `count`"),
        # ports of every kind
        (
            without(base_events_port=9101, vllm={"events": {"enabled": True}}),
            "9101 is assigned to both inst-0 (bootstrap",
        ),
        (without(base_master_port=8102), "port 8102 is assigned to both inst-1 and inst-0 (MASTER_PORT)"),
        (without(proxy={"port": 29501}), "port 29501 is assigned to both inst-1 (MASTER_PORT) and the proxy"),
        (
            without(base_events_replay_port=5701, vllm={"events": {"enabled": True, "replay": True}}),
            "port 5701 is assigned to both inst-0 (KV events) and inst-0 (KV events replay)",
        ),
        # devices
        (without("count", devices=[0, 0]), "devices: 0 would be used twice"),
        (without(devices=[0, 1, 2]), "2 instances of 1 device(s) each need 2 devices, found 3"),
        (without("count", devices=[0, 1, 2], vllm={"tensor_parallel_size": 2}), "3 devices cannot be divided into 2"),
        (without("count", devices=[0], vllm={"device": "cpu"}), "devices: engines on the CPU have none"),
        (
            without("count", groups=[{**PD[0], "devices": [0, 1]}, PD[1]]),
            "groups: give `devices` in every group or in none",
        ),
        # roles
        (without(role="kv_producer"), "producers without consumers"),
        (without(role="kv_consumer"), "consumers without producers"),
        ({"kind": "sim", "groups": [PD[0]]}, "producers without consumers"),
        (without("count", groups=[PD[0], PD[0]]), "p-0, p-1 would be named twice"),
        (without(name_prefix="a/"), "name_prefix: 'a/0' cannot be the name"),
        # incompatible engines
        (without("count", groups=[PD[0], {**PD[1], "model": "n"}]), "model: p-0 has 'm' and d-0 'n'"),
        (without("count", groups=[PD[0], {**PD[1], "vllm": {"dtype": "bfloat16"}}]), "vllm.dtype: p-0 has None"),
        (without("count", groups=[PD[0], {**PD[1], "vllm": {"block_size": 32}}]), "vllm.block_size: p-0 has None"),
        (without("count", groups=[PD[0], {**PD[1], "vllm": {"kv_cache_dtype": "fp8"}}]), "vllm.kv_cache_dtype"),
        (
            without("count", groups=[PD[0], {**PD[1], "vllm": {"transfer": {"protocol": "efa"}}}]),
            "vllm.transfer.protocol: p-0 and d-0 differ",
        ),
        (without("count", groups=[PD[0], {**PD[1], "vllm": {"dtpye": "x"}}]), "groups.1.vllm.dtpye: unknown key"),
        # settings of the launcher itself
        (without(vllm={"extra_args": ["--dtype=half"]}), "the launcher sets --dtype itself; use vllm.dtype"),
        (without(env={"MC_INTRANODE_NVLINK": "1"}), "env.MC_INTRANODE_NVLINK: the launcher sets it itself"),
        (without(env={"VLLM_MOONCAKE_BOOTSTRAP_PORT": "1"}), "use base_bootstrap_port"),
        # transfer
        (without(role="none", vllm={"transfer": {"protocol": "tcp"}}), "no instance has a KV connector"),
        (without(vllm={"transfer": {"extra_config": {"mooncake_protocol": "x"}}}), "use vllm.transfer.protocol"),
        (without(vllm={"transfer": {"kv_role": "none"}}), "vllm.transfer.kv_role: none is no kv_role"),
        (without(vllm={"device": "cpu", "transfer": {"protocol": "nvlink"}}), "nvlink needs vllm.device: cuda"),
        (
            without(
                vllm={"transfer": {"protocol": "nvlink"}},
                env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            ),
            "env.PYTORCH_CUDA_ALLOC_CONF: NVLink transfers need plain device memory",
        ),
        (
            without(vllm={"transfer": {"protocol": "nvlink"}, "extra_args": ["--enable-sleep-mode"]}),
            "remove --enable-sleep-mode",
        ),
        (without(vllm={"transfer": {"protocol": "nvlink"}}, env={"MC_FORCE_TCP": "1"}), "env.MC_FORCE_TCP"),
        (
            without(proxy={"offload": {"hold_s": 480}}),
            "proxy.offload.hold_s: 480 contradicts vllm.transfer.abort_timeout_s, by which P holds KV for 30 s; remove",
        ),
        # peers
        (
            without(peers=[REMOTE]),
            "host: 127.0.0.1 is reachable from this machine only, but there are peers on 10.0.0.2",
        ),
        (
            without(host="10.0.0.1", peers=[{**REMOTE, "bootstrap_url": "http://localhost:8998"}]),
            "peers.0.bootstrap_url: http://localhost:8998 is a loopback address",
        ),
        (
            without(host="10.0.0.1", peers=[REMOTE, {"url": "http://127.0.0.1:8000"}]),
            "peers.1.url: http://127.0.0.1:8000 is a loopback address",
        ),
        (
            without(host="10.0.0.1", peers=[REMOTE], vllm={"transfer": {"protocol": "nvlink"}}),
            "nvlink works within one host, but there are peers on 10.0.0.2",
        ),
        (without(host="0.0.0.0"), "advertise_host: required when host means all addresses"),
        (without(peers=[{"url": "http://127.0.0.1:8000", "role": "kv_both"}]), "give its bootstrap_url"),
    ],
)
def test_every_contradiction_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(FleetError) as caught:
        parse_fleet(values, "fleet.yaml")
    assert message in str(caught.value)


def test_peers_reach_the_proxy_and_nothing_else() -> None:
    peer = {**REMOTE, "name": "far", "events_url": "tcp://10.0.0.2:5701", "transport": "rdma"}
    fleet = parse_fleet({**GOOD, "host": "0.0.0.0", "advertise_host": "10.0.0.1", "peers": [peer]})
    assert [spec.name for spec in engine_specs(fleet)] == ["inst-0", "inst-1"]
    far = fleet.proxy_config()["instances"][2]
    assert far == {**peer}
    first = engine_specs(fleet)[0]
    assert first.environment["VLLM_HOST_IP"] == "10.0.0.1"
    assert (first.url, first.bootstrap_url) == ("http://10.0.0.1:8101", "http://10.0.0.1:9101")
    assert load_settings(**fleet.proxy_config()).instances[2].bootstrap_url == REMOTE["bootstrap_url"]
    assert fleet.proxy_url() == "http://127.0.0.1:9090"


def option(spec: ProcessSpec, name: str) -> str | None:
    command = list(spec.command)
    return command[command.index(name) + 1] if name in command else None


EXPECTED: dict[str, dict[str, Any]] = {
    "combined-8x": {"roles": ["none"] * 8, "protocol": None, "planner": "never"},
    "elastic-8x-kv-both": {
        "roles": ["kv_both"] * 8,
        "protocol": "nvlink",
        "policy": "joint",
        "planner": "cost_model",
        "block": "128",
    },
    "elastic-4x-kv-both": {
        "roles": ["kv_both"] * 4,
        "protocol": "nvlink",
        "policy": "joint",
        "planner": "cost_model",
        "block": "128",
    },
    "elastic-2x-kv-both": {"roles": ["kv_both"] * 2, "protocol": "nvlink", "planner": "cost_model", "block": "128"},
    "static-pd-4p4d": {
        "roles": ["kv_producer"] * 4 + ["kv_consumer"] * 4,
        "protocol": "nvlink",
        "planner": "static_pd",
        "block": "128",
    },
    "static-pd-6p2d": {
        "roles": ["kv_producer"] * 6 + ["kv_consumer"] * 2,
        "protocol": "nvlink",
        "planner": "static_pd",
        "block": "128",
    },
    "efa-p5": {
        "roles": ["kv_both"] * 8,
        "protocol": "efa",
        "planner": "cost_model",
        "max_len": "65536",
        "block": "128",
    },
    "efa-p5e": {"roles": ["kv_both"] * 8, "protocol": "efa", "planner": "cost_model", "block": "128"},
    "efa-p5en": {"roles": ["kv_both"] * 8, "protocol": "efa", "planner": "cost_model", "block": "128"},
    "efa-p6-b300": {
        "roles": ["kv_both"] * 8,
        "protocol": "efa",
        "planner": "cost_model",
        "max_len": "262144",
        "block": "128",
    },
    "efa-p6": {"roles": ["kv_both"] * 8, "protocol": "efa", "planner": "cost_model", "block": "128"},
    "rdma-8x": {"roles": ["kv_both"] * 8, "protocol": "rdma", "planner": "cost_model", "block": "128"},
    "vllm-cpu-4x": {"roles": ["kv_both"] * 4, "protocol": "tcp", "planner": "never", "cpu": True},
}


def test_every_shipped_vllm_file_is_expected() -> None:
    shipped = {path.stem for path in FLEETS.glob("*.yaml") if yaml.safe_load(path.read_text())["kind"] == "vllm"}
    assert shipped == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_shipped_files_give_the_exact_flags_and_environment(name: str) -> None:
    fleet, expected = load_fleet(Path(name)), EXPECTED[name]
    specs = engine_specs(fleet)
    on_cpu = expected.get("cpu", False)
    assert [member.role.value for member in fleet.members] == expected["roles"]
    for index, (spec, role) in enumerate(zip(specs, expected["roles"], strict=True)):
        _check_flags(fleet, spec, index, expected)
        _check_transfer(fleet, spec, index, role, expected["protocol"])
        variables = spec.environment
        assert variables["MASTER_PORT"] == str(29500 + index)
        assert variables["PYTHONHASHSEED"] == "0"
        assert variables["VLLM_HOST_IP"] == "127.0.0.1"
        assert variables["VLLM_NO_USAGE_STATS"] == variables["DO_NOT_TRACK"] == variables["SPT_NOENV"] == "1"
        assert variables.get("CUDA_VISIBLE_DEVICES") == (None if on_cpu else str(index))
        events = json.loads(option(spec, "--kv-events-config") or "{}")
        assert events["endpoint"] == f"tcp://*:{5701 + index}"
        assert events["replay_endpoint"] == f"tcp://*:{5801 + index}"
        assert (events["enable_kv_cache_events"], events["publisher"], events["topic"]) == (True, "zmq", "kv-events")
    settings = load_settings(**fleet.proxy_config())
    assert settings.policy.name == expected.get("policy", "warm")
    assert settings.offload.planner == expected["planner"]
    assert [instance.events_url for instance in settings.instances] == [
        f"tcp://127.0.0.1:{5701 + index}" for index in range(len(specs))
    ]
    assert {instance.transport for instance in settings.instances} == {None}  # nothing is proven before the start


def _check_flags(fleet: FleetFile, spec: ProcessSpec, index: int, expected: dict[str, Any]) -> None:
    assert spec.command[1:3] == ("-m", "vllm.entrypoints.openai.api_server")
    assert option(spec, "--port") == str(fleet.base_port + index)
    assert "--enable-prefix-caching" in spec.command
    assert "--enable-prompt-tokens-details" in spec.command
    if expected.get("cpu"):
        assert option(spec, "--model") == resolve_model(".venv-engines/tiny-model")
        assert spec.command[0] == resolve_python(".venv-engines/bin/python")
        wanted = {"--dtype": "float32", "--block-size": "16", "--num-gpu-blocks-override": "8192"}
        wanted |= {"--max-model-len": "65536", "--max-num-seqs": "8", "--served-model-name": "tiny"}
        assert {flag: option(spec, flag) for flag in wanted} == wanted
        assert "--enforce-eager" in spec.command
        cpu = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        cpu |= {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1"}
        assert {variable: spec.environment[variable] for variable in cpu} == cpu
        tcmalloc, openmp = spec.environment["LD_PRELOAD"].split(":")
        assert tcmalloc.endswith("libtcmalloc_minimal.so.4")
        assert openmp == str(Path(spec.command[0]).parent.parent / "lib" / "libiomp5.so")
        return
    assert option(spec, "--model") == "Qwen/Qwen3-Coder-30B-A3B-Instruct"
    assert option(spec, "--served-model-name") == "qwen3-coder"
    assert option(spec, "--max-model-len") == expected.get("max_len", "200000")
    assert option(spec, "--block-size") == expected.get("block")
    assert option(spec, "--gpu-memory-utilization") == "0.9"
    assert not {"LD_PRELOAD", "VLLM_SERVER_DEV_MODE", "HF_HUB_OFFLINE"} & set(spec.environment)


def _check_transfer(fleet: FleetFile, spec: ProcessSpec, index: int, role: str, protocol: str | None) -> None:
    text = option(spec, "--kv-transfer-config")
    names = set(spec.environment)
    if protocol is None:
        assert text is None
        assert spec.bootstrap_url is None
        assert not {"VLLM_MOONCAKE_BOOTSTRAP_PORT", "MC_INTRANODE_NVLINK", "FI_EFA_ENABLE_SHM_TRANSFER"} & names
        return
    assert json.loads(text or "{}") == {
        "kv_connector": "MooncakeConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"mooncake_protocol": "tcp" if protocol == "nvlink" else protocol},
    }
    assert spec.environment["VLLM_MOONCAKE_BOOTSTRAP_PORT"] == str(fleet.base_bootstrap_port + index)
    assert spec.environment["VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"] == "30"
    assert ("MC_INTRANODE_NVLINK" in names) == (protocol == "nvlink")
    assert ("MC_INTRANODE_NVLINK" in spec.drop_environment) == (protocol != "nvlink")
    assert ("MC_FORCE_TCP" in spec.drop_environment) == (protocol == "nvlink")
    fabric = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_ENABLE_SHM_TRANSFER": "0"}
    assert {name: spec.environment[name] for name in fabric if name in names} == (fabric if protocol == "efa" else {})
    directories = ("/opt/amazon/efa/lib", "/opt/amazon/efa/lib64")
    assert spec.search_paths == ({"LD_LIBRARY_PATH": directories} if protocol == "efa" else {})
    # A consumer has no bootstrap server to wait for.
    bootstrap = None if role == "kv_consumer" else f"http://127.0.0.1:{fleet.base_bootstrap_port + index}"
    assert spec.bootstrap_url == bootstrap
    assert len(spec.ready_urls) == (1 if bootstrap is None else 2)


def test_a_kv_role_of_its_own_keeps_the_role_for_the_proxy() -> None:
    values = {"kind": "vllm", "model": "m", "groups": PD, "vllm": {"transfer": {"kv_role": "kv_both"}}}
    fleet = parse_fleet(values)
    specs = engine_specs(fleet)
    assert {json.loads(option(spec, "--kv-transfer-config") or "")["kv_role"] for spec in specs} == {"kv_both"}
    assert all(spec.bootstrap_url for spec in specs)
    assert [entry["role"] for entry in fleet.proxy_config()["instances"]] == ["kv_producer"] * 2 + ["kv_consumer"] * 2


def test_groups_take_what_they_do_not_say_from_the_fleet() -> None:
    values = {
        "kind": "vllm",
        "model": "m",
        "env": {"A": "1"},
        "vllm": {"tensor_parallel_size": 2, "max_num_seqs": 8, "transfer": {"kv_load_failure_policy": "recompute"}},
        "groups": [
            {"role": "kv_producer", "devices": [0, 1]},
            {
                "role": "kv_consumer",
                "devices": [4, 5, "GPU-x", "GPU-y"],
                "vllm": {"max_num_seqs": 64},
                "env": {"A": "2"},
            },
        ],
    }
    specs = engine_specs(parse_fleet(values))
    assert [spec.name for spec in specs] == ["p-0", "d-0", "d-1"]
    assert [spec.environment["CUDA_VISIBLE_DEVICES"] for spec in specs] == ["0,1", "4,5", "GPU-x,GPU-y"]
    assert [option(spec, "--max-num-seqs") for spec in specs] == ["8", "64", "64"]
    assert [option(spec, "--tensor-parallel-size") for spec in specs] == ["2"] * 3
    assert [spec.environment["A"] for spec in specs] == ["1", "2", "2"]
    for spec in specs:
        assert json.loads(option(spec, "--kv-transfer-config") or "")["kv_load_failure_policy"] == "recompute"


def test_overrides_and_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, "/from/environment/python")
    monkeypatch.setenv(MODEL_VARIABLE, str(tmp_path))
    fleet = load_fleet(Path("static-pd-4p4d"), ["groups.0.count=1", "vllm.extra_args=[--seed, 7]", "role=kv_both"])
    first = engine_specs(fleet)[0]
    assert len(fleet.members) == 5
    assert first.command[0] == "/from/environment/python"
    assert option(first, "--model") == str(tmp_path)
    assert first.command[-2:] == ("--seed", "7")
    assert load_fleet(Path("vllm-cpu-4x"), ["model=other/id"]).model == "other/id"  # a flag overrides the environment
    assert load_fleet(Path("sim-4x")).model == "warm-sim"  # which is for vLLM only


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("count", "write key=value"),
        ("a=[", "the value is not YAML"),
        ("groups.7.count=1", "groups is a list of 1; '7' is not in it"),
        ("model.x=1", "and has no keys; set model as a whole"),
    ],
)
def test_overrides_that_cannot_be_applied(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"^--set ") as caught:
        apply_overrides({"model": "m", "groups": [{}]}, [text])
    assert message in str(caught.value)


def test_what_this_machine_lacks_is_reported_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    vllm = {"device": "cpu", "python": "./none/python", "cpu": {"preload": ["./none.so"]}}
    fleet = parse_fleet({**GOOD, "model": "./none", "vllm": vllm})
    reported = KINDS["vllm"].problems(fleet, {})
    assert [problem.split(":")[0] for problem in reported] == ["vllm.python", "model", "vllm.cpu.preload"]
    nvlink = parse_fleet({**GOOD, "vllm": {"python": "sh", "transfer": {"protocol": "nvlink"}}})
    assert KINDS["vllm"].problems(nvlink, {}) == []
    [problem] = KINDS["vllm"].problems(nvlink, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    assert problem.startswith("PYTORCH_ALLOC_CONF: NVLink transfers need plain device memory")


@pytest.mark.parametrize(("visible", "problems"), [(None, 0), ("0,1", 0), ("1,0,7", 0), ("4,5", 1), ("", 1)])
def test_gpus_that_the_caller_may_not_use_are_reported(visible: str | None, problems: int) -> None:
    fleet = parse_fleet({**GOOD, "vllm": {"python": "sh"}})
    reported = KINDS["vllm"].problems(fleet, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert len(reported) == problems
    assert all(", but the fleet uses GPUs 0, 1; name the allowed GPUs" in problem for problem in reported)


def test_paths_are_found_from_here_then_from_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_model("configs/fleets") == str(FLEETS)
    (tmp_path / "configs" / "fleets").mkdir(parents=True)
    assert resolve_model("configs/fleets") == str(tmp_path / "configs" / "fleets")
    assert resolve_model("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert resolve_python("nonesuch-python") == "nonesuch-python"


@pytest.mark.parametrize(
    ("log", "protocol"),
    [
        ("I1 tcp_transport.cpp:541] TcpTransport: listen on port 16599", Transport.TCP),
        ("TcpTransport: listen on port 1\nx] Using Intra-Node NVLink transport\n", Transport.NVLINK),
        ("EFA device (libfabric): rdmap79s0, domain: rdmap79s0-rdm, fabric: efa, provider: efa", Transport.EFA),
        ("efa_transport.cpp:89] EfaTransport: Started 1 CQ polling worker threads", Transport.EFA),
        ("efa_transport.cpp:1280] EfaTransport: No available EFA devices", None),
        ("rdma_context.cpp:1] RDMA device: mlx5_0, LID: 0, GID: (3) 00:00", Transport.RDMA),
        ("The Mooncake Transfer Engine is using tcp as its protocol.", None),
        ("No RDMA devices found, check your device installation", None),
    ],
)
def test_a_log_proves_a_transport(log: str, protocol: Transport | None) -> None:
    assert proven_transport(log) is protocol


@pytest.mark.parametrize(
    ("values", "hold_s"),
    [
        ({}, 30.0),
        ({"vllm": {"transfer": {"abort_timeout_s": 7}}}, 7.0),
        ({"vllm": {"transfer": {"abort_timeout_s": 7}}, "proxy": {"offload": {"hold_s": 7.0}}}, 7.0),
        ({"role": "none"}, 480.0),
        (
            {
                "groups": [
                    {"count": 1, "role": "kv_producer", "vllm": {"transfer": {"abort_timeout_s": 5}}},
                    {"count": 1, "role": "kv_both", "vllm": {"transfer": {"abort_timeout_s": 9}}},
                    {"count": 1, "role": "kv_consumer", "vllm": {"transfer": {"abort_timeout_s": 60}}},
                ],
            },
            9.0,
        ),
    ],
)
def test_engines_and_proxy_have_one_abort_timeout(values: dict[str, Any], hold_s: float) -> None:
    """A proxy in front of engines without a connector keeps its own default: peers may have one."""
    values = without(*(["count"] if "groups" in values else []), **values)
    assert load_settings(**parse_fleet(values).proxy_config()).offload.hold_s == hold_s
