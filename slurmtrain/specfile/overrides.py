"""What the command line sets (``a.b=c``), and the place that each value of a plan, and each mistake, comes from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurmtrain.errors import Mistake, SpecError
from slurmtrain.model.experiment.kinds import (
    Entries,
    KeyPath,
    Scalar,
    Section,
    hint_for_unknown_key,
    read_all,
    suggestion,
    walk_keys,
)
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.experiment.spec import Spec, write_spec
from slurmtrain.model.experiment.sweep import WORDS, Point
from slurmtrain.model.experiment.sweep_values import is_expression
from slurmtrain.model.experiment.values import value_at
from slurmtrain.model.urls import without_url_passwords
from slurmtrain.specfile.recordable import redact_assignment
from slurmtrain.system.yaml_file import YamlDocument, parse_value, write_yaml

# The kind of each key of a spec.
SCHEMA = {path: key.kind for path, key in walk_keys(Spec)}


@dataclass(frozen=True, slots=True)
class Override:
    """One ``a.b=c``: ``path`` and ``value`` parsed, ``text`` as it may be recorded, without a secret."""

    path: KeyPath
    value: Any
    text: str


def parse_overrides(texts: Sequence[str], data: Mapping[str, Any]) -> tuple[list[Override], list[Mistake]]:
    """The valid overrides among ``texts`` for a spec that holds ``data``, and the mistakes in the others."""
    return _parse_all(texts, data, multiple=False)


def parse_sweeps(texts: Sequence[str], data: Mapping[str, Any]) -> tuple[list[Override], list[Mistake]]:
    """As :func:`parse_overrides`, for ``a.b=1,2,3``: the value of each is a list, or text that stands for one.

    Words of the section ``sweep`` have the value that they would have there: ``samples=20``.
    """
    return _parse_all(texts, data, multiple=True)


def override_for_value(key: str, value: Any) -> Override:
    """The override that sets the key of a sweep to one of its values."""
    # In flow style the value of a list or a mapping is one line, as a person would type it.
    flow = str(value) if type(value) is int else write_yaml(value, flow=True).splitlines()[0]
    return Override(tuple(key.split(".")), value, redact_assignment(key, value if isinstance(value, str) else flow))


def apply_overrides(overrides: Sequence[Override], data: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the data with these overrides applied; later ones win."""
    result: dict[str, Any] = dict(data)
    for override in overrides:
        path, value = whole_value(override)
        section = result
        # The mappings around the value are copied, and shorthands on the way become sections.
        for length, key in enumerate(path[:-1], 1):
            inside, kind = section.get(key), SCHEMA.get(path[:length])
            if isinstance(kind, Section):
                inside = kind.expand(inside)
            section[key] = dict(inside) if isinstance(inside, Mapping) else {}
            section = section[key]
        section[path[-1]] = value
    return result


def check_path(path: KeyPath, data: Mapping[str, Any], *, adds: bool = False) -> None:
    """Raise ValueError unless an override may set this key.

    Args:
        path: The key. It must be in the schema; a parameter must also be in the file, so that a typo does not add one.
        data: The file's contents.
        adds: Whether the override begins with ``+``, which may add a parameter.
    """
    if path[0] == "sweep":
        raise ValueError("a sweep is varied with --sweep key=value,value")
    for length in range(1, len(path) + 1):
        kind = SCHEMA.get(path[:length])
        if kind is None:
            params, siblings = data.get("params"), [key[-1] for key in SCHEMA if key[:-1] == path[: length - 1]]
            is_param = length == 1 and isinstance(params, Mapping) and path[0] in params
            near = f"; did you mean 'params.{path[0]}'?" if is_param else ""
            hint = near or hint_for_unknown_key(path[:length], siblings).text
            raise ValueError(f"there is no key {'.'.join(path[:length])!r}{hint}")
        # Below a mapping with free names any key is allowed: names are checked when the spec is read.
        if isinstance(kind, Entries):
            inside, key = value_at(data, path[:-1]), path[-1]
            is_there = isinstance(inside, Mapping) and key in inside
            if path[:length] == ("params",) and not adds and not is_there:
                near = suggestion(key, map(str, inside)) if isinstance(inside, Mapping) else ""
                whole = ".".join(path)
                raise ValueError(f"there is no {whole!r} in the spec{near}; +{whole}=... adds a new parameter")
            return
        if not isinstance(kind, Section):
            # One level below a value may be right, as in checkpoint.every.steps; two never are.
            if isinstance(kind, Scalar) and length < len(path) - 1:
                raise ValueError(f"{'.'.join(path[:length])!r} has no key {path[length]!r}")
            return


def _parse_all(
    texts: Sequence[str], data: Mapping[str, Any], *, multiple: bool
) -> tuple[list[Override], list[Mistake]]:
    overrides, mistakes = [], []
    # Written with blanks, "params.lr = 0.1" is three arguments, but one mistake.
    scattered = [text for text in texts if "=" not in text or text.startswith("=")]
    if scattered:
        example = "params.lr=0.1,0.3" if multiple else "resources.nodes=2"
        where = f"command line ({' '.join(scattered)})"
        mistakes.append(Mistake(where, "", f"expected key=value without blanks, for example {example}"))
    for text in texts:
        if text in scattered:
            continue
        key, _, raw = text.partition("=")
        # Redacted in error messages too: they end up in logs.
        shown = redact_assignment(key, raw) if "=" in text else text
        try:
            overrides.append(_parse_override(text, shown, data, multiple=multiple))
        except ValueError as error:
            mistakes.append(Mistake(f"command line ({shown})", "", str(error)))
    return overrides, mistakes


def _parse_override(text: str, shown: str, data: Mapping[str, Any], *, multiple: bool) -> Override:
    key, equals, raw = text.partition("=")
    if not equals or not key.strip():
        raise ValueError("expected key=value, for example resources.nodes=2")
    path = tuple(key.removeprefix("+").strip().split("."))
    if multiple and key.strip() in WORDS:
        return Override(path, parse_value(raw), shown.strip())
    check_path(path, data, adds=key.startswith("+"))
    if not multiple:
        value = parse_value(raw)
        if isinstance(value, str) and (problem := _problem_of_several(path, value, key.strip(), raw.strip(), data)):
            raise ValueError(problem)
        return Override(path, value, shown.strip())
    # The values are a list, or a text such as range(5) that stands for one.
    with contextlib.suppress(ValueError):
        if is_expression(whole := parse_value(raw)):
            return Override(path, whole, shown.strip())
    # The brackets may be omitted: "1,2,3" is easier to type in a shell than "[1, 2, 3]".
    value = parse_value(raw if raw.strip().startswith("[") else f"[{raw}]")
    return Override(path, value if isinstance(value, list) else [value], shown.strip())


def _problem_of_several(path: KeyPath, value: str, key: str, raw: str, data: Mapping[str, Any]) -> str:
    """What to write instead of ``0.1,0.3`` for a key that has, or can only have, one number, or true or false.

    In quotes of its own it is meant as text. Empty if it is right.
    """
    parts = [] if raw[0] in "\"'" else raw.split(",")
    try:
        values = [parse_value(part) for part in parts]
    except ValueError:
        return ""
    if len(values) < 2 or not all(isinstance(each, bool | int | float) for each in values):
        return ""
    has_one = isinstance(value_at(data, path), bool | int | float)
    if not has_one and not (path in SCHEMA and read_all(SCHEMA[path], value, path)[1]):
        return ""
    if not has_one and any(read_all(SCHEMA[path], each, path)[1] for each in values):
        return ""
    ways = [f"for a run with each: --sweep {'.'.join(path)}={raw}"]
    if path[0] == "params":
        ways.append(f"for a list: '{key}=[{raw}]'")
    if path not in SCHEMA:
        ways.append(f"""for the text: {key}="'{raw}'\"""")
    return f"the spec has a single value here, and {raw} could be several; {'; '.join(ways)}"


def whole_value(override: Override) -> tuple[KeyPath, Any]:
    """The key and value that an override sets: ``checkpoint.every.steps=5`` sets all of ``checkpoint.every``.

    A key that is not a section has one value as a whole: ``{steps: 5}`` must not be merged with ``{minutes: 3}``.
    """
    for length in range(1, len(override.path)):
        kind = SCHEMA.get(override.path[:length])
        if kind is not None and not isinstance(kind, Section | Entries):
            value = override.value
            for key in reversed(override.path[length:]):
                value = {key: value}
            return override.path[:length], value
    return override.path, override.value


class Mistakes:
    """Collects mistakes, and finds the line or the argument of each."""

    def __init__(self, document: YamlDocument, overrides: Sequence[Override], swept: Sequence[Override] = ()) -> None:
        """Places are in ``document``, or in arguments: ``overrides``, and the keys to vary, ``swept``."""
        self._document = document
        self._mistakes = list(document.mistakes)
        self._overrides = overrides
        self._swept = {".".join(override.path): override for override in swept}
        self._point: Point = {}

    def __bool__(self) -> bool:
        return bool(self._mistakes)

    def set_point(self, point: Point) -> None:
        """Note what the sweep sets in this run: a mistake in such a value is reported where the sweep has it."""
        self._point = point

    def add(self, path: KeyPath, message: str) -> None:
        """Add a mistake at a key, unless another run of the sweep has it already, or its value cannot even be read."""
        key_path, in_sweep = path, path[:1] == ("sweep",)
        for key, swept in () if in_sweep else self._point.items():
            if _are_nested(path, tuple(key.split("."))):
                key_path, in_sweep = ("sweep", *swept.at), True
                break
        if path == ("sweep",) and self._swept:
            where = "command line (--sweep)"
        elif in_sweep:
            varied = self._swept.get(key_path[1]) if len(key_path) > 1 else None
            where = f"command line ({varied.text})" if varied else self._document.place_of(key_path)
        else:
            override = next((each for each in self._overrides if _are_nested(path, each.path)), None)
            where = f"command line ({override.text})" if override else self._document.place_of(path)
        key = "" if where.startswith("command line") and path[:1] == ("sweep",) else ".".join(path)
        mistake = Mistake(where, key, without_url_passwords(message))
        # A value that is not YAML is told by its document, and is None here.
        unread = any((where, mistake.key) == (other.where, other.key) for other in self._document.mistakes)
        if not unread and mistake not in self._mistakes:
            self._mistakes.append(mistake)

    def add_all(self, mistakes: Iterable[tuple[KeyPath, str]]) -> None:
        """Add ``mistakes`` by key."""
        for path, message in mistakes:
            self.add(path, message)

    def add_from_command_line(self, mistakes: Iterable[Mistake]) -> None:
        """Add mistakes that already name their place."""
        self._mistakes.extend(mistakes)

    def raise_if_any(self) -> None:
        """Raise SpecError if there is any mistake, with all of them in the order of the file."""
        if self._mistakes:
            raise SpecError(self.sorted())

    def sorted(self) -> list[Mistake]:
        """All of them, in the order of the file."""
        return sorted(self._mistakes, key=self._order)

    def _order(self, mistake: Mistake) -> tuple[bool, bool, str, int]:
        """Mistakes in the spec's own file come first, then in files that it extends, then on the command line."""
        if mistake.where.startswith("command line"):
            return True, True, "", 0
        # At the last colon: the name of a file may have colons itself.
        file, _, line = mistake.where.rpartition(":")
        return False, file != self._document.name, file, int(line)


def _are_nested(path: KeyPath, other: KeyPath) -> bool:
    """Whether two keys are the same, or one is in the section of the other."""
    length = min(len(path), len(other))
    return length > 0 and path[:length] == other[:length]


@dataclass(frozen=True, slots=True)
class ValueSource:
    """Where a value of a plan comes from.

    ``key``: key of the value, with dots. ``origin``: ``file``, ``override``, ``sweep``, ``default``, or ``derived``
    from other values. ``place``: ``FILE:LINE``, or the argument of the command line, without secrets; empty for
    defaults and derived values.
    """

    key: str
    value: Any
    origin: str
    place: str = ""

    def __str__(self) -> str:
        if self.origin == "sweep":
            return f"sweep, {self.place}"
        return self.place or self.origin


@dataclass(frozen=True, slots=True)
class SpecInputs:
    """The inputs that the plans of a spec were made from.

    ``document``: the file, with all that it extends. ``overrides``, ``swept``: from the command line.
    """

    document: YamlDocument
    overrides: Sequence[Override]
    swept: Sequence[Override]

    def sources(self, plan: Plan, point: Point) -> list[ValueSource]:
        """The source of each value of a plan, in the order of the plan.

        Args:
            plan: the plan.
            point: what the sweep sets in it.
        """
        # Below, "plan" stands for the default of a key that has none, since no value equals it.
        defaults = dict(_plain_leaves(write_spec(Spec()), ()))
        return [
            ValueSource(".".join(path), value, *self._source(path, point, is_default=defaults.get(path, plan) == value))
            for path, value in _plain_leaves(plan.content, ())
        ]

    def _source(self, path: KeyPath, point: Point, *, is_default: bool) -> tuple[str, str]:
        """The origin and the place of a value."""
        unset = ("default" if is_default else "derived", "")
        # In the order of _plan_all(): the sweep wins over overrides, and these over the file; the last of a kind wins.
        for key, swept in reversed(list(point.items())):
            at, value = whole_value(Override(tuple(key.split(".")), swept.value, ""))
            if path[: len(at)] == at:
                varied = (f"command line ({each.text})" for each in self.swept if ".".join(each.path) == swept.at[0])
                place = next(varied, None) or self.document.place_of(("sweep", *swept.at))
                return ("sweep", place) if _written_key(value, at, path) else unset
        for override in reversed(self.overrides):
            at, value = whole_value(override)
            if path[: len(at)] == at:
                return ("override", f"command line ({override.text})") if _written_key(value, at, path) else unset
        written = _written_key(self.document.data, (), path)
        return ("file", self.document.place_of(written)) if written else unset


def _plain_leaves(content: Mapping[str, Any], at: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """The values of a plan that are no sections, with their keys; a list is one value."""
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from _plain_leaves(value, (*at, key))
        else:
            yield (*at, key), value


def _written_key(value: Any, at: KeyPath, path: KeyPath) -> KeyPath:
    """The key, as written, that sets ``path``, or of what stands for the section around it; empty: none does.

    Args:
        value: what is written.
        at: the key of ``value``.
        path: what is looked for, at or below ``at``.
    """
    inside = path[len(at) :]
    if not inside:
        return at
    if isinstance(value, Mapping):
        return _written_key(value[inside[0]], (*at, inside[0]), path) if inside[0] in value else ()
    kind = SCHEMA.get(at)
    if isinstance(kind, Section):
        expanded = kind.expand(value)
        return at if isinstance(expanded, Mapping) and inside[0] in expanded else ()
    return at if value is not None else ()
