"""The bound on one prompt's tokens in a step, in a fleet file: the engines' flag."""

from __future__ import annotations

from typing import Any

import pytest

from launch.engines.commands import engine_specs
from launch.fleet.file import FleetError, FleetFile, parse_fleet

VLLM: dict[str, Any] = {"kind": "vllm", "count": 1, "model": "m"}
FLAG = "--long-prefill-token-threshold"


def flag_of(fleet: FleetFile) -> str | None:
    (spec,) = engine_specs(fleet)
    command = spec.command
    return command[command.index(FLAG) + 1] if FLAG in command else None


def test_vllm_gets_the_flag_only_where_the_file_has_the_key() -> None:
    assert flag_of(parse_fleet(VLLM)) is None
    assert flag_of(parse_fleet({**VLLM, "vllm": {"long_prefill_token_threshold": 6144}})) == "6144"


def test_simulated_engines_have_the_key_too() -> None:
    assert flag_of(parse_fleet({"kind": "sim", "count": 1, "sim": {"long_prefill_token_threshold": 512}})) == "512"


def test_the_flag_among_further_arguments_is_refused_with_the_key() -> None:
    with pytest.raises(FleetError, match=r"sets --long-prefill-token-threshold itself; use vllm\.long_prefill"):
        parse_fleet({**VLLM, "vllm": {"extra_args": [FLAG, "512"]}})


def test_negative_ones_are_refused() -> None:
    with pytest.raises(FleetError, match="long_prefill_token_threshold"):
        parse_fleet({**VLLM, "vllm": {"long_prefill_token_threshold": -1}})
