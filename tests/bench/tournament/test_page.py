"""The tournament's page covers the configured grid, and other pages quote it correctly."""

from __future__ import annotations

import re
from pathlib import Path

from bench.tournament.settings import read_settings
from policies.registry import routing_policies

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "tournament.md").read_text(encoding="utf-8")
WITH_RULES = (ROOT / "docs" / "tournament-admission.md").read_text(encoding="utf-8")
OTHER_HARDWARE = (ROOT / "docs" / "tournament-hardware.md").read_text(encoding="utf-8")
WITH_HAND_OFFS = (ROOT / "docs" / "tournament-joint.md").read_text(encoding="utf-8")
SETTINGS = read_settings()


def ranking(page: str = PAGE) -> dict[str, list[str]]:
    """Policy to the cells of its row, from rank on."""
    rows = re.findall(r"^\| \d+ \| `.*", page, re.MULTILINE)
    split = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {row[1].strip("`"): row for row in split}


def cells() -> int:
    traces = [rule for rule in SETTINGS.traces if not rule.left_out]
    grid = SETTINGS.grid
    return len(traces) * len(grid.loads) * len(grid.pools) * len(grid.fleets)


def test_the_page_is_of_the_whole_configured_grid_and_all_policies() -> None:
    assert f"{cells()} cells.\n" in PAGE
    assert sorted([*ranking(), *SETTINGS.left_out]) == routing_policies()
    for idea in SETTINGS.ablations:
        assert f"\n| {idea} | " in PAGE
    for family in {rule.family for rule in SETTINGS.traces if rule.family}:
        assert re.search(rf"^\| {family} \| `warm", PAGE, re.MULTILINE)


def test_the_command_on_the_page_is_that_of_the_makefile() -> None:
    made = re.search(r"^Made by `(python -m bench\.tournament[^`]*)`", PAGE, re.MULTILINE)
    assert made
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    words = made[1].split()
    assert words == ["python", "-m", "bench.tournament", "--ablations", "--folds"]
    assert re.search(r"bench\.tournament --jobs \S+ --ablations --folds --document docs/tournament\.md", makefile)


def test_the_readme_says_what_the_page_says() -> None:
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    said = re.search(
        r"`warm`, is best or tied for best in TTFT p90 and E2E p50 in (\d+ %) of the (\d+) simulated cells of \S+ "
        r"\S+, the next one in (\d+ %); in (\d+) cells it is surely more than 5 % behind",
        readme,
    )
    assert said
    first, second, *_ = ranking().values()
    assert first[1] == "`warm`"
    assert said.groups() == (first[2], str(cells()), second[2], first[10])


def test_the_subject_is_the_default_policy() -> None:
    settings = (ROOT / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
    assert f'| `policy.name` | `"{SETTINGS.subject}"` |' in settings


def test_the_page_with_hand_offs_is_of_all_policies_and_its_own_command() -> None:
    settings = SETTINGS.with_hand_offs()
    assert sorted([*ranking(WITH_HAND_OFFS), *settings.left_out]) == routing_policies()
    for variant in settings.ablations:
        assert f"\n| `{variant}` | " in WITH_HAND_OFFS
        assert f"\n| {variant} | " in WITH_HAND_OFFS
    made = re.search(r"^Made by `(python -m bench\.tournament[^`]*)`", WITH_HAND_OFFS, re.MULTILINE)
    assert made
    command = re.search(r"^python -m bench\.tournament .*", WITH_HAND_OFFS, re.MULTILINE)
    assert command
    options = command[0].removesuffix(" --document docs/tournament-joint.md").removesuffix(" -o runs/hand-offs")
    assert set(options.split()) == set(made[1].split())


def test_the_page_of_other_hardware_is_of_its_own_command_and_sums_up_both_pages() -> None:
    made = re.search(r"^Made by `(python -m bench\.tournament[^`]*)`", OTHER_HARDWARE, re.MULTILINE)
    command = re.search(r"^python -m bench\.tournament .*", OTHER_HARDWARE, re.MULTILINE)
    assert made
    assert command
    options = command[0].removesuffix(" --document docs/tournament-hardware.md").removesuffix(" -o runs/hardware")
    assert set(options.split()) == set(made[1].split())
    assert ranking(OTHER_HARDWARE).keys() == ranking(WITH_HAND_OFFS).keys()
    rows = [
        re.findall(r"^\| \d+ \| `(\S+)` \| (\d+ %) \|.*\| (\d+\.\d+) \| \d+ \| (\d+) \| 0 \|$", page, re.MULTILINE)
        for page in (WITH_HAND_OFFS, OTHER_HARDWARE)
    ]
    for line, place, value in (
        ("`joint` best or tied in both metrics", 0, 1),
        ("`warm`", 1, 1),
        ("the next policy", 2, 1),
        ("`joint` surely more than 5 % behind the best", 0, 3),
    ):
        before, after = (of_page[place][value] for of_page in rows)
        assert f"\n| {line} | {before} | {after} |" in OTHER_HARDWARE
    before, after = (f"{float(of_page[0][2]) * 100 - 100:.0f} %" for of_page in rows)
    assert f"\n| `joint` furthest behind | {before} | {after} |" in OTHER_HARDWARE


def test_the_page_with_admission_rules_is_of_its_own_command() -> None:
    made = re.search(r"^Made by `(python -m bench\.tournament[^`]*)`", WITH_RULES, re.MULTILINE)
    assert made
    command = re.search(r"^python -m bench\.tournament (?:.*\\\n)*.*", WITH_RULES, re.MULTILINE)
    assert command
    words = command[0].replace("\\\n", " ")
    options = words.removesuffix(" --document docs/tournament-admission.md").removesuffix(" -o runs/admission")
    assert sorted(options.split()) == sorted(made[1].split())
    entrants = sorted(
        word for word, option in zip(options.split()[1:], options.split(), strict=False) if option == "--policies"
    )
    assert sorted(ranking(WITH_RULES)) == entrants


def test_the_summary_with_admission_rules_is_that_of_the_tables() -> None:
    mean = dict(re.findall(r"^\| `(\S+)` \| (\d\.\d+) \| \d\.\d+ \| \d\.\d+ \| \d+\.\d+ \|", WITH_RULES, re.MULTILINE))
    for policy in ("warm", "session_sticky"):
        before, after = (f"{float(mean[name]):.2f}" for name in (policy, f"{policy}+working_set"))
        assert re.search(rf"from {before} to\s+{after}\s+with `{policy}`", WITH_RULES)
