"""JSON schemas of the Kubernetes kinds that the chart has, out of Kubernetes' OpenAPI document.

    python -m tests.deploy.schemas SWAGGER.JSON > tests/deploy/kubernetes-1.34.schemas.json

The document is ``api/openapi-spec/swagger.json`` of Kubernetes (Apache-2.0). Unknown keys are errors, as for `kubectl
apply --validate=strict`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

KINDS = {
    "Deployment": "io.k8s.api.apps.v1.Deployment",
    "StatefulSet": "io.k8s.api.apps.v1.StatefulSet",
    "Service": "io.k8s.api.core.v1.Service",
    "ServiceAccount": "io.k8s.api.core.v1.ServiceAccount",
    "ConfigMap": "io.k8s.api.core.v1.ConfigMap",
    "Role": "io.k8s.api.rbac.v1.Role",
    "RoleBinding": "io.k8s.api.rbac.v1.RoleBinding",
    "PodDisruptionBudget": "io.k8s.api.policy.v1.PodDisruptionBudget",
}
_QUANTITY = "io.k8s.apimachinery.pkg.api.resource.Quantity"
"""The API accepts numbers too, which its document leaves out."""
_PREFIX = "#/definitions/"
_KEPT = ("type", "format", "required", "enum")


def reduced(swagger: dict[str, Any]) -> dict[str, Any]:
    """The definitions of ``KINDS`` and all that they refer to, without descriptions."""
    definitions: dict[str, Any] = {}
    waiting = list(KINDS.values())
    while waiting:
        name = waiting.pop()
        if name not in definitions:
            found = _schema(swagger["definitions"][name], waiting)
            definitions[name] = {"type": ["string", "number"]} if name == _QUANTITY else found
    return {"version": swagger["info"]["version"], "kinds": KINDS, "definitions": dict(sorted(definitions.items()))}


def _schema(found: dict[str, Any], waiting: list[str]) -> dict[str, Any]:
    if "$ref" in found:
        waiting.append(found["$ref"].removeprefix(_PREFIX))
        return {"$ref": found["$ref"]}
    if found.get("format") == "int-or-string":
        return {"type": ["integer", "string"]}
    schema = {key: found[key] for key in _KEPT if key in found}
    if "properties" in found:
        schema["properties"] = {key: _schema(each, waiting) for key, each in found["properties"].items()}
        schema["additionalProperties"] = False
    elif "additionalProperties" in found:
        schema["additionalProperties"] = _schema(found["additionalProperties"], waiting)
    if "items" in found:
        schema["items"] = _schema(found["items"], waiting)
    return schema


if __name__ == "__main__":
    json.dump(reduced(json.loads(Path(sys.argv[1]).read_text())), sys.stdout, indent=None, separators=(",", ":"))
    sys.stdout.write("\n")
