"""The part of a hardware profile that serving uses: the constants that the cost models start from."""

from __future__ import annotations

from pathlib import Path

import yaml

from policies.costs.constants import CostConstants, constants_of

HARDWARE_FOLDER = Path(__file__).resolve().parents[2] / "configs" / "hardware"


def hardware_constants(name: str) -> CostConstants:
    """The cost constants of a profile, by its name in configs/hardware or its path (``.yaml``).

    Raises:
        ValueError: no such profile, or one without usable constants; the message says what to do.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else HARDWARE_FOLDER / f"{name}.yaml"
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"hardware profile {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"hardware profile {path} is not YAML: {error}") from error
    costs = values.get("costs") if isinstance(values, dict) else None
    if costs is None:
        raise ValueError(f"hardware profile {path} has no section `costs`; `warmroute calibrate` writes one")
    try:
        return constants_of(costs)
    except ValueError as error:
        raise ValueError(f"hardware profile {path}: {error}") from error
