"""What to write instead of a value that is a mistake: only what a spec with it would be accepted with.

Most messages say it themselves. For the others, what may be meant is tried in the spec, then examples of what the key
takes, and whether it can be left out.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slurmtrain.model.experiment.kinds import Entries, Items, KeyPath, Nullable, Section, keys_of, read_all
from slurmtrain.model.experiment.spec import Spec
from slurmtrain.model.experiment.values import value_at
from slurmtrain.specfile.overrides import SCHEMA
from slurmtrain.system.yaml_file import parse_value, write_yaml

# How messages say what to write instead.
NAMED = re.compile(
    r"\b(?:write|use|did you mean|put it in quotes|keep one of|leave|remove|belongs (?:under|at)|set|pass it|give it"
    r"|goes into|the keys here are)\b|expected one of "
)
# Messages that say which values are right, but not which one is meant.
_BOUNDS = re.compile(r"of at least |from \d+ to |true or false|number of at least ")
# Values of keys whose kinds have no example.
_EXAMPLES: Mapping[KeyPath, object] = {
    ("command",): "python train.py",
    ("name",): "exp-1",
    ("params",): {"lr": 0.1},
    ("env",): {"NAME": "value"},
    ("slurm",): {"partition": "gpu"},
    ("after",): ["pretrain"],
    ("start_from", "run"): "pretrain",
    ("strategy", "density"): 0.01,
    ("resources", "components", "0"): {"nodes": 1},
    ("tracking", "metrics", "pattern"): r"loss=(?P<loss>\S+)",
    ("tracking", "metrics", "file"): "{run_dir}/metrics.csv",
    ("checkpoint", "keep", "best", "metric"): "loss",
    ("checkpoint", "step"): r"step(\d+)",
}
_ASSIGNED = re.compile(r"([A-Za-z_][\w.-]*)\s*[=:]\s*(.*)", re.DOTALL)
_NOTHING = frozenset({"none", "null", "unlimited", "infinite", "infinity", "inf", "no limit", ""})
# What reading a large spec again for each of many mistakes would take.
_MOST_VALUES, _MOST_MISTAKES = 2_000, 50


class Proposals:
    """Finds what to write instead of the values of a spec that are mistakes."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        """``spec``: plain data, interpolated."""
        self._spec = spec
        self._is_large = _count(spec) > _MOST_VALUES
        self._made = 0

    def add_to(self, message: str, at: KeyPath) -> str:
        """The message about a mistake at a key, with what to write instead."""
        if NAMED.search(message) or self._is_large or self._made >= _MOST_MISTAKES:
            return message
        self._made += 1
        value = value_at(self._spec, at)
        before = _mistakes(self._spec)
        for each in _repairs(value):
            if self._is_right(at, each, message, before):
                return f"{message}; write {flow(each)}"
        if _BOUNDS.search(message):
            return message
        for each in _examples(at):
            if self._is_right(at, each, message, before):
                return f"{message}; write for example {flow(each)}"
        return f"{message}; leave it out" if self._is_right(at, _ABSENT, message, before) else message

    def _is_right(self, at: KeyPath, value: object, message: str, before: set[tuple[KeyPath, str]]) -> bool:
        """Whether the spec with this value does not have this mistake, nor another one at the key."""
        after = _mistakes(_with(self._spec, at, value))
        # What conflicts with other keys is a mistake of its own.
        return (at, message) not in after and not any(path[: len(at)] == at for path, _ in after - before)


def _mistakes(spec: object) -> set[tuple[KeyPath, str]]:
    return set(read_all(Section(Spec), spec)[1])


def flow(value: object) -> str:
    """A value on a line of YAML, as a person would write it."""
    return write_yaml(value, flow=True).split("\n")[0]


def parse_or_none(text: str) -> object:
    """What a text is in YAML; None if it is nothing."""
    with contextlib.suppress(ValueError):
        return parse_value(text)
    return None


def _repairs(value: object) -> Iterator[object]:
    """What somebody may have meant who wrote a value, the likeliest first."""
    if isinstance(value, str):
        yield from _repairs_of_text(value.strip())
    elif isinstance(value, bool):
        yield from (str(value).lower(), {"enabled": value})
    elif isinstance(value, int | float):
        yield from (str(value), f"{value}GB")
        if isinstance(value, float) and value.is_integer():
            yield int(value)
        yield [value]
    elif isinstance(value, list) and value:
        words = [each if isinstance(each, str) else flow(each) for each in value]
        yield from (",".join(words), " ".join(words), words)
        yield from ([_assigned(words)] if _assigned(words) else [])
        if all(isinstance(each, Mapping) for each in value):
            yield {key: inner for each in value for key, inner in each.items()}
        if len(value) == 1:
            yield value[0]
    elif isinstance(value, Mapping) and value:
        yield [value]


def _repairs_of_text(text: str) -> Iterator[object]:
    span = re.fullmatch(r"(\d+)\s*(?:-|:|\.\.|to)\s*(\d+)", text)
    if span:
        yield {"min": int(span[1]), "max": int(span[2])}
    if text.lower() in _NOTHING:
        yield None
    if text.lower() in ("yes", "on", "true", "1", "no", "off", "false", "0"):
        yield text.lower() in ("yes", "on", "true", "1")
    if not isinstance(parsed := parse_or_none(text), str):
        yield parsed
    yield text.lower()
    words = re.split(r"\s*[,\s]\s*", text)
    yield from ([_assigned(words)] if _assigned(words) else [])
    yield words
    yield re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")


def _assigned(words: Sequence[str]) -> dict[str, str]:
    """Words such as ``A=1`` as a mapping; empty if one of them is none."""
    matches = [_ASSIGNED.fullmatch(word) for word in words]
    return {match[1]: match[2] for match in matches if match} if all(matches) else {}


def _examples(at: KeyPath) -> Iterator[object]:
    """What a key may have."""
    # Items of a list are alike.
    item = tuple("0" if key.isdecimal() else key for key in at)
    if item in _EXAMPLES:
        yield _EXAMPLES[item]
    if at in SCHEMA:
        yield from _examples_of(SCHEMA[at])
    elif len(at) > 1 and at[:-1] in SCHEMA:
        kind = SCHEMA[at[:-1]]
        yield from _examples_of(kind.kind) if isinstance(kind, Items | Entries) else ()
    yield from ("text", 1)


def _examples_of(kind: Any) -> Iterator[object]:
    kind = kind.kind if isinstance(kind, Nullable) else kind
    for text in re.findall(r"`([^`]+)`", kind.text):
        yield parse_or_none(text)
    if number := re.search(r"at least (\d+)", kind.text):
        yield max(1, int(number[1]))
    if isinstance(kind, Items):
        yield from ([each] for each in _examples_of(kind.kind))
        yield []
    elif isinstance(kind, Entries):
        yield from ({"name": each} for each in _examples_of(kind.kind))
        yield {}
    elif isinstance(kind, Section):
        for name, key in keys_of(kind.cls).items():
            if not key.required:
                yield {name: key.kind.write(key.default)}
            yield from ({name: each} for each in _examples_of(key.kind))


_ABSENT = object()


def _with(data: Any, at: KeyPath, value: object) -> Any:
    """A copy of the data with another value at a key, or without that key."""
    if not at:
        return value
    key, *below = at
    if isinstance(data, list) and key.isdecimal() and int(key) < len(data):
        inner = _with(data[int(key)], tuple(below), value)
        return [*data[: int(key)], *([] if inner is _ABSENT else [inner]), *data[int(key) + 1 :]]
    section = dict(data) if isinstance(data, Mapping) else {}
    inner = _with(section.get(key), tuple(below), value)
    section.pop(key, None) if inner is _ABSENT else section.__setitem__(key, inner)
    return section


def _count(value: object) -> int:
    if isinstance(value, Mapping):
        return sum(map(_count, value.values())) + 1
    return sum(map(_count, value)) + 1 if isinstance(value, list) else 1
