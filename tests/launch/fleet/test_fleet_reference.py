"""The documents match the code: keys, shipped files, environment of each transport."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch.engines.commands import engine_specs
from launch.fleet.file import FLEETS, FleetFile, load_fleet, parse_fleet
from launch.fleet.reference import keys, reference
from launch.fleet.sections import VllmSettings
from policies.types import Role, Transport
from tests.launch.conftest import REPOSITORY

GUIDE = (REPOSITORY / "docs" / "fleet.md").read_text()


def rows(header: str) -> list[list[str]]:
    """Cells of the guide's table with this header row."""
    body = GUIDE.split(header + "\n", 1)[1].split("\n\n", 1)[0].splitlines()[1:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in body]


def test_the_reference_is_the_models() -> None:
    written = (REPOSITORY / "docs" / "reference" / "fleet-file.md").read_text()
    assert written == reference(), "run `make reference`"
    command = [sys.executable, "-m", "launch.fleet.reference"]
    assert subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY).stdout == written


@pytest.mark.parametrize("model", [FleetFile, VllmSettings])
def test_every_key_is_described(model: type[FleetFile] | type[VllmSettings]) -> None:
    assert [key for key, _, what in keys(model) if not what] == []


def test_the_guide_lists_every_shipped_fleet_with_its_transport() -> None:
    listed = {name.strip("`"): transport for name, _, transport in rows("| file | what | KV moves over |")}
    assert set(listed) == {path.stem for path in FLEETS.glob("*.yaml")}
    for name, transport in listed.items():
        fleet = load_fleet(Path(name))
        connected = any(member.role is not Role.NONE for member in fleet.members)
        expected = "the profile's" if fleet.kind == "sim" else fleet.vllm.transfer.protocol.value
        assert transport == (expected if connected else "–"), name


def test_the_guide_gives_each_transport_its_environment() -> None:
    table = rows("| protocol | `mooncake_protocol` | environment of every engine with a connector |")
    assert [row[0].strip("`") for row in table] == [protocol.value for protocol in Transport]
    for protocol, mooncake, environment in table:
        vllm = {"transfer": {"protocol": protocol.strip("`")}}
        spec = engine_specs(parse_fleet({"kind": "vllm", "count": 2, "model": "m", "vllm": vllm}))[0]
        config = json.loads(spec.command[spec.command.index("--kv-transfer-config") + 1])
        assert config["kv_connector_extra_config"]["mooncake_protocol"] == mooncake.strip("`")
        assert tuple(re.findall(r"without `(\w+)`", environment)) == spec.drop_environment
        for name, value in re.findall(r"`(\w+)=(\w+)`", environment):
            assert {**spec.default_environment, **spec.environment}[name] == value
        assert set(spec.default_environment) <= set(re.findall(r"`(\w+)=\w+`", environment))


def test_the_guide_s_example_is_a_fleet() -> None:
    import yaml

    example = GUIDE.split("```yaml\n", 1)[1].split("```", 1)[0]
    fleet = parse_fleet(yaml.safe_load(example))
    assert [member.name for member in fleet.members] == [f"p-{i}" for i in range(4)] + [f"d-{i}" for i in range(4)]
