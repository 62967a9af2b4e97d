"""Specs and plans from keys, and the mistakes in them."""

from __future__ import annotations

from typing import Any

from slurmtrain.model.experiment.plan import Plan, make_plan
from slurmtrain.model.experiment.spec import Spec, read_spec

COMMAND = {"name": "x", "command": "python train.py"}


def read(data: object) -> tuple[Spec, list[tuple[str, str]]]:
    """The spec of this content, and its mistakes: the key of each, and the message."""
    mistakes: list[tuple[str, str]] = []
    spec = read_spec(data, lambda at, message: mistakes.append((".".join(at), message)))
    return spec, mistakes


def mistakes_in(**keys: Any) -> list[tuple[str, str]]:
    """The mistakes of a small spec with these keys."""
    return read({**COMMAND, **keys})[1]


def only_mistake(**keys: Any) -> tuple[str, str]:
    """The key and the message of the only mistake of a small spec with these keys."""
    [mistake] = mistakes_in(**keys)
    return mistake


def spec(**keys: Any) -> Spec:
    """A small spec with these keys."""
    made, mistakes = read({**COMMAND, **keys})
    assert mistakes == []
    return made


def plan(*, workdir: str = "/w", python: str = "/usr/bin/python3", **keys: Any) -> Plan:
    """The plan of a small spec with these keys; ``workdir``, ``python``: of whoever submits it."""
    return make_plan(spec(**keys), workdir=workdir, python=python, template={**COMMAND, **keys})[0]
