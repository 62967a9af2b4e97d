"""The JSON Schema of specs."""

from __future__ import annotations

import re
from typing import Any

import pytest

from slurmtrain.model.experiment.kinds import keys_of
from slurmtrain.model.experiment.spec import Spec
from slurmtrain.specfile.json_schema import json_schema

SCHEMA = json_schema()


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value fits a schema, as far as this one's words go."""
    types: dict[str, Any] = {
        "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool,
        "null": type(None),
    }  # fmt: skip
    if "anyOf" in schema:
        return any(fits(value, each) for each in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    names = schema.get("type", [*types])
    names = [names] if isinstance(names, str) else names
    if not any(isinstance(value, types[name]) and (name == "boolean") == isinstance(value, bool) for name in names):
        return "type" not in schema
    if isinstance(value, dict):
        others = schema.get("additionalProperties", {})
        properties = schema.get("properties", {})
        return set(schema.get("required", ())) <= value.keys() and all(
            fits(each, properties[key]) if key in properties else others is not False and fits(each, others)
            for key, each in value.items()
        )
    if isinstance(value, list):
        return all(fits(each, schema.get("items", {})) for each in value)
    if isinstance(value, str):
        return re.search(schema.get("pattern", ""), value) is not None
    return not isinstance(value, int | float) or schema.get("minimum", value) <= value <= schema.get("maximum", value)


@pytest.mark.parametrize(
    "spec",
    [
        {"name": "x", "command": "true", "resources": {"nodes": 2, "mem": "4GB", "time": "1:00:00"}},
        {
            "command": "true",
            "params": {"lr": 0.1, "n": [1, 2]},
            "sweep": {"params.lr": [0.1, 0.3]},
            "extends": "a.yaml",
        },
        {"command": "true", "checkpoint": {"every": {"steps": 5}, "keep": 3}, "preflight": {"dns": False}},
        {"command": "true", "strategy": "fsdp", "code": None, "setup": "a\nb", "requeue": {"lead": "90s"}},
        {"command": "true", "requeue": {"max_failures": "${params.n}"}, "resources": {"gpus_per_node": "h100:4"}},
    ],
)
def test_specs_fit(spec: dict[str, Any]) -> None:
    assert fits(spec, SCHEMA)


@pytest.mark.parametrize(
    "wrong", [{"comand": "true"}, {"requeue": {"max_failures": -1}}, {"checkpoint": {"keep": "all"}}, {"seed": "x"}]
)
def test_mistakes_do_not(wrong: dict[str, Any]) -> None:
    assert not fits({"command": "true", **wrong}, SCHEMA)


def test_each_key_is_explained() -> None:
    assert SCHEMA["properties"].keys() == {*keys_of(Spec), "extends", "sweep"}
    assert all(each["description"].endswith(".") for each in SCHEMA["properties"].values())
