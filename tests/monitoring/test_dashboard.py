"""The Grafana dashboard: as generated, of the form that Grafana imports, with queries that Prometheus can parse.

No real Grafana loads it: Debian and PyPI have no server package, and the Go module of the server is not served by the
module proxy. Its form is checked against a schema of the parts of Grafana's JSON model that it uses.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.monitoring import dashboard
from tests.monitoring.names import known_metrics, metrics_in
from tests.monitoring.test_alerts import PROMTOOL, needs_promtool

MODEL: dict[str, Any] = json.loads(dashboard.PATH.read_text(encoding="utf-8"))
PANELS = [panel for panel in MODEL["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]

_TEXT = {"type": "string", "minLength": 1}
_SOURCE = {
    "type": "object",
    "required": ["type", "uid"],
    "properties": {"type": {"const": "prometheus"}, "uid": {"const": "${datasource}"}},
    "additionalProperties": False,
}
_PLACE = {
    "type": "object",
    "required": ["x", "y", "w", "h"],
    "properties": {
        "x": {"type": "integer", "minimum": 0, "maximum": 23},
        "y": {"type": "integer", "minimum": 0},
        "w": {"type": "integer", "minimum": 1, "maximum": 24},
        "h": {"type": "integer", "minimum": 1},
    },
    "additionalProperties": False,
}
_ROW = {
    "type": "object",
    "required": ["id", "type", "title", "collapsed", "gridPos", "panels"],
    "properties": {
        "id": {"type": "integer", "minimum": 1},
        "type": {"const": "row"},
        "title": _TEXT,
        "collapsed": {"type": "boolean"},
        "gridPos": _PLACE,
        "panels": {"type": "array", "maxItems": 0},
    },
    "additionalProperties": False,
}
_PANEL = {
    "type": "object",
    "required": ["id", "type", "title", "datasource", "gridPos", "fieldConfig", "options", "targets"],
    "properties": {
        "id": {"type": "integer", "minimum": 1},
        "type": {"enum": ["timeseries", "stat"]},
        "title": _TEXT,
        "description": {"type": "string"},
        "datasource": _SOURCE,
        "gridPos": _PLACE,
        "fieldConfig": {
            "type": "object",
            "required": ["defaults", "overrides"],
            "properties": {
                "defaults": {
                    "type": "object",
                    "properties": {"unit": {"enum": ["short", "s", "reqps", "percentunit"]}, "min": {"const": 0}},
                },
                "overrides": {"type": "array"},
            },
        },
        "options": {"type": "object"},
        "targets": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["refId", "expr", "legendFormat", "datasource"],
                "properties": {
                    "refId": {"type": "string", "pattern": "^[A-Z]$"},
                    "expr": _TEXT,
                    "legendFormat": _TEXT,
                    "datasource": _SOURCE,
                },
                "additionalProperties": False,
            },
        },
    },
    "additionalProperties": False,
}
SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "required": ["uid", "title", "schemaVersion", "panels", "templating", "time", "refresh", "annotations"],
    "properties": {
        "uid": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,40}$"},
        "title": _TEXT,
        "schemaVersion": {"type": "integer", "minimum": 36},
        "time": {"type": "object", "required": ["from", "to"]},
        "refresh": {"type": "string", "pattern": "^[0-9]+[smh]$"},
        "templating": {
            "type": "object",
            "required": ["list"],
            "properties": {
                "list": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["name", "type", "query"],
                        "properties": {"name": _TEXT, "type": {"enum": ["datasource", "query"]}},
                    },
                }
            },
        },
        "annotations": {"type": "object", "required": ["list"]},
        "panels": {"type": "array", "minItems": 1, "items": {"oneOf": [_ROW, _PANEL]}},
    },
}


def test_the_file_is_as_generated() -> None:
    """After changing the table: ``make reference``."""
    assert dashboard.PATH.read_text(encoding="utf-8") == dashboard.text()


def test_it_has_the_form_that_grafana_imports() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(MODEL, SCHEMA)
    ids = [panel["id"] for panel in MODEL["panels"]]
    assert len(set(ids)) == len(ids)
    rows = [panel["title"] for panel in MODEL["panels"] if panel["type"] == "row"]
    assert rows == ["Overview", "Latency", "Routing", "Cache", "Admission", "Hand-off", "Engines"]


def test_the_schema_rejects_a_panel_that_grafana_could_not_show() -> None:
    broken = json.loads(json.dumps(MODEL))
    next(panel for panel in broken["panels"] if panel["type"] == "stat")["targets"] = []
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, SCHEMA)


def test_no_panel_covers_another_and_none_is_wider_than_the_grid() -> None:
    places = [panel["gridPos"] for panel in MODEL["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in itertools.combinations(places, 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, (one, other)


def test_queries_read_metrics_that_exist_and_variables_that_are_defined() -> None:
    defined = {variable["name"] for variable in MODEL["templating"]["list"]} | {"__rate_interval"}
    for query in QUERIES:
        names = metrics_in(query)
        assert names or "ALERTS" in query, query
        assert names <= known_metrics(), (query, names - known_metrics())
        assert set(re.findall(r"\$\{?(\w+)", query)) <= defined, query


@needs_promtool
def test_queries_are_valid_promql(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:query:{number}", "expr": query.replace("$__rate_interval", "1m").replace("$", "")}
        for number, query in enumerate(QUERIES)
    ]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}), encoding="utf-8")
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "check", "rules", path], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
