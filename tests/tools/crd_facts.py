"""Reduce a CustomResourceDefinition to a small JSON Schema: names, types, required members and allowed values.

Pod templates become {"x-pod-template": true}, since kubernetes-validate has the schemas of the core kinds. Descriptions are
removed. The result is stored under tests/support/kubernetes with the source of the definition.

    python tests/tools/crd_facts.py CRD.yaml SOURCE > tests/support/kubernetes/NAME.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

KEPT = ("type", "enum", "required", "pattern", "minimum", "maximum", "minLength", "maxLength", "format")
INT_OR_STRING = "x-kubernetes-int-or-string"


def main(definition: Path, source: str) -> None:
    """Print the schema of the stored version."""
    spec = yaml.safe_load(definition.read_text())["spec"]
    version = next(one for one in spec["versions"] if one["storage"])
    facts = {
        "source": source,
        "licence": "Apache-2.0",
        "group": spec["group"],
        "kind": spec["names"]["kind"],
        "version": version["name"],
        "schema": reduced(version["schema"]["openAPIV3Schema"]),
    }
    print(json.dumps(facts, separators=(",", ":"), sort_keys=True))


def reduced(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema without descriptions, pod templates and status."""
    if _is_pod(schema):
        return {"x-pod-template": True}
    kept: dict[str, Any] = {name: schema[name] for name in KEPT if name in schema}
    if schema.get(INT_OR_STRING):
        kept["type"] = ["integer", "string"]
    if "items" in schema:
        kept["items"] = reduced(schema["items"])
    more = schema.get("additionalProperties")
    if "properties" in schema:
        own = {name: one for name, one in schema["properties"].items() if name not in ("status", "metadata")}
        kept["properties"] = {name: reduced(one) for name, one in own.items()}
        if "metadata" in schema["properties"]:
            kept["properties"]["metadata"] = {"type": "object"}
        kept["additionalProperties"] = False
    elif isinstance(more, dict):
        kept["additionalProperties"] = reduced(more)
    return kept


def _is_pod(schema: dict[str, Any]) -> bool:
    return "containers" in schema.get("properties", {}).get("spec", {}).get("properties", {})


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
