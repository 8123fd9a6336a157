"""Agreement of ``compare`` and ``report`` on the same experiment: noise of equal arms, proofs of freshness."""

from __future__ import annotations

import html
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from replayer.compare.arms import read_experiment
from replayer.compare.comparison import CompareOptions
from replayer.compare.runs import compare_arms
from replayer.report.cli import register
from replayer.report.inputs import read_inputs
from replayer.report.page import against_leader, compare_all
from tests.replayer.compare.conftest import MakeExperiment

OPTIONS = CompareOptions(resamples=1000)
EQUAL = {"warm": {"policy": "warm"}, "again": {"policy": "warm"}, "linear": {"policy": "linear"}}
SLOWER = {"warm": 1.0, "again": 0.95, "linear": 1.15}


@pytest.fixture
def equal_arms(experiment: MakeExperiment, repeats: int) -> Path:
    """An experiment whose first two arms have one configuration."""
    return experiment(repeats=repeats, slower=SLOWER, config={"arms": EQUAL, "comparison": {"resamples": 1000}})


def invoke(*arguments: object) -> Result:
    application = typer.Typer()
    register(application)
    return CliRunner().invoke(application, [str(one) for one in arguments])


@pytest.mark.parametrize("repeats", [1, 2])
def test_both_pool_the_noise_of_equal_arms(equal_arms: Path, repeats: int) -> None:
    compared = compare_arms(read_experiment(equal_arms).arms, OPTIONS)
    reported, refusals = compare_all(read_inputs([equal_arms]).arms, OPTIONS)
    assert refusals == []
    assert [found.as_json() for found in reported] == [found.as_json() for found in compared]
    # Of the equal arms all runs but one; of the third all of its own but one.
    assert {row.degrees_of_freedom for row in compared[0].noise_floor} == {3 * repeats - 2}


@pytest.mark.parametrize("repeats", [1, 2])
def test_the_candidates_are_held_against_their_leader_with_the_noise_of_the_same_arms(
    equal_arms: Path, repeats: int
) -> None:
    [reported] = against_leader(read_inputs([equal_arms]).arms, OPTIONS)
    arms = sorted(read_experiment(equal_arms).arms, key=lambda arm: arm.label != "again")
    [compared] = [found for found in compare_arms(arms, OPTIONS) if found.candidate_label == "linear"]
    assert (reported.baseline_label, reported.runs) == ("again", (repeats, repeats))
    assert reported.as_json() == compared.as_json()


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("repeats", [1, 2])
def test_both_commands_print_the_same_verdict(equal_arms: Path, tmp_path: Path) -> None:
    compared = invoke("compare", equal_arms)
    reported = invoke("report", equal_arms, "--output", tmp_path / "page.html")
    assert (compared.exit_code, reported.exit_code) == (0, 0), compared.output + reported.output
    assert "Single runs" not in reported.output
    verdict = compared.output[: compared.output.index("Settings of the experiment")]
    printed = reported.output[: reported.output.index("Settings of the experiment")]
    leader = [line for line in printed.splitlines() if line not in verdict.splitlines()]
    assert " ".join(leader).startswith("Of the candidates, again has the lowest E2E p50")
    assert [line for line in printed.splitlines() if line not in leader] == verdict.splitlines()


@pytest.mark.usefixtures("undrawn")
def test_a_live_run_without_its_proof_has_a_verdict_in_neither(experiment: MakeExperiment, tmp_path: Path) -> None:
    root, page = experiment(backend="live"), tmp_path / "page.html"
    (root / "arms" / "lmetric" / "2" / "fresh.json").unlink()
    reason = (
        "'lmetric' (run 2) was measured on a warm fleet: there is no fresh.json beside it, so nothing proves that its "
        "fleet was fresh"
    )
    compared = invoke("compare", root)
    assert compared.exit_code == 2
    assert reason in " ".join(compared.output.split())
    # A report shows what must not be compared side by side, with the reason.
    reported = invoke("report", root, "--output", page)
    assert reported.exit_code == 0, reported.output
    assert reason in " ".join(reported.output.split())
    assert "Against linear" not in reported.output
    assert "better" not in reported.output
    text = html.unescape(page.read_text())
    assert reason in " ".join(text.split())
    assert 'id="verdict"' not in text
    forced = invoke("report", root, "--force", "--resamples", "1000", "--output", page)
    assert "better" in forced.output
    assert "nothing proves that its fleet was fresh" in " ".join(forced.output.split())
