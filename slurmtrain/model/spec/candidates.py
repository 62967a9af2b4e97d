"""What can come next in an override ``key=value`` that is being typed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slurmtrain.model.spec.kinds import Section, walk_keys
from slurmtrain.model.spec.sbatch import PASSED
from slurmtrain.model.spec.spec import Spec

# Kinds describe the words that they take like this.
_WORD = re.compile(r"`([^`]+)`")


def complete_override(begun: str, spec: Mapping[str, Any]) -> list[str]:
    """Keys of the spec that begin so, or values of a key; a section is completed first, and its keys then.

    A key ends in ``=``, and a section in a dot.

    Args:
        begun: What has been typed.
        spec: The spec that is overridden, as read from YAML: what its free sections such as ``params`` hold.
    """
    key, equals, _ = begun.partition("=")
    keys = _keys(spec)
    if equals:
        return [f"{key}={word}" for word in keys.get(key, ()) if f"{key}={word}".startswith(begun)]
    depth = begun.count(".")
    steps = {_step(parts, depth) for name in keys if len(parts := name.split(".")) > depth}
    return sorted(step for step in steps if step.startswith(begun))


def _step(parts: Sequence[str], depth: int) -> str:
    """The beginning of a key with these ``parts``, as long as one with ``depth`` dots."""
    return ".".join(parts[: depth + 1]) + ("=" if len(parts) == depth + 1 else ".")


def _keys(spec: Mapping[str, Any]) -> dict[str, list[str]]:
    """All dotted keys that can be set, each with the words that it takes, if these are few."""
    keys = {}
    for path, key in walk_keys(Spec):
        kind = key.kind
        if not isinstance(kind, Section):
            keys[".".join(path)] = ["true", "false"] if "true or false" in kind.text else _WORD.findall(kind.text)
    keys |= {f"slurm.{option.replace('-', '_')}": [] for option in PASSED}
    keys |= {key: [] for key in _leaves(spec)}
    # Of params that are known, one is changed rather than all.
    sections = {key.rpartition(".")[0] for key in keys}
    return {key: words for key, words in keys.items() if key not in sections}


def _leaves(section: Mapping[Any, Any], prefix: str = "") -> Iterator[str]:
    for name, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
