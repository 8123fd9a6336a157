"""The registry: names, parameters, third parties."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
import xxhash

from policies import registry
from policies.classes import ClassThresholds
from policies.decide import decide
from policies.registry import (
    BUILT_IN,
    OFFLOAD_GROUP,
    ROUTING_GROUP,
    PolicyLoadError,
    PolicyNameTakenError,
    PolicyParameterError,
    UnknownPolicyError,
    all_routing,
    make_planner,
    make_routing,
    offload_planners,
    parameters,
    routing_policies,
)
from tests.policies.builders import ask, fleet_of, idle

ROUTING = {"round_robin", "random", "least_loaded", "linear", "lmetric", "session_sticky", "unified"}
DOCS = Path(__file__).parents[2] / "docs" / "policies.md"


def test_the_policies_of_the_product_are_installed() -> None:
    assert set(routing_policies()) >= ROUTING
    assert set(offload_planners()) >= {"never", "threshold"}
    assert routing_policies() == sorted(routing_policies())


@pytest.mark.parametrize("name", sorted(ROUTING))
def test_a_policy_is_registered_under_its_own_name(name: str) -> None:
    policy = make_routing(name)
    assert policy.name == name
    assert make_routing(name, parameters(policy)) == policy


@pytest.mark.parametrize("name", ["never", "threshold"])
def test_a_planner_is_registered_under_its_own_name(name: str) -> None:
    planner = make_planner(name)
    assert planner.name == name
    assert make_planner(name, parameters(planner)) == planner


def test_parameters_are_taken_and_shown() -> None:
    policy = make_routing("linear", {"alpha": 2})
    assert parameters(policy) == {"alpha": 2, "recent_weight": 0.1}
    assert parameters(object()) == {}


def test_a_policy_cannot_be_changed_once_made() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_routing("linear").alpha = 3.0  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", [make_routing, make_planner])
def test_an_unknown_name_lists_the_known_ones(make: Any) -> None:
    known = routing_policies() if make is make_routing else offload_planners()
    with pytest.raises(UnknownPolicyError, match=re.escape(f"'lineer'; known: {', '.join(known)}")):
        make("lineer")


def test_an_unknown_parameter_lists_the_known_ones() -> None:
    with pytest.raises(PolicyParameterError, match="'linear' has no parameter 'aplha'; it has: alpha, recent_weight"):
        make_routing("linear", {"aplha": 1.0})
    with pytest.raises(PolicyParameterError, match="'round_robin' has no parameter 'seed'; it has: none"):
        make_routing("round_robin", {"seed": 1})
    with pytest.raises(PolicyParameterError, match="'threshold' has no parameter 'cap'; it has: max_in_flight"):
        make_planner("threshold", {"cap": 1})


@pytest.mark.parametrize(
    ("name", "params", "says"),
    [
        ("linear", {"alpha": -1.0}, "alpha must not be negative"),
        ("linear", {"recent_weight": float("nan")}, "recent_weight must not be negative"),
        ("linear", {"alpha": "1"}, "alpha must be a number, got '1'"),
        ("linear", {"alpha": True}, "alpha must be a number, got True"),
        ("least_loaded", {"decode_weight": -0.1}, "weights must not be negative"),
        ("lmetric", {"min_window": 0}, "min_window must be at least 1"),
        ("lmetric", {"min_window": 1.5}, "min_window must be an integer, got 1.5"),
        ("lmetric", {"detect_hotspots": "false"}, "detect_hotspots must be true or false, got 'false'"),
        ("random", {"seed": "x"}, "seed must be an integer, got 'x'"),
        ("session_sticky", {"overload_factor": 0.9}, "overload_factor must be at least 1"),
        ("session_sticky", {"overload_floor_tokens": -1}, "overload_floor_tokens must not be negative"),
        ("session_sticky", {"affinity_gate": 1.1}, "affinity_gate must be between 0 and 1"),
        ("unified", {"affinity_gate": -0.1}, "affinity_gate must be between 0 and 1"),
        ("unified", {"overload_factor": 0.5}, "overload_factor must be at least 1"),
        ("unified", {"overload_floor_tokens": -1}, "overload_floor_tokens must not be negative"),
        ("unified", {"recent_weight": -1}, "weights must not be negative"),
    ],
)
def test_a_bad_value_names_policy_and_parameter(name: str, params: dict[str, Any], says: str) -> None:
    with pytest.raises(PolicyParameterError) as caught:
        make_routing(name, params)
    assert str(caught.value).startswith(f"routing policy {name!r}: ")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("linear", {"alpha": 0, "recent_weight": 0}),
        ("least_loaded", {"decode_weight": 0, "recent_weight": 0.0}),
        ("lmetric", {"min_window": 1, "detect_hotspots": False}),
        ("session_sticky", {"affinity_gate": 0, "overload_factor": 1, "overload_floor_tokens": 0}),
        ("unified", {"affinity_gate": 0, "overload_factor": 1, "overload_floor_tokens": 0, "decode_weight": 0}),
        ("unified", {"affinity_gate": 1}),
    ],
)
def test_values_at_the_edge_of_their_range_are_taken(name: str, params: dict[str, Any]) -> None:
    taken = parameters(make_routing(name, params))
    assert {key: taken[key] for key in params} == params


def test_a_bad_planner_value_is_refused_likewise() -> None:
    with pytest.raises(PolicyParameterError, match=r"^offload planner 'threshold': max_in_flight must be at least 1"):
        make_planner("threshold", {"max_in_flight": 0})


def documented_example() -> str:
    """The Python listing of the page that documents how third parties add a policy."""
    return re.search(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL).group(1)  # type: ignore[union-attr]


def documented_entry_point() -> str:
    return re.search(r"```toml\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL).group(1)  # type: ignore[union-attr]


def declare(folder: Path, distribution: str, entry_points: str) -> None:
    """Metadata of an installed distribution that declares these entry points."""
    info = folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(entry_points, encoding="utf-8")


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The documented example, installed as a distribution of its own; returns the policy's name."""
    section, entry = documented_entry_point().strip().splitlines()
    assert section == '[project.entry-points."warmroute.routing"]'
    name, target = (part.strip(' "') for part in entry.split("="))
    module = target.partition(":")[0]
    (tmp_path / f"{module}.py").write_text(documented_example(), encoding="utf-8")
    declare(tmp_path, "acme-routing", f"[warmroute.routing]\n{name} = {target}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, module, raising=False)
    return name


def test_a_third_party_policy_is_found_by_its_entry_point(third_party: str) -> None:
    assert third_party not in ROUTING
    assert third_party in routing_policies()
    policy = make_routing(third_party)
    assert policy.name == third_party


def test_a_third_party_policy_decides_like_ours(third_party: str) -> None:
    views = [view._replace(pending_prefill_tokens=100 * (i != 2)) for i, view in enumerate(idle(4))]
    decision = decide(ask(), fleet_of(*views), make_routing(third_party), make_planner("never"), ClassThresholds())
    assert (decision.decode_on, decision.policy, len(decision.scores)) == ("inst-2", third_party, 4)


def test_parameters_of_a_third_party_policy_are_checked_like_ours(third_party: str) -> None:
    with pytest.raises(PolicyParameterError, match="has no parameter 'nonsense'; it has: "):
        make_routing(third_party, {"nonsense": 1})


def test_built_in_policies_need_no_installed_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda **_: EntryPoints())
    assert routing_policies() == sorted(BUILT_IN[ROUTING_GROUP])
    assert offload_planners() == sorted(BUILT_IN[OFFLOAD_GROUP])
    assert make_routing("warm").name == "warm"


def test_a_source_tree_on_the_path_has_all_built_in_policies(tmp_path: Path) -> None:
    """`-S` leaves site-packages out, as where nothing is installed, but for the one package that policies import."""
    (tmp_path / "xxhash").symlink_to(Path(xxhash.__file__).parent)
    root = Path(registry.__file__).parents[1]
    program = (
        "from policies.registry import offload_planners, routing_policies\n"
        "print(*routing_policies(), *offload_planners())"
    )
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{root}{os.pathsep}{tmp_path}"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        cwd="/",
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [*sorted(BUILT_IN[ROUTING_GROUP]), *sorted(BUILT_IN[OFFLOAD_GROUP])]


@pytest.mark.parametrize(
    ("group", "name", "names"), [(ROUTING_GROUP, "warm", routing_policies), (OFFLOAD_GROUP, "never", offload_planners)]
)
def test_a_third_party_cannot_take_the_name_of_a_built_in_policy(
    group: str, name: str, names: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(tmp_path, "acme-routing", f"[{group}]\n{name} = acme_routing:Better\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PolicyNameTakenError) as refused:
        names()
    assert str(refused.value) == (
        f"acme-routing declares {name!r} in the entry points {group!r} (acme_routing:Better), but that name is taken "
        "by warmroute itself: rename or uninstall one of them"
    )


def test_two_third_parties_cannot_declare_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(tmp_path, "acme-routing", "[warmroute.routing]\nours = acme_routing:Ours\n")
    declare(tmp_path, "other-routing", "[warmroute.routing]\nours = other_routing:Ours\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PolicyNameTakenError, match=r"'ours' .* that name is taken by .*-routing "):
        make_routing("linear")


def test_entry_points_of_an_older_installation_of_ours_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    stale = EntryPoint("warm", "policies.routing.no_such_module:Warm", ROUTING_GROUP)
    vars(stale)["dist"] = type("Ours", (), {"name": "warmroute"})()
    monkeypatch.setattr(registry, "entry_points", lambda **_: EntryPoints([stale]))
    assert make_routing("warm").name == "warm"


BROKEN = {
    "import": ("import no_such_module_of_acme\n", "acme_broken:Policy", "ModuleNotFoundError: No module named"),
    "syntax": ("class Policy(\n", "acme_broken:Policy", "SyntaxError"),
    "exit": ("raise RuntimeError('no licence')\n", "acme_broken:Policy", "RuntimeError: no licence"),
    "attribute": ("x = 1\n", "acme_broken:Policy", "AttributeError"),
    "construction": (
        "class Policy:\n    name = 'broken'\n    def __init__(self):\n        raise RuntimeError('no licence')\n",
        "acme_broken:Policy",
        "cannot be built: RuntimeError: no licence",
    ),
    "interface": ("class Policy:\n    name = 'broken'\n", "acme_broken:Policy", "no method 'choose'"),
    "name": ("class Policy:\n    def choose(self, request, fleet): ...\n", "acme_broken:Policy", "no attribute 'name'"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_third_party_policy_is_named_and_does_not_hide_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    source, target, says = BROKEN[how]
    (tmp_path / "acme_broken.py").write_text(source, encoding="utf-8")
    declare(tmp_path, "acme-broken", f"[warmroute.routing]\nbroken = {target}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "acme_broken", raising=False)
    with pytest.raises(PolicyLoadError) as caught:
        make_routing("broken")
    assert "routing policy 'broken'" in str(caught.value)
    assert says in str(caught.value)
    installed = all_routing()
    assert set(installed.usable) >= ROUTING
    assert says in installed.broken["broken"]


def test_a_policy_without_default_parameters_is_neither_broken_nor_usable_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "class Policy:\n    name = 'strict'\n    def __init__(self, level): ...\n    def choose(self, *_): ...\n"
    (tmp_path / "acme_strict.py").write_text(source, encoding="utf-8")
    declare(tmp_path, "acme-strict", "[warmroute.routing]\nstrict = acme_strict:Policy\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    installed = all_routing()
    assert "strict" not in installed.usable
    assert installed.broken == {}
    assert make_routing("strict", {"level": 1}).name == "strict"


@pytest.mark.parametrize("name", ["acme:", ":Class", "warm:", "a b:C"])
def test_a_name_that_is_no_module_and_class_says_how_to_write_one(name: str) -> None:
    with pytest.raises(PolicyLoadError, match="write MODULE:CLASS"):
        make_routing(name, {}, modules=True)


@pytest.mark.parametrize("there", [True, False])
def test_a_file_instead_of_a_module_is_named_as_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    if there:
        (tmp_path / "acme_as_file.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PolicyLoadError, match=r"; write the module without \.py: acme_as_file:Best$"):
        make_routing("acme_as_file.py:Best", {}, modules=True)
