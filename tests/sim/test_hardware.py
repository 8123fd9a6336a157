"""Hardware profiles: the shipped ones equal the fit of their points, and the engine reproduces their times."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from sim.cli import register
from sim.core.engine import Engine
from sim.core.sequence import Request
from sim.core.timing import StepRun
from sim.core.types import EngineConfig
from sim.fit import Fit, fit, model_prefill
from sim.fit_report import by_kind, profile_yaml
from sim.hardware import (
    HardwareProfile,
    LoadedTransferRow,
    ProfileError,
    TransportProfile,
    load_profile,
)
from sim.points import load_points
from sim.virtual import VirtualFleet
from warmroute_yaml import HARDWARE_FOLDER

PROFILES = ("h20", "h200")


@pytest.fixture(scope="module")
def fits() -> dict[str, Fit]:
    return {name: fit(load_points(HARDWARE_FOLDER / f"{name}_points.yaml")) for name in (*PROFILES, "h200-nvlink-128")}


def numbers(value: object, path: str = "") -> dict[str, object]:
    """A nested structure as {path: leaf}."""
    if isinstance(value, dict):
        return {key: leaf for name, each in value.items() for key, leaf in numbers(each, f"{path}.{name}").items()}
    if isinstance(value, list | tuple):
        return {key: leaf for i, each in enumerate(value) for key, leaf in numbers(each, f"{path}.{i}").items()}
    return {path: value}


@pytest.mark.parametrize("name", PROFILES)
def test_the_shipped_profile_is_the_refit(name: str, fits: dict[str, Fit]) -> None:
    shipped = numbers(load_profile(name).model_dump())
    refit = numbers(fits[name].profile.model_dump())
    assert shipped.keys() == refit.keys()
    for path, value in refit.items():
        expected = pytest.approx(value, rel=2e-3) if isinstance(value, float) else value
        assert shipped[path] == expected, path


# The bounds that docs/simulator.md states.
@pytest.mark.parametrize(
    ("name", "median", "worst"), [("h20", 0.05, 0.08), ("h200", 0.06, 0.45), ("h200-nvlink-128", 0.06, 0.45)]
)
def test_residuals_stay_within_the_documented_bounds(
    name: str, median: float, worst: float, fits: dict[str, Fit]
) -> None:
    assert fits[name].median_error < median
    assert abs(fits[name].worst.error) < worst


def test_the_documented_residuals_are_the_fits(fits: dict[str, Fit]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text(encoding="utf-8")
    for name in PROFILES:
        _, found, section = page.partition(f"## Residuals of {name}\n")
        assert found
        table = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| ")][2:]
        assert len(table) == len(fits[name].residuals)
        for line, residual in zip(table, fits[name].residuals, strict=True):
            kind, label, _, _, error, note = (cell.strip() for cell in line.strip("|").split("|"))
            assert (kind, label, note) == (residual.kind, residual.label, residual.note)
            assert float(error.rstrip("%")) == pytest.approx(100 * residual.error, abs=0.3)


def test_by_kind_counts_only_points_that_count(fits: dict[str, Fit]) -> None:
    kinds = by_kind(fits["h200"].residuals)
    assert set(kinds) == {"decode step", "prefill TTFT", "busy TTFT", "TPOT during", "longest gap"}
    assert kinds["busy TTFT"][0] == 15  # one of sixteen compiled kernels and is left out
    assert fits["h200"].worst.label == "32,768 among 1"


def test_a_written_profile_reads_back(fits: dict[str, Fit], tmp_path: Path) -> None:
    path = tmp_path / "again.yaml"
    path.write_text(profile_yaml(fits["h200"].profile), encoding="utf-8")
    assert load_profile(str(path)) == fits["h200"].profile


def engine_for(profile: HardwareProfile) -> Engine:
    config = EngineConfig(
        num_blocks=profile.kv.pool_tokens // 64,
        max_num_batched_tokens=profile.max_num_batched_tokens,
        max_num_seqs=profile.max_num_seqs,
        max_model_len=profile.max_model_len,
    )
    return Engine(config, profile.timing, profile.transport().seconds)


def burst(name: str, prefill: int, streams: int) -> tuple[float, float, float]:
    """(TTFT of a prefill among decodes, burst-average TPOT of a stream, TPOT before it) in the engine."""
    fleet = VirtualFleet({"e": engine_for(load_profile(name))})
    for number in range(streams):
        fleet.submit("e", Request(f"s{number}", 1024, range(1000 * number, 1000 * number + 16), max_tokens=20_000))
    before = sum(event.tokens for _, event in fleet.run(10.0) if event.request_id == "s0")
    before_again = sum(event.tokens for _, event in fleet.run(20.0) if event.request_id == "s0")
    assert before
    started_s = fleet.now_s
    fleet.submit("e", Request("big", prefill, range(10**6, 10**6 + prefill // 64), max_tokens=1))
    tokens = 0
    for _, event in fleet.run():
        if event.request_id == "s0":
            tokens += event.tokens
        elif event.request_id == "big":
            ttft_s = event.time_s - started_s
            return ttft_s, ttft_s / tokens, 10.0 / before_again
    raise AssertionError("the prefill never finished")


@pytest.mark.parametrize(
    ("prefill", "ttft_s", "tpot_s"),
    [(8_192, 0.583, 0.114), (32_768, 4.520, 0.388), (65_536, 15.615, 0.757), (131_072, 56.991, 1.419)],
)
def test_interference_on_h20_is_near_the_published_table(prefill: int, ttft_s: float, tpot_s: float) -> None:
    played_ttft_s, played_tpot_s, base_s = burst("h20", prefill, 8)
    assert base_s == pytest.approx(0.0077, rel=0.08)
    assert played_ttft_s == pytest.approx(ttft_s, rel=0.12)
    assert played_tpot_s == pytest.approx(tpot_s, rel=0.12)


def test_interference_on_h200_is_near_the_measurement() -> None:
    ttft_s, tpot_s, base_s = burst("h200", 65_536, 8)
    assert base_s == pytest.approx(0.01473, rel=0.1)
    assert ttft_s == pytest.approx(3.856, rel=0.05)
    assert tpot_s == pytest.approx(0.241, rel=0.15)


def test_the_fits_model_of_a_prefill_is_what_the_engine_does() -> None:
    profile = load_profile("h20")
    model = model_prefill(profile.timing, 20_000, 0, 0, 0, profile.max_num_batched_tokens)
    fleet = VirtualFleet({"e": engine_for(profile)})
    fleet.submit("e", Request("a", 20_000, range(20_000 // 64), max_tokens=1))
    ((_, event),) = fleet.run()
    assert event.time_s == pytest.approx(model.ttft_s)
    assert len(model.steps_s) == 3


def test_cached_tokens_cost_attention_but_no_computing() -> None:
    timing = load_profile("h200").timing
    cold = model_prefill(timing, 8192, 0, 0, 0, 8192).ttft_s
    warm = model_prefill(timing, 8192, 65536, 0, 0, 8192).ttft_s
    whole = model_prefill(timing, 8192 + 65536, 0, 0, 0, 8192).ttft_s
    assert cold < warm < whole


@pytest.mark.parametrize("growth_s", [0.0, 1e-7, 1e-3])
@pytest.mark.parametrize("seconds", [0.0, 0.005, 0.01, 0.0999, 0.1, 3.7])
def test_runs_of_decode_steps_are_counted_right(growth_s: float, seconds: float) -> None:
    run = StepRun(0.01, growth_s)
    lengths = [0.01 + growth_s * step for step in range(1000)]
    ends = [sum(lengths[: step + 1]) for step in range(1000)]
    assert run.duration(7) == pytest.approx(ends[6])
    within = run.steps_within(seconds)
    assert within in {sum(end <= seconds + slack for end in ends) for slack in (-1e-12, 0, 1e-12)}
    reaching = run.steps_reaching(seconds)
    assert reaching >= 1
    assert run.duration(reaching) >= seconds
    assert reaching == 1 or run.duration(reaching - 1) < seconds


def test_transfers_are_interpolated_by_size_and_load() -> None:
    idle = LoadedTransferRow(streams=0, points=((100.0, 1.0), (200.0, 3.0)))
    busy = LoadedTransferRow(streams=8, points=((100.0, 2.0), (200.0, 6.0)))
    transport = TransportProfile(contention=0.5, rows=(idle, busy))
    assert transport.seconds(50, 0, 1) == pytest.approx(0.5)
    assert transport.seconds(150, 0, 1) == pytest.approx(2.0)
    assert transport.seconds(400, 0, 1) == pytest.approx(6.0)
    assert transport.seconds(100, 4, 1) == pytest.approx(1.5)
    assert transport.seconds(100, 99, 1) == pytest.approx(2.0)
    assert transport.seconds(100, 0, 3) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("name", "transport", "tokens", "streams", "seconds"),
    [
        ("h20", "rdma", 32_768, 0, 0.3209),
        # 8 and 24 background streams over two instances; bandwidth instead of 8.76 GB/s.
        ("h20", "rdma", 65_536, 8 / 2, 1.895 * 8.76 / 4.53),
        ("h20", "rdma", 65_536, 24 / 2, 1.895 * 8.76 / 3.33),
        ("h200", "tcp", 16_384, 4, 5.1),
        ("h200", "nvlink", 32_768, 12, 0.7),
    ],
)
def test_transfers_meet_their_sources(name: str, transport: str, tokens: int, streams: float, seconds: float) -> None:
    profile = load_profile(name)
    moved = profile.transport(transport).seconds(tokens * profile.kv.bytes_per_token, streams, 1)
    assert moved == pytest.approx(seconds, rel=0.06)


@pytest.mark.parametrize(
    ("tokens", "fastest_s", "median_s", "slowest_s"), [(65_536, 0.6535, 1.895, 2.3752), (131_072, 1.283, 2.835, 9.1586)]
)
def test_long_transfers_over_rdma_vary_as_measured(
    tokens: int, fastest_s: float, median_s: float, slowest_s: float
) -> None:
    profile = load_profile("h20")
    draw = profile.transport("rdma").drawn("seed")
    seconds = sorted(draw(tokens * profile.kv.bytes_per_token, 0, 1) for _ in range(2001))
    assert fastest_s * 0.999 <= seconds[0] < fastest_s * 1.05
    assert seconds[1000] == pytest.approx(median_s, rel=0.1)
    assert slowest_s * 0.95 < seconds[-1] <= slowest_s * 1.001


def test_draws_repeat_with_their_seed_and_spare_what_does_not_vary() -> None:
    profile = load_profile("h20")
    transport, size = profile.transport("rdma"), 131_072 * profile.kv.bytes_per_token
    first, again, other = (transport.drawn(seed) for seed in ("a", "a", "b"))
    times = [first(size, 0, 1) for _ in range(5)]
    assert times == [again(size, 0, 1) for _ in range(5)] != [other(size, 0, 1) for _ in range(5)]
    assert first(size // 4, 0, 1) == pytest.approx(0.3209)
    assert load_profile("h200").transport("tcp").drawn("a")(size, 4, 1) == load_profile("h200").transport(
        "tcp"
    ).seconds(size, 4, 1)


@pytest.mark.parametrize("tokens", [512, 32_768, 131_072])
def test_a_busier_pair_is_never_faster_over_rdma(tokens: int) -> None:
    profile = load_profile("h20")
    size = tokens * profile.kv.bytes_per_token
    seconds = [profile.transport("rdma").seconds(size, streams, 1) for streams in (0, 2, 4, 8, 12)]
    assert seconds == sorted(set(seconds))


def test_bad_profiles_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"h20, h200"):
        load_profile("h999")
    broken = tmp_path / "broken.yaml"
    broken.write_text("name: [", encoding="utf-8")
    with pytest.raises(ProfileError, match="is not YAML"):
        load_profile(str(broken))
    broken.write_bytes(b"name: caf\xe9")
    with pytest.raises(ProfileError, match="is not YAML"):
        load_profile(str(broken))
    broken.write_text("name: x\nspeed: 3\n", encoding="utf-8")
    with pytest.raises(ProfileError, match="speed"):
        load_profile(str(broken))
    with pytest.raises(ProfileError, match="it has: rdma"):
        load_profile("h20").transport("nvlink")


def test_the_command_prints_every_residual_and_refuses_nonsense() -> None:
    app = typer.Typer()
    register(app)
    runner = CliRunner()
    done = runner.invoke(app, ["sim", "fit", "h20", "--markdown"])
    assert done.exit_code == 0
    assert "| busy TTFT | 65,536 among 8 | 15.62 s |" in done.output
    assert "h20: 12 points, median error" in done.output
    missing = runner.invoke(app, ["sim", "fit", "h999"])
    assert missing.exit_code == 2
    assert "h999_points.yaml; profiles with one: h100-nvlink, " in missing.output
    assert missing.output.strip().endswith("h20, h200, h200-nvlink-128")


def test_a_profile_does_not_overwrite_the_points_that_it_is_fitted_to(tmp_path: Path) -> None:
    points = tmp_path / "h20.yaml"
    points.write_bytes((HARDWARE_FOLDER / "h20_points.yaml").read_bytes())
    before = points.read_bytes()
    app = typer.Typer()
    register(app)
    for output in (points, tmp_path):
        refused = CliRunner().invoke(app, ["sim", "fit", "h20", "--points", str(points), "--output", str(output)])
        assert refused.exit_code == 2
        assert "is an input and would be overwritten" in refused.output
    assert points.read_bytes() == before


def test_a_file_of_another_kind_is_refused_by_key() -> None:
    with pytest.raises(ProfileError, match=r"h20_points.yaml is not a hardware profile: \d+ problem") as refused:
        load_profile("h20_points")
    lines = str(refused.value).splitlines()
    assert "  step: Field required" in lines
    assert "  decode: unknown key; check the spelling" in lines
    assert "pydantic" not in str(refused.value)
    with pytest.raises(ProfileError, match="is not a points file") as refused:
        load_points(HARDWARE_FOLDER / "h20.yaml")
    assert "  step: unknown key; check the spelling" in str(refused.value).splitlines()
