"""Every built-in policy, planner and admission rule as a Markdown page, read from the docstrings.

The page is kept in ``docs/reference/policies.md``.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

from bench.docs_figures.data import EXAMPLE, example_request
from policies.admission.base import AdmissionView, SessionView
from policies.offload.base import OffloadPlanner
from policies.registry import ADMISSION_GROUP, BUILT_IN, OFFLOAD_GROUP, ROUTING_GROUP, parameters
from policies.routing.base import RoutingPolicy
from policies.snapshot import FleetSnapshot
from policies.types import RequestClass, RequestView, Role

ROOT = Path(__file__).parents[3]
INTRODUCTION = """# Reference: policies, planners and admission rules

Generated from the docstrings by `make reference`. Terms, tie-breaks and reasons: [policies](../policies.md); when
requests are held: [admission](../admission.md); how they rank: [tournament](../tournament.md). *Inputs* are the figures
that `POST /explain` shows beside a decision, or the fields that an admission rule reads; n is the number of instances.
Parameters are set by `policy.params`, `offload.params` and `admission.params`."""
SECTIONS = {
    "Routing policies": (ROUTING_GROUP, "policies.routing"),
    "Baselines: other routers' policies": (ROUTING_GROUP, "policies.baselines"),
    "Offload planners": (OFFLOAD_GROUP, "policies.offload"),
    "Admission rules": (ADMISSION_GROUP, "policies.admission"),
}
"""Heading -> group of the registry, and the package whose classes it lists."""

_COMPLEXITY = re.compile(r"\s*\bComplexity:\s+(O\([^)]*\)[^.]*)\.")
_LABEL = re.compile(r"(?:(?<=\A)|(?<=\n\n)|(?<=\. ))(Sources?|Deviations|Defaults|Default)(?: then)?: ")
_ITEM = re.compile(r"- |\d+\. ")


def reference() -> str:
    """The page."""
    lines = [INTRODUCTION]
    for heading, (group, package) in SECTIONS.items():
        chosen = {name: each for name, each in BUILT_IN[group].items() if each.__module__.startswith(package)}
        lines += [f"## {heading}", *(_entry(name, chosen[name]) for name in sorted(chosen))]
    return "\n\n".join(lines) + "\n"


def complexity(policy: type) -> str:
    """Complexity that a class's docstring states, such as ``O(n)``.

    Raises:
        ValueError: it states none.
    """
    found = _COMPLEXITY.search(" ".join((inspect.getdoc(policy) or "").split()))
    if found is None:
        raise ValueError(f"{policy.__name__}: the docstring ends without `Complexity: O(...).`")
    return found[1]


def inputs(policy: type) -> list[str]:
    """Figures behind a decision: those of the scores, those of the plan, or the fields that an admission rule reads."""
    made = policy()
    if policy.__module__.startswith("policies.offload"):
        return list(_plan_inputs(made))
    if policy.__module__.startswith("policies.admission"):
        return _fields_read(policy)
    return _score_inputs(made)


def _score_inputs(policy: RoutingPolicy) -> list[str]:
    choice = policy.choose(example_request(), FleetSnapshot(EXAMPLE, sequence=1, pinned="inst-0"))
    return sorted({name for score in choice.scores for name in score.inputs})


def _plan_inputs(planner: OffloadPlanner) -> list[str]:
    """Inputs of a plan for a heavy prompt on a fleet where every instance may hand over."""
    views = tuple(view._replace(role=Role.KV_BOTH, cached_tokens=0, kv_used_tokens=0) for view in EXAMPLE)
    plan = planner.plan(example_request(), views[0], RequestClass.HEAVY, FleetSnapshot(views))
    return list(plan.inputs)


def _fields_read(rule: type) -> list[str]:
    fields = {
        "request": RequestView._fields,
        "session": (*SessionView._fields, "resident"),
        "fleet": AdmissionView._fields,
    }
    read = {
        (node.value.id, node.attr)
        for node in ast.walk(ast.parse(inspect.getsource(rule)))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    return [f"{owner}.{name}" for owner, names in fields.items() for name in names if (owner, name) in read]


def _entry(name: str, policy: type) -> str:
    module = inspect.getmodule(policy)
    summary = " ".join((inspect.getdoc(module) or "").split("\n\n")[0].split())
    made: Any = policy()
    given = ", ".join(f"`{key}={value}`" for key, value in parameters(made).items()) or "none"
    shown = ", ".join(f"`{each}`" for each in inputs(policy)) or "none"
    path = Path(inspect.getfile(policy)).relative_to(ROOT).as_posix()
    table = [
        "| | |",
        "| --- | --- |",
        f"| parameters and defaults | {given} |",
        f"| inputs | {shown} |",
        f"| complexity | {complexity(policy)} |",
        f"| code | `{path}` |",
    ]
    return "\n\n".join([f"### `{name}`", f"*{summary}*", "\n".join(table), markdown(inspect.getdoc(policy) or "")])


def markdown(docstring: str) -> str:
    """A docstring as Markdown: one line a paragraph or item, labels in bold, without the complexity."""
    text = _COMPLEXITY.sub("", docstring).replace("``", "`")
    paragraphs = []
    for paragraph in text.strip().split("\n\n"):
        lines: list[str] = []
        for line in paragraph.splitlines():
            if not lines or _ITEM.match(line):
                lines.append(line.strip())
            else:
                lines[-1] += f" {line.strip()}"
        listed = any(_ITEM.match(line) for line in lines[1:])
        paragraphs.append("\n".join([lines[0], "", *lines[1:]] if listed and not _ITEM.match(lines[0]) else lines))
    return _LABEL.sub(lambda found: f"**{found[0].rstrip(': ')}:** ", "\n\n".join(paragraphs))
