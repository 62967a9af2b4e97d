"""The JSON Schema of a spec, by which editors complete keys and mark mistakes; and the texts of its keys."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from functools import cache
from typing import Any

from slurmtrain.model.experiment.kinds import Entries, Items, Kind, Nullable, Scalar, Section, keys_of
from slurmtrain.model.experiment.resources import Components
from slurmtrain.model.experiment.spec import Spec

_URL = "https://json-schema.org/draft/2020-12/schema"
# What stands in place of any value until the spec is read.
_INTERPOLATION = {"type": "string", "pattern": r"\$\{|^\?\?\?$"}
# Keys of a file that are no keys of a plan.
_OF_FILES = {
    "extends": {"type": ["string", "array"], "description": "Files to start from: this one inherits their keys."},
    "sweep": {"type": "object", "description": "Keys to vary, each with its values: a run for each combination."},
}


def json_schema() -> dict[str, Any]:
    """The schema of a file with a spec."""
    # A file that extends another may lack what the other has.
    schema = {key: value for key, value in _section_schema(Spec).items() if key != "required"}
    return {"$schema": _URL, "title": "slurmtrain spec", **schema, "properties": {**schema["properties"], **_OF_FILES}}


@cache
def texts_of_keys(cls: type) -> Mapping[str, str]:
    """The docstrings of the fields of a dataclass, by their names."""
    texts: dict[str, str] = {}
    # Bases first, so that a field which a class defines anew has the text of that class.
    for each in reversed(cls.__mro__[:-1]):
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(definition, ast.ClassDef)
        for statement, following in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
                texts[ast.unparse(statement.target)] = inspect.cleandoc(str(ast.literal_eval(following.value)))
    return texts


def _section_schema(cls: type) -> dict[str, Any]:
    texts = texts_of_keys(cls)
    properties = {}
    for name, key in keys_of(cls).items():
        default = key.kind.write(key.default)
        noted = {} if isinstance(key.kind, Section) or key.required else {"default": default}
        properties[name] = {"description": " ".join(texts[name].split()), **noted, **_schema_of(key.kind)}
    required = [name for name, key in keys_of(cls).items() if key.required]
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return schema | ({"required": required} if required else {})


def _schema_of(kind: Kind) -> dict[str, Any]:
    """What a value may be; anything where only reading it can tell."""
    if isinstance(kind, Section):
        shorthand = getattr(kind.cls, "SHORTHAND", None)
        forms = [_section_schema(kind.cls), {"type": "null"}]
        if shorthand is not None:
            forms.append(_schema_of(keys_of(kind.cls)[shorthand].kind))
        words = getattr(kind.cls, "WORDS", ())
        forms += [{"enum": [*words, False, True]}] if words else []
        # Other forms, which expand() knows, are of any type.
        return {"anyOf": forms} if shorthand is not None or words or not hasattr(kind.cls, "expand") else {}
    if isinstance(kind, Nullable):
        inner = _schema_of(kind.kind)
        return {"anyOf": [{"type": "null"}, inner]} if inner else {}
    if isinstance(kind, Components):
        return {"anyOf": [{"type": "null"}, {"type": "array", "items": _section_schema(kind.cls)}]}
    if isinstance(kind, Entries):
        return {"type": ["object", "null"], "additionalProperties": _schema_of(kind.kind)}
    if type(kind) is Items:
        return {"type": "array", "items": _schema_of(kind.kind)}
    if isinstance(kind, Scalar) and kind.schema:
        return (
            dict(kind.schema) if kind.schema.get("type") == "string" else {"anyOf": [dict(kind.schema), _INTERPOLATION]}
        )
    return {}
