"""PD cost against benefit: published points reproduced, both models, the break-even."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.analysis.cli import application
from policies.costs.formulas import TransferJob, transfer_formula
from policies.types import Transport
from sim.hardware import load_profile


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(application(), ["pd-cost", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_published_benefits_at_eight_streams() -> None:
    rows = {row["prompt_tokens"]: row for row in run()["rows"]}
    assert all(row["measured"] and row["streams"] == 8 and row["pays"] for row in rows.values())
    # Published as D x T_prefill: 1.1 s, 36 s, 456 s; the exact sum subtracts the tokens that the streams would have got
    # anyway.
    for tokens, published in ((2_048, 1.1), (32_768, 36), (131_072, 456)):
        row = rows[tokens]
        assert 8 * row["prefill_s"] == pytest.approx(published, rel=0.05)
        assert row["benefit_stream_s"] == pytest.approx(
            8 * row["prefill_s"] * (1 - row["tpot_base_s"] / row["tpot_during_s"])
        )
    assert rows[32_768]["transfer_idle_s"] == pytest.approx(0.3209)
    assert rows[131_072]["transfer_idle_s"] == pytest.approx(2.835)
    # Busy, 65k tokens moved at 4.53 GB/s with 4 streams on each side and 3.33 with 12 instead of 8.76; 8 is between.
    slowdown = (8.76 / 4.53 + 8.76 / 3.33) / 2
    assert rows[65_536]["transfer_loaded_s"] == pytest.approx(slowdown * rows[65_536]["transfer_idle_s"], rel=0.001)
    assert rows[32_768]["gain_idle"] > 100


def test_the_wrong_account_turns_the_verdict_round() -> None:
    rows = {row["prompt_tokens"]: row for row in run("--single-decode", "0.2")["rows"]}
    for tokens in (32_768, 65_536, 131_072):
        row = rows[tokens]
        assert row["capped_benefit_s"] == 0.2
        assert row["pays"]
        assert not row["pays_if_capped"]
        assert row["understated"] > 100
    assert rows[2_048]["pays_if_capped"]


def test_points_are_measured_where_there_are_any_and_fitted_elsewhere() -> None:
    rows = run("--profile", "h200", "--transport", "nvlink", "--tokens", "32768,131072", "--streams", "8")["rows"]
    assert [row["measured"] for row in rows] == [True, False]
    assert rows[0]["prefill_s"] == 1.26037
    assert rows[1]["prefill_s"] == pytest.approx(13.15, rel=0.1)


def test_a_point_that_was_left_out_of_the_fit_is_not_used() -> None:
    (row,) = run("--profile", "h200", "--tokens", "2048", "--streams", "1")["rows"]
    # The measured one compiled kernels: 1.09 s.
    assert not row["measured"]
    assert row["prefill_s"] < 0.2


def test_break_even_is_where_the_benefit_meets_the_transfer() -> None:
    for row in run("--profile", "h200", "--transport", "tcp", "--streams", "1,4")["rows"]:
        each = row["prefill_s"] * row["stall_share"]
        fewest = row["break_even_streams"]
        assert fewest * each >= row["transfer_loaded_s"] > (fewest - 1) * each
        assert row["pays"] == (row["benefit_stream_s"] > row["transfer_loaded_s"])


def test_the_formula_is_the_policies_own() -> None:
    (row,) = run("--profile", "h200", "--transport", "nvlink", "--tokens", "65536", "--streams", "4")["rows"]
    job = TransferJob(("P", "D"), Transport.NVLINK, 65_536 * load_profile("h200").kv.bytes_per_token, 4, 0)
    assert row["formula_loaded_s"] == pytest.approx(transfer_formula(job))
    assert row["formula_idle_s"] == pytest.approx(transfer_formula(job._replace(streams=0)))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--profile", "none-such"], "no hardware profile"),
        (["--transport", "nvlink"], "has no transport 'nvlink'"),
        (["--tokens", "1"], "whole number from 2"),
        (["--streams", "9000"], "leave a step no room"),
        (["--single-decode", "0"], "must be above 0"),
    ],
)
def test_bad_options_say_what_to_do(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(application(), ["pd-cost", *arguments])
    assert result.exit_code == 2
    assert said in result.output.replace("\n", " ")
