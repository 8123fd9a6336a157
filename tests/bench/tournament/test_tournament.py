"""The tournament end to end: equal bytes for any number of processes, resumable, tables from kept results only."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from bench.tournament.arena import Arena
from bench.tournament.cli import app
from bench.tournament.entrants import field_of, parse
from bench.tournament.results import EntrantResult, GridCell
from bench.tournament.settings import CONFIG, Grid, TournamentError, read_settings
from bench.tournament.tables import BEGIN, END
from bench.tournament.traces import find_traces
from policies.admission.working_set import WorkingSet
from policies.costs.formulas import PrefillModel, TimeEstimate
from policies.registry import routing_policies
from policies.types import Role
from replayer.records.sessions import session_clocks
from replayer.traces.formats.bailian import write
from replayer.traces.synth import SynthOptions, synthetic_trace

CONFIGURED = """
grid: {loads: [0.8], pools: [1.0], fleets: [2], seeds: [1, 2]}
sizes: {requests: 40, resamples: 50, overload_requests: 40}
traces:
  - {match: "tiny.jsonl", name: tiny, family: made}
  - {match: "twin.jsonl", left_out: the same as tiny}
subject: lmetric
ablations: {hotspots: {detect_hotspots: false}}
"""
POLICIES = ["--policies", "lmetric", "--policies", "round_robin"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tournament")
    (folder / "traces").mkdir()
    made = synthetic_trace(SynthOptions(requests=120, seed=5, length_scale=0.2))
    for name in ("tiny", "twin", "other"):
        write(folder / "traces" / f"{name}.jsonl", made.requests)
    (folder / "config.yaml").write_text(CONFIGURED)
    return folder


def _run(folder: Path, out: str, *more: str) -> str:
    fixed = [
        "--config",
        str(folder / "config.yaml"),
        "--trace-dir",
        str(folder / "traces"),
        "--output",
        str(folder / out),
    ]
    result = CliRunner().invoke(app, [*fixed, *more])
    assert result.exit_code == 0, result.output
    return result.stdout


def _files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*.json"))}


@pytest.fixture(scope="module")
def first(folder: Path) -> str:
    return _run(folder, "first", "--traces", "tiny", *POLICIES)


def test_two_processes_leave_the_bytes_of_one(folder: Path, first: str) -> None:
    assert _run(folder, "second", "--traces", "tiny", *reversed_policies(), "--jobs", "2") == first.replace(
        " ".join(POLICIES), " ".join(reversed_policies())
    )
    kept = [
        {name: content for name, content in _files(folder / out).items() if name != "made.json"}
        for out in ("first", "second")
    ]
    assert kept[0] == kept[1]
    assert len([name for name in kept[0] if name.startswith("results/")]) == 4


def reversed_policies() -> list[str]:
    return ["--policies", "round_robin", "--policies", "lmetric"]


def test_the_cache_aware_policy_wins(first: str) -> None:
    assert "| 1 | `lmetric` | 100 % |" in first
    assert "| 2 | `round_robin` |" in first
    assert "### `lmetric` against its targets" in first
    assert "best or tied for best on both metrics in 100.0 % of 1 cells (target 80 %): met" in first


def test_what_is_there_is_not_played_again_and_what_is_missing_is(folder: Path, first: str) -> None:
    results = sorted((folder / "first" / "results").rglob("*.json"))
    before = {path: path.stat().st_mtime_ns for path in results}
    gone = results[0]
    content = gone.read_bytes()
    gone.unlink()
    assert _run(folder, "first", "--traces", "tiny", *POLICIES) == first
    assert gone.read_bytes() == content
    assert {path: path.stat().st_mtime_ns for path in results[1:]} == {path: before[path] for path in results[1:]}


def test_a_result_of_another_make_is_played_again(folder: Path, first: str) -> None:
    path = sorted((folder / "first" / "results").rglob("*.json"))[0]
    content = path.read_bytes()
    result = msgspec.json.decode(content, type=EntrantResult)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(result, made_of="older", apc=0.99)))
    assert _run(folder, "first", "--traces", "tiny", *POLICIES) == first
    assert path.read_bytes() == content


def test_tables_come_from_kept_results_and_go_between_the_markers(folder: Path, first: str) -> None:
    page = folder / "page.md"
    page.write_text(f"# Title\n\n{BEGIN}\nold\n{END}\n\nafter\n")
    _run(folder, "first", "--traces", "tiny", *POLICIES, "--only-tables", "--document", str(page))
    assert page.read_text() == f"# Title\n\n{BEGIN}\n{first}{END}\n\nafter\n"
    page.write_text("no markers")
    arguments = ["--config", str(folder / "config.yaml"), "--output", str(folder / "first"), "--traces", "tiny"]
    result = CliRunner().invoke(app, [*arguments, *POLICIES, "--only-tables", "--document", str(page)])
    assert result.exit_code == 2
    assert "must have the lines" in result.output


def test_missing_results_are_refused_with_what_to_do(folder: Path, first: str) -> None:
    arguments = ["--config", str(folder / "config.yaml"), "--output", str(folder / "first"), "--traces", "tiny"]
    result = CliRunner().invoke(app, [*arguments, *POLICIES, "--fleets", "2,3", "--only-tables"])
    assert result.exit_code == 2
    assert "4 results are missing" in result.output
    assert "without --only-tables" in result.output
    nothing = CliRunner().invoke(app, ["--output", str(folder / "nothing"), "--only-tables"])
    assert nothing.exit_code == 2
    assert "nothing; run without --only-tables to simulate them" in " ".join(nothing.output.split())


def test_results_of_different_simulators_are_not_put_in_one_table(folder: Path) -> None:
    arguments = ["--traces", "tiny", "--seeds", "1", *POLICIES]
    text = _run(folder, "mixed", *arguments)
    path = sorted((folder / "mixed" / "results").rglob("*.json"))[0]
    result = msgspec.json.decode(path.read_bytes(), type=EntrantResult)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(result, made_of="cell-older-policy")))
    fixed = ["--config", str(folder / "config.yaml"), "--output", str(folder / "mixed")]
    mixed = CliRunner().invoke(app, [*fixed, *arguments, "--only-tables"])
    assert mixed.exit_code == 2
    assert "different versions of the simulator" in " ".join(mixed.output.split())
    assert _run(folder, "mixed", *arguments) == text


def test_ablations_and_folds(folder: Path) -> None:
    text = _run(folder, "ablated", *POLICIES, "--seeds", "1", "--ablations", "--folds")
    assert "### Contribution of each idea" in text
    assert "| hotspots |" in text
    assert "### Held-out families" in text
    # A file without a rule is its own family, so there are two to hold out; the twin takes no part.
    assert "| made | `lmetric" in text
    assert "| other | `lmetric" in text
    assert "twin" not in text
    assert "2 cells." in text


def test_ablations_may_be_played_on_a_part_of_the_grid(folder: Path) -> None:
    config = folder / "part.yaml"
    config.write_text(CONFIGURED + "ablation_fleets: [2]\nablation_seeds: [2]\n")
    given = ["--config", str(config), "--traces", "tiny", "--fleets", "1,2"]
    text = _run(folder, "part", *given, *POLICIES, "--ablations")
    assert "2 cells." in text
    assert "1 cells: fleets ×2; seeds 2." in text
    ablated = [name for name in _files(folder / "part" / "results") if "without" in name]
    assert len(ablated) == 1
    assert "fleet-2_seed-2/" in ablated[0]
    result = CliRunner().invoke(
        app, [*given, "--fleets", "1", "--ablations", "--only-tables", "--output", str(folder / "part")]
    )
    assert result.exit_code == 2
    assert "no --fleets of the grid is under ablation_fleets" in " ".join(result.output.split())


def test_a_cell_can_be_played_from_python(folder: Path) -> None:
    settings = read_settings(folder / "config.yaml")
    stage = Arena(settings, folder / "traces").stage(GridCell(trace="tiny", load=0.8, pool=1.0, fleet=2), seed=1)
    result = stage.play(parse("lmetric").make(), "mine")
    records = [each for each in stage.run(parse("lmetric").make()).records if each.chat_id in stage.workload.judged]
    ttft = sorted(each.ttft_s or 0.0 for each in records)
    assert result.judged == len(records) == len(stage.workload.judged)
    assert result.failed == 0
    assert ttft[int(0.9 * (len(ttft) - 1))] <= result.ttft_p90.value <= ttft[int(0.9 * (len(ttft) - 1)) + 1] + 1e-4
    assert len(result.ttft_p90.resampled) == 50
    whole = {
        name: clock.completion_s or 0.0
        for name, clock in session_clocks(stage.run(parse("lmetric").make())).items()
        if name in stage.workload.whole
    }
    assert result.session_times is not None
    assert result.session_times.sessions == result.session_times.completed == len(whole) > 0
    assert result.session_times.mean_s == pytest.approx(sum(whole.values()) / len(whole), rel=1e-5)
    assert result.session_times.slowdown_p90 >= result.session_times.slowdown_p50 > 0.5


def test_an_entrant_may_have_an_admission_rule() -> None:
    plain, holding = parse("warm"), parse("warm+working_set,admission.lost_share=0.2,hold_s=10.0")
    assert plain.admission_rule().name == "never_hold"
    assert holding.admission_rule() == WorkingSet(lost_share=0.2)
    assert holding.params == {"hold_s": 10.0}
    assert len({plain.digest(), parse("warm+working_set").digest(), holding.digest()}) == 3
    for text in ("warm+nonsense", "warm+working_set,admission.nonsense=1"):
        with pytest.raises(TournamentError, match="nonsense"):
            parse(text)


def test_entrants_are_parsed() -> None:
    assert [each.label for each in field_of([])] == routing_policies()
    assert [each.label for each in field_of([], {"linear": "why"})] == [
        name for name in routing_policies() if name != "linear"
    ]
    assert [each.label for each in field_of(["linear"], {"linear": "why"})] == ["linear"]
    entrant = parse("steep=linear,alpha=2.5")
    assert (entrant.label, entrant.policy, entrant.params) == ("steep", "linear", {"alpha": 2.5})
    by_class = parse("x=policies.routing.linear:Linear,alpha=2.5")
    assert by_class.make() == entrant.make()
    assert by_class.digest() == entrant.digest()
    assert entrant.digest() != parse("steep=linear,alpha=3.0").digest()


def test_what_is_learned_of_times_counts_for_policies_that_look_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    names = routing_policies()
    before = {name: parse(name).digest() for name in names}
    monkeypatch.setattr("bench.tournament.entrants.costs_digest", lambda: "another way to learn")
    assert {name for name in names if parse(name).digest() != before[name]} == {"joint", "migrate", "warm", "smetric"}


def test_a_policy_that_never_names_the_costs_cannot_see_them(folder: Path) -> None:
    """Its kept results therefore stay valid when the learning changes: a wrong prefill observation has no effect."""
    stage = Arena(read_settings(folder / "config.yaml"), folder / "traces").stage(
        GridCell(trace="tiny", load=0.8, pool=1.0, fleet=2), seed=1
    )

    def play(name: str) -> EntrantResult:
        return stage.play(parse(name).make(), name)

    before = {name: play(name) for name in routing_policies()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrefillModel, "predict", lambda *_: TimeEstimate(100.0, 0.0))
        patch.setattr(PrefillModel, "seconds", lambda *_: 100.0)
        after = {name: play(name) for name in routing_policies()}
    changed = {name for name in before if before[name] != after[name]}
    assert "warm" in changed
    assert changed <= {"joint", "migrate", "warm", "smetric"}


def test_hand_offs_change_the_instances_the_subject_and_the_digest(folder: Path) -> None:
    plain = read_settings(folder / "config.yaml")
    handing = plain.with_hand_offs()
    assert (plain.transport, handing.transport, handing.subject) == ("", "nvlink", "joint")
    cell = GridCell(trace="tiny", load=0.8, pool=1.0, fleet=2)
    arenas = [Arena(settings, folder / "traces") for settings in (plain, handing)]
    stages = [arena.stage(cell, seed=1) for arena in arenas]
    assert [stage.options.role for stage in stages] == [Role.NONE, Role.KV_BOTH]
    assert [stage.options.transport for stage in stages] == [None, "nvlink"]
    assert stages[0].made_of != stages[1].made_of


def test_priority_scheduling_changes_the_engines_and_the_digest(folder: Path) -> None:
    plain = read_settings(folder / "config.yaml")
    ordering = msgspec.structs.replace(plain, priority_scheduling=True)
    cell = GridCell(trace="tiny", load=0.8, pool=1.0, fleet=2)
    made_of = set()
    for settings, scheduling in ((plain, "fcfs"), (ordering, "priority")):
        for each in (settings, settings.with_hand_offs()):
            stage = Arena(each, folder / "traces").stage(cell, seed=1)
            assert stage.options.scheduling_policy == scheduling
            made_of.add(stage.made_of)
    assert len(made_of) == 4


@pytest.mark.parametrize("in_config", [False, True])
def test_priority_scheduling_is_in_the_command_of_the_page(folder: Path, tmp_path: Path, in_config: bool) -> None:
    """A configuration may ask for it too, and the option's absence does not undo that."""
    config = tmp_path / "config.yaml"
    config.write_text(CONFIGURED + "priority_scheduling: true\n" * in_config)
    given = ["--config", str(config), "--trace-dir", str(folder / "traces"), "--output", str(tmp_path / "out")]
    options = [
        "--traces",
        "tiny",
        "--seeds",
        "1",
        "--policies",
        "lmetric",
        *["--priority-scheduling"] * (not in_config),
    ]
    result = CliRunner().invoke(app, [*given, *options])
    assert result.exit_code == 0, result.output
    made = re.search(r"^Made by `(.*?)`", result.stdout, re.MULTILINE)
    assert made
    assert made[1].endswith("--seeds 1 --priority-scheduling")


def test_the_designation_of_specialists_counts_for_policies_that_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    names = routing_policies()
    before = {name: parse(name).digest() for name in names}
    monkeypatch.setattr("bench.tournament.entrants._SPECIALISTS", ("policies.offload.specialists",))
    assert {name for name in names if parse(name).digest() != before[name]} == {"joint"}


@pytest.mark.parametrize(
    ("texts", "word"),
    [
        (["nobody"], "unknown policy"),
        (["linear,beta=1"], "no parameter"),
        (["linear,alpha"], "key=value"),
        (["policies.routing.linear:Nothing"], "Nothing"),
        (["linear", "linear"], "twice"),
    ],
)
def test_wrong_entrants_are_refused(texts: list[str], word: str) -> None:
    with pytest.raises(TournamentError, match=word):
        field_of(texts)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--loads", "high"], "numbers separated by commas"),
        (["--loads", "0.5,0.5"], "no value twice"),
        (["--pools", "0"], "above 0"),
        (["--fleets", "2.5"], "whole numbers"),
        (["--traces", "none"], "no trace none"),
        (["--trace-dir", "nowhere"], "no folder nowhere"),
    ],
)
def test_wrong_grids_are_refused(folder: Path, arguments: list[str], word: str) -> None:
    fixed = [
        "--config",
        str(folder / "config.yaml"),
        "--trace-dir",
        str(folder / "traces"),
        "--output",
        str(folder / "x"),
    ]
    result = CliRunner().invoke(app, [*fixed, *POLICIES, *arguments])
    assert result.exit_code == 2
    assert word in " ".join(result.output.split())


def test_wrong_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    with pytest.raises(TournamentError, match="cannot read"):
        read_settings(path)
    path.write_text("grids: {}\n")
    with pytest.raises(TournamentError, match="grids"):
        read_settings(path)
    path.write_text("traces: [{match: a}]\n")
    with pytest.raises(TournamentError, match="needs a name and a family"):
        read_settings(path)


def test_the_configured_grid_is_the_documented_one() -> None:
    settings = read_settings(CONFIG)
    assert settings.grid == Grid()
    page = (CONFIG.parents[1] / "docs" / "tournament.md").read_text(encoding="utf-8")
    assert page.count(BEGIN) == page.count(END) == 1
    for name, value in msgspec.structs.asdict(settings.sizes).items():
        assert f"`{name}: {value:g}`" in page, name
    for rule in settings.traces:
        assert rule.left_out or f"`{rule.name}`" in page


@pytest.mark.traces
def test_every_public_trace_takes_part_or_says_why_not() -> None:
    import os

    folder = Path(os.environ.get("WARMROUTE_TRACES") or Path(__file__).parents[4] / "shared" / "traces")
    if not folder.is_dir():
        pytest.skip(f"public traces not found at {folder}; set WARMROUTE_TRACES")
    rules = read_settings(CONFIG).traces
    found = find_traces(folder, rules)
    assert set(found) == {rule.name for rule in rules if not rule.left_out}
    assert all(rule.family in {"kv-cache-tester", "mooncake", "miniswe", "taubench"} for _, rule in found.values())
