"""The Helm chart: its rendered copy always, other values where Helm is built, the real API server where it is built."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml

from proxy.discovery.kubernetes import PodInstances
from proxy.discovery.pods import Pod, wanted_of
from proxy.discovery.source import DiscoveryError
from proxy.settings import DiscoverySettings, EngineTemplate, Settings, load_settings
from tests.command_line.commands import root
from tests.command_line.documents import CommandLine, problem
from tests.deploy import chart
from tests.proxy.discovery.real_api_server import RealApiServer, real_api_server
from tests.proxy.serve_process import until
from tests.proxy.stub_engine import StubEngine

# They have no type stubs.
jsonschema: Any = importlib.import_module("jsonschema")
msgspec: Any = importlib.import_module("msgspec")

SCHEMAS = json.loads((Path(__file__).parent / "kubernetes-1.34.schemas.json").read_text())
GPUS = {"limits": {"nvidia.com/gpu": 24}}
VALUES: list[dict[str, Any]] = [
    {},
    {"engines": {"enabled": False, "selector": {"app": "vllm"}}},
    {
        "proxy": {
            "keysSecret": "keys",
            "settings": {"grace_s": 60, "drain_delay_s": 5, "discovery": {"engine": {"role": "none"}}},
            "tolerations": [{"key": "a", "operator": "Exists"}],
            "nodeSelector": {"a": "b"},
            "podAnnotations": {"a": "b"},
            "pullSecrets": [{"name": "registry"}],
        },
        "engineKey": {"secret": "engine", "key": "key"},
        "engines": {
            "events": {"enabled": False},
            "args": ["--max-model-len=8192"],
            "env": [{"name": "HF_HOME", "value": "/models"}],
            "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
            "volumeMounts": [{"name": "models", "mountPath": "/models"}],
            "podAnnotations": {"warmroute.io/role": "none"},
            "podSecurityContext": {"fsGroup": 1000},
            "affinity": {"nodeAffinity": {}},
            "nodeSelector": {"gpu": "h200"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "pullSecrets": [{"name": "registry"}],
            "volumeClaimTemplates": [
                {
                    "metadata": {"name": "cache"},
                    "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
                }
            ],
        },
        "podDisruptionBudget": {"engines": {"maxUnavailable": "20%"}},
    },
    {
        "service": {"type": "LoadBalancer", "port": 80, "annotations": {"a": "b"}},
        "rbac": {"create": False},
        "serviceAccount": {"create": False, "name": "mine"},
        "podDisruptionBudget": {"enabled": False},
        "fullnameOverride": "router",
    },
    {
        "engines": {
            "dataParallelSize": 12,
            "args": ["--tensor-parallel-size=2"],
            "resources": GPUS,
        },
    },
]


def copy() -> dict[tuple[str, str], dict[str, Any]]:
    return chart.documents(chart.RENDERED.read_text())


def rendered(values: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    if not chart.HELM.exists():
        pytest.skip("Helm is not built: make helm")
    return chart.documents(chart.render(values))


def validate(found: dict[tuple[str, str], dict[str, Any]]) -> None:
    """As `kubectl apply --validate=strict`, without an API server."""
    for (kind, _), document in found.items():
        schema = {"$ref": f"#/definitions/{SCHEMAS['kinds'][kind]}", "definitions": SCHEMAS["definitions"]}
        jsonschema.Draft7Validator(schema).validate(document)


def settings_of(found: dict[tuple[str, str], dict[str, Any]], folder: Path, name: str = "warmroute") -> Settings:
    path = folder / "proxy.yaml"
    path.write_text(found["ConfigMap", name]["data"]["proxy.yaml"])
    return load_settings(path)


def engine_pod(found: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    """The pod that the StatefulSet would create."""
    template = found["StatefulSet", "warmroute-engine"]["spec"]["template"]
    metadata = {**template["metadata"], "name": "warmroute-engine-0"}
    status = {"phase": "Running", "podIP": "127.0.0.2"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"], "status": status}


# the rendered copy


def test_the_copy_is_rendered_from_these_files() -> None:
    assert chart.fingerprint() in chart.RENDERED.read_text(), "make helm && python -m tests.deploy.chart"


def test_the_copy_is_what_helm_renders() -> None:
    rendered({})
    assert chart.RENDERED.read_text() == chart.rendered_copy()


def test_the_copy_fits_the_schemas_of_kubernetes() -> None:
    assert len(copy()) == 10
    validate(copy())


def test_schemas_refuse_unknown_keys_and_wrong_types() -> None:
    for path, value in ((("spec", "replica"), 2), (("spec", "replicas"), "two"), (("spec", "template", "spec"), [])):
        document = copy()["Deployment", "warmroute"]
        inner = document
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        with pytest.raises(jsonschema.ValidationError):
            validate({("Deployment", "warmroute"): document})


def test_the_proxy_finds_the_engines_of_the_chart(tmp_path: Path) -> None:
    settings = settings_of(copy(), tmp_path)
    pod = engine_pod(copy())
    selector = dict(each.split("=") for each in (settings.discovery.kubernetes.selector or "").split(","))
    assert selector.items() <= pod["metadata"]["labels"].items()
    decoded = msgspec.json.decode(json.dumps(pod), type=Pod)
    (found,) = wanted_of([decoded], settings.discovery.engine).instances
    assert (found.name, found.url) == ("warmroute-engine-0", "http://127.0.0.2:8000")
    assert (found.events_url, found.events_replay_url) == ("tcp://127.0.0.2:5557", "tcp://127.0.0.2:5558")
    assert not wanted_of([decoded], EngineTemplate()).problems


def test_the_engines_publish_their_events_where_the_proxy_listens() -> None:
    (engine,) = engine_pod(copy())["spec"]["containers"]
    events = json.loads(engine["args"][engine["args"].index("--kv-events-config") + 1])
    assert events == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:5558",
    }


def test_a_pod_has_the_time_that_its_drain_takes(tmp_path: Path) -> None:
    settings = settings_of(copy(), tmp_path)
    proxy = copy()["Deployment", "warmroute"]["spec"]["template"]["spec"]
    assert proxy["terminationGracePeriodSeconds"] >= 10 + settings.drain_delay_s + settings.grace_s + 10
    engine = engine_pod(copy())["spec"]
    assert engine["terminationGracePeriodSeconds"] > 120


def test_the_proxy_s_pod_has_no_rights_but_its_own_and_the_engines_none() -> None:
    spec = copy()["Deployment", "warmroute"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert (spec["enableServiceLinks"], engine_pod(copy())["spec"]["automountServiceAccountToken"]) == (False, False)
    assert copy()["Role", "warmroute"]["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    ]


def test_the_proxy_s_commands_are_ones_that_its_image_has() -> None:
    (container,) = copy()["Deployment", "warmroute"]["spec"]["template"]["spec"]["containers"]
    program, option, script = container["lifecycle"]["preStop"]["exec"]["command"]
    assert (program, option) == ("/opt/warmroute/bin/python", "-c")
    assert "python -m venv /opt/warmroute " in (chart.ROOT / "Containerfile").read_text(encoding="utf-8")
    compile(script, "preStop", "exec")
    assert problem(CommandLine("chart", ("serve", *container["args"])), root()) is None


async def test_an_engine_s_pre_stop_hook_waits_until_it_is_idle() -> None:
    """The script of the chart, against a stub engine."""
    (container,) = engine_pod(copy())["spec"]["containers"]
    *_, script = container["lifecycle"]["preStop"]["exec"]["command"]
    engine = await StubEngine(running=1).start()
    script = script.replace("127.0.0.1:8000", f"127.0.0.1:{engine.port}").replace("min(3, 120)", "0")
    assert engine.url in script
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
    try:

        async def asked() -> bool:
            return engine.probes >= 2

        await until(asked)
        assert process.returncode is None
        engine.running = 0
        async with asyncio.timeout(30):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await engine.stop()


# other values


@pytest.mark.parametrize("values", VALUES, ids=["default", "engines elsewhere", "everything", "names", "ranks"])
def test_rendered_values_fit_the_schemas_of_kubernetes(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = rendered(values)
    validate(found)
    name = values.get("fullnameOverride", "warmroute")
    document = found["ConfigMap", name]["data"]
    document["proxy.yaml"] = document["proxy.yaml"].replace(
        "/etc/warmroute/keys/keys.yaml", str(tmp_path / "keys.yaml")
    )
    (tmp_path / "keys.yaml").write_text(f"client: [{{name: a, sha256: '{'0' * 64}'}}]\n")
    monkeypatch.setenv("ENGINE_KEY", "x")
    settings = settings_of(found, tmp_path, name)
    assert settings.discovery.source == "kubernetes"
    assert (("StatefulSet", "warmroute-engine") in found) is ("fullnameOverride" not in values) & values.get(
        "engines", {}
    ).get("enabled", True)


def test_keys_reach_proxy_and_engines() -> None:
    found = rendered(VALUES[2])
    written = yaml.safe_load(found["ConfigMap", "warmroute"]["data"]["proxy.yaml"])
    assert (written["keys"], written["engine_key_env"]) == ({"file": "/etc/warmroute/keys/keys.yaml"}, "ENGINE_KEY")
    (engine,) = engine_pod(found)["spec"]["containers"]
    assert [each["name"] for each in engine["env"]] == ["VLLM_API_KEY", "HF_HOME"]


def test_every_rank_is_an_instance_with_the_ports_that_the_engine_opens() -> None:
    pod = engine_pod(rendered(VALUES[4]))
    (engine,) = pod["spec"]["containers"]
    assert "--data-parallel-size=12" in engine["args"]
    found = wanted_of([msgspec.json.decode(json.dumps(pod), type=Pod)], EngineTemplate())
    assert not found.problems
    assert [(each.name, each.url) for each in found.instances] == [
        (f"warmroute-engine-0/{rank}", "http://127.0.0.2:8000") for rank in range(12)
    ]
    # vLLM's publisher of rank i counts i ports up from the endpoints that it is configured with.
    events = json.loads(engine["args"][engine["args"].index("--kv-events-config") + 1])
    (first, first_replay) = (int(events[key].rpartition(":")[2]) for key in ("endpoint", "replay_endpoint"))
    assert [(each.events_url, each.events_replay_url) for each in found.instances] == [
        (f"tcp://127.0.0.2:{first + rank}", f"tcp://127.0.0.2:{first_replay + rank}") for rank in range(12)
    ]
    declared = {each["name"]: each["containerPort"] for each in engine["ports"]}
    assert declared == {
        "http": 8000,
        **{f"events-{rank}": first + rank for rank in range(12)},
        **{f"replay-{rank}": first_replay + rank for rank in range(12)},
    }
    assert len(set(declared.values())) == 25
    # Kubernetes refuses longer names of ports; the schemas do not.
    assert max(map(len, declared)) <= 15


def test_a_secret_with_a_certificate_puts_the_proxy_behind_tls(tmp_path: Path) -> None:
    found = rendered({"proxy": {"tlsSecret": "certificate", "settings": {"tls": {"min_version": "1.3"}}}})
    validate(found)
    spec = found["Deployment", "warmroute"]["spec"]["template"]["spec"]
    (proxy,) = spec["containers"]
    [mount] = [each for each in proxy["volumeMounts"] if each["name"] == "tls"]
    assert "subPath" not in mount  # the kubelet never renews a file that is mounted by itself
    [volume] = [each for each in spec["volumes"] if each["name"] == "tls"]
    assert volume["secret"]["secretName"] == "certificate"
    assert {proxy[name]["httpGet"]["scheme"] for name in ("startupProbe", "livenessProbe", "readinessProbe")} == {
        "HTTPS"
    }
    issued = trustme.CA().issue_cert("warmroute")
    issued.private_key_pem.write_to_path(tmp_path / "tls.key")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "tls.crt")
    written = found["ConfigMap", "warmroute"]["data"]
    written["proxy.yaml"] = written["proxy.yaml"].replace(mount["mountPath"], str(tmp_path))
    tls = settings_of(found, tmp_path).tls
    assert (tls.certificate, tls.key, tls.min_version) == (tmp_path / "tls.crt", tmp_path / "tls.key", "1.3")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        chart.render({"proxy": {"tlsSecret": "certificate", "settings": {"tls": {"certificate": "/a", "key": "/b"}}}})
    assert "proxy.tlsSecret: it has the certificate" in caught.value.stderr


def test_a_pod_has_that_time_too_where_it_is_no_whole_number() -> None:
    """`helm --set` passes fractions as strings, of which Helm's `int` makes 0, so that streams were cut after 20 s."""
    found = rendered({"proxy": {"settings": {"grace_s": "90.5", "drain_delay_s": 2.5}}})
    spec = found["Deployment", "warmroute"]["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] == 10 + 3 + 91 + 10


def test_a_node_can_be_drained_also_where_there_is_one_proxy() -> None:
    """With minAvailable 1 and one replica the budget permits no eviction, and `kubectl drain` never ends."""
    for name in ("warmroute", "warmroute-engine"):
        spec = copy()["PodDisruptionBudget", name]["spec"]
        assert {key: value for key, value in spec.items() if key != "selector"} == {"maxUnavailable": 1}


@pytest.mark.parametrize("budget", [{"maxUnavailable": 1}, {"minAvailable": "60%"}])
def test_a_given_disruption_budget_replaces_the_default(budget: dict[str, Any]) -> None:
    found = rendered({"podDisruptionBudget": {"proxy": budget, "engines": budget}})
    validate(found)
    for name in ("warmroute", "warmroute-engine"):
        spec = found["PodDisruptionBudget", name]["spec"]
        assert {key: value for key, value in spec.items() if key != "selector"} == budget


def test_probes_use_https_where_the_proxy_has_tls() -> None:
    tls = {"certificate": "/tls/tls.crt", "key": "/tls/tls.key"}
    for found, scheme in ((copy(), None), (rendered({"proxy": {"settings": {"tls": tls}}}), "HTTPS")):
        (proxy,) = found["Deployment", "warmroute"]["spec"]["template"]["spec"]["containers"]
        probes = [proxy[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
        assert [each.get("scheme") for each in probes] == [scheme] * 3
    with pytest.raises(subprocess.CalledProcessError) as caught:
        chart.render({"proxy": {"settings": {"tls": {**tls, "client_ca": "/tls/ca.crt"}}}})
    assert "probes have no client certificate" in caught.value.stderr


def test_engines_that_order_prompts_have_the_flag_and_the_annotation() -> None:
    pod = engine_pod(rendered({"engines": {"schedulingPolicy": "priority"}}))
    assert "--scheduling-policy=priority" in pod["spec"]["containers"][0]["args"]
    assert pod["metadata"]["annotations"]["warmroute.io/priority-scheduling"] == "true"
    plain = engine_pod(copy())
    assert not [each for each in plain["spec"]["containers"][0]["args"] if each.startswith("--scheduling")]
    assert "warmroute.io/priority-scheduling" not in plain["metadata"]["annotations"]


def test_an_engine_without_ranks_is_one_instance_without_their_flag() -> None:
    (engine,) = engine_pod(copy())["spec"]["containers"]
    assert not [each for each in engine["args"] if each.startswith("--data-parallel")]
    assert "warmroute.io/data-parallel-size" not in engine_pod(copy())["metadata"]["annotations"]


@pytest.mark.parametrize(
    ("engines", "says"),
    [
        ({"dataParallelSize": 2}, "1 nvidia.com/gpu are fewer than engines.dataParallelSize 2"),
        (
            {"args": ["--data-parallel-size=2"]},
            "engines.args has --data-parallel-size=2: give engines.dataParallelSize",
        ),
        ({"args": ["-dp", "2"]}, "engines.args has -dp: give engines.dataParallelSize"),
        (
            {"args": ["--scheduling-policy=priority"]},
            "engines.args has --scheduling-policy=priority: give engines.schedulingPolicy",
        ),
        ({"events": {"replayPort": 5557}}, r"events \(5557 and above\) and of replays \(5557 and above\) overlap"),
        (
            {"dataParallelSize": 2, "resources": GPUS, "events": {"replayPort": 5558}},
            r"replays \(5558 and above\) overlap; each of 2 ranks",
        ),
        (
            {"dataParallelSize": 2, "resources": GPUS, "events": {"port": 5557, "replayPort": 5556}},
            r"replays \(5556 and above\) overlap",
        ),
        ({"dataParallelSize": 2, "resources": GPUS, "events": {"port": 65535}}, "2 ranks do not fit above port 65535"),
        ({"dataParallelSize": 9, "resources": GPUS, "events": {"port": 7992}}, "engines.port 8000 is one of the ports"),
    ],
)
def test_values_of_ranks_that_do_not_fit_are_refused_with_the_reason(engines: dict[str, Any], says: str) -> None:
    rendered({})
    with pytest.raises(subprocess.CalledProcessError) as caught:
        chart.render({"engines": engines})
    assert re.search(says, caught.value.stderr), caught.value.stderr


@pytest.mark.parametrize(
    "wrong",
    [
        {"prox": {}},
        {"engines": {"dataParallelSize": 0}},
        {"engines": {"schedulingPolicy": "lifo"}},
        {"proxy": {"replicas": 0}},
        {"proxy": {"settings": {"port": 1}}},
        {"engines": {"model": ""}},
        {"engines": {"port": "http"}},
        {"podDisruptionBudget": {"proxy": {"minAvailable": 1, "maxUnavailable": 1}}},
        {"engines": {"enabled": False, "selector": {}}},
    ],
)
def test_wrong_values_are_refused(wrong: dict[str, Any]) -> None:
    schema = json.loads((chart.CHART / "values.schema.json").read_text())
    jsonschema.validate(yaml.safe_load((chart.CHART / "values.yaml").read_text()), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema)
    if chart.HELM.exists():
        with pytest.raises(subprocess.CalledProcessError) as caught:
            chart.render(wrong)
        assert "values don't meet the specifications of the schema" in caught.value.stderr


# the real API server


def collection(document: dict[str, Any]) -> str:
    """Path of the objects of a document's kind, in the namespace ``default``."""
    version, plural = document["apiVersion"], f"{document['kind'].lower()}s"
    return f"/{'api' if version == 'v1' else 'apis'}/{version}/namespaces/default/{plural}"


async def test_the_real_api_server_accepts_the_copy_and_its_role_lets_the_proxy_watch(tmp_path: Path) -> None:
    async with real_api_server(tmp_path) as server:
        for document in copy().values():
            await server.call("POST", collection(document), document, fieldValidation="Strict")
        await server.call("POST", "/api/v1/namespaces/default/serviceaccounts", _account("stranger"))
        await server.call("POST", "/api/v1/namespaces/default/pods", _without_status(engine_pod(copy())))
        await server.put("warmroute-engine-0", "127.0.0.2")
        settings = settings_of(copy(), tmp_path)
        with pytest.raises(DiscoveryError, match=r"403.*get, list and watch"):
            await anext(await _source(server, settings, "stranger"))
        (found,) = (await anext(await _source(server, settings, "warmroute"))).instances
        assert (found.name, found.events_url) == ("warmroute-engine-0", "tcp://127.0.0.2:5557")


async def _source(server: RealApiServer, settings: Settings, account: str) -> Any:
    """The chart's source, with the token that the API server issues to a service account."""
    path = f"/api/v1/namespaces/default/serviceaccounts/{account}/token"
    issued = await server.call(
        "POST", path, {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    )
    server.token_file.write_text(issued["status"]["token"])
    selector = settings.discovery.kubernetes.selector
    return PodInstances(DiscoverySettings.model_validate(server.settings(selector=selector))).sets()


def _account(name: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}}


def _without_status(pod: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in pod.items() if key != "status"}
