"""Settings of a tournament: grid, noise, families of traces, ablations (configs/tournament.yaml)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "tournament.yaml"


class TournamentError(ValueError):
    """Settings or inputs with which a tournament cannot run; the message says what to change."""


class TraceRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Name, family and reading options of files whose path matches."""

    match: str
    """Pattern (as a shell's) for the path below the folder of traces."""
    name: str = ""
    family: str = ""
    """Traces of one family share conversations: they are held out together."""
    sessions: Literal["derived", "single"] = "derived"
    """For traces without session ids: derive sessions by prefix chaining, or treat every request as a session."""
    left_out: str = ""
    """Reason for which the file takes no part; empty: it takes part."""


class Grid(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cells: every trace at every combination."""

    loads: tuple[float, ...] = (0.5, 0.8, 1.0, 1.2)
    """Arrival rate over the rate at saturation."""
    pools: tuple[float, ...] = (0.25, 1.0, 4.0)
    """KV pool of the fleet over the hot set at saturation."""
    fleets: tuple[int, ...] = (4, 8, 16, 64)
    """Instances."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Repeats: each has its own stretch of the trace, arrival jitter and instance speeds."""


class Sizes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Length of a cell's simulation and its noise; `bench.tournament.workload` explains each size."""

    requests: float = 300.0
    """Judged requests of a cell, over the square root of the fleet's size."""
    settle_latencies: float = 1.0
    """Start-up that is not judged, in mean nominal latencies."""
    tail_latencies: float = 0.5
    """End that is not judged, in mean nominal latencies."""
    least_latencies: float = 1.0
    """Least length of the judged stretch in mean nominal latencies, whatever the number of requests."""
    arrival_jitter_s: float = 0.5
    speed_sigma: float = 0.03
    resamples: int = 500
    """Bootstrap resamples."""
    overload_requests: float = 3000.0
    """Requests with which the computed saturation of a trace is checked (`bench.tournament.attained`)."""


class HandOffs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tournament on instances that can hand over KV (``--hand-offs``): what differs from the plain one."""

    transport: str = "nvlink"
    """KV transport of all pairs; one that the profile has constants for."""
    subject: str = "joint"
    left_out: dict[str, str] = {}
    ablations: dict[str, dict[str, Any]] = {}


class TournamentSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    profile: str = "h200"
    grid: Grid = Grid()
    sizes: Sizes = Sizes()
    traces: tuple[TraceRule, ...] = ()
    subject: str = "warm"
    """The policy whose standing is compared with the targets."""
    left_out: dict[str, str] = {}
    """Registered policies that take part only where ``--policies`` names them, with the reason."""
    ablations: dict[str, dict[str, Any]] = {}
    """Name of an idea: the parameters of ``subject`` that switch it off."""
    ablation_fleets: tuple[int, ...] = ()
    """Fleets that the ablations are played with, of those in the grid; empty: all."""
    ablation_seeds: tuple[int, ...] = ()
    """Seeds that the ablations are played with, of those in the grid; empty: all."""
    priority_scheduling: bool = False
    """The engines compute waiting prompts by priority, for policies that order them (`policies.costs.order`)."""
    transport: str = ""
    """KV transport of instances that can hand over KV; empty: instances have no KV roles. Set by ``with_hand_offs``."""
    hand_offs: HandOffs = HandOffs()

    def with_hand_offs(self) -> TournamentSettings:
        """The settings of the tournament on instances that can hand over KV."""
        of = self.hand_offs
        return msgspec.structs.replace(
            self, transport=of.transport, subject=of.subject, left_out=of.left_out, ablations=of.ablations
        )

    def ablation_grid(self) -> Grid:
        """The part of the grid that the ablations are played on.

        Raises:
            TournamentError: nothing is left of it.
        """
        kept = {
            axis: tuple(value for value in getattr(self.grid, axis) if not chosen or value in chosen)
            for axis, chosen in (("fleets", self.ablation_fleets), ("seeds", self.ablation_seeds))
        }
        for axis, values in kept.items():
            if not values:
                raise TournamentError(f"--ablations: no --{axis} of the grid is under ablation_{axis} in the settings")
        return msgspec.structs.replace(self.grid, **kept)


def read_settings(path: Path = CONFIG) -> TournamentSettings:
    """Read and check a settings file.

    Raises:
        TournamentError: it is missing, not YAML, or has unknown keys.
    """
    try:
        settings = msgspec.yaml.decode(path.read_bytes(), type=TournamentSettings)
    except OSError as error:
        raise TournamentError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise TournamentError(f"{path}: {error}") from error
    check_grid(settings.grid)
    for rule in settings.traces:
        if not rule.left_out and not (rule.name and rule.family):
            raise TournamentError(f"{path}: the trace rule for {rule.match!r} needs a name and a family")
    return settings


def check_grid(grid: Grid) -> None:
    """Reject a grid without cells, or with impossible ones.

    Raises:
        TournamentError: names the axis.
    """
    for name in ("loads", "pools", "fleets", "seeds"):
        values = getattr(grid, name)
        if not values or len(set(values)) != len(values):
            raise TournamentError(f"--{name} needs at least one value, and no value twice")
    if min(grid.loads) <= 0 or min(grid.pools) <= 0 or min(grid.fleets) < 1:
        raise TournamentError("--loads and --pools must be above 0, --fleets at least 1")
