"""From a YAML file and overrides to Plans, with every mistake found at once, each with its file and line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from slurmtrain.errors import Mistake, SpecError
from slurmtrain.model.fields import Entries, Scalar, Section, suggestion
from slurmtrain.model.plan import REDACTED, Plan, make_plan
from slurmtrain.model.spec import check_name, is_secret_variable, read_spec, walk_keys
from slurmtrain.model.sweep import check_sweep, expand
from slurmtrain.system.yamlfile import Document, parse_yaml, read_text, scalar_loader

KeyPath = tuple[str, ...]
_SCHEMA = dict(walk_keys())


@dataclass(frozen=True, slots=True)
class Override:
    """One ``a.b=c``: ``path`` and ``value`` parsed, ``text`` as it may be recorded (a secret is left out)."""

    path: KeyPath
    value: Any
    text: str


@dataclass(frozen=True, slots=True)
class Planned:
    """One run to be: its plan, what was said beside the file, and what must not be written anywhere."""

    plan: Plan
    overrides: tuple[str, ...]
    secrets: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SpecFile:
    """All runs of a spec, and its text with secrets left out."""

    text: str
    runs: tuple[Planned, ...]


class _Mistakes:
    """Collects mistakes and knows where each key was written."""

    def __init__(self, document: Document, overrides: Sequence[Override]) -> None:
        self.found = [(int(mistake.where.rpartition(":")[2]), mistake) for mistake in document.mistakes]
        self._document = document
        self._overrides = overrides

    def add(self, path: KeyPath, message: str) -> None:
        line, where = self._locate(path)
        mistake = Mistake(where, ".".join(path), message)
        if all(mistake != known for _, known in self.found):
            self.found.append((line, mistake))

    def extend(self, mistakes: Iterable[Mistake]) -> None:
        self.found.extend((0, mistake) for mistake in mistakes)

    def check(self) -> None:
        """Raise SpecError if there is any mistake, in the order of the file."""
        if self.found:
            raise SpecError([mistake for _, mistake in sorted(self.found, key=lambda pair: pair[0])])

    def _locate(self, path: KeyPath) -> tuple[int, str]:
        for override in self._overrides:
            if path[: len(override.path)] == override.path:
                return 1 << 30, f"command line ({override.text})"
        line = self._document.line_of(path)
        return line, f"{self._document.name}:{line}"


def load_spec(
    path: Path, overrides: Sequence[str] = (), sweep: Sequence[str] = (), *, cwd: Path, python: str
) -> SpecFile:
    """Read a spec file, apply ``a.b=c`` overrides and ``a.b=1,2,3`` sweeps, and resolve every run.

    ``cwd`` is where ``workdir`` counts from, ``python`` what the word ``python`` in a command stands for. Raises
    PlaceError for a file that cannot be read and SpecError with all mistakes otherwise.
    """
    text = read_text(path)
    document = parse_yaml(text, str(path))
    runs = _plan_all(document, overrides, sweep, default_name=path.stem, cwd=cwd, python=python)
    return SpecFile(text=_without_secrets(text, document), runs=runs)


def replan(plan: Plan, overrides: Sequence[str]) -> Planned:
    """The plan of a run's next attempt: the old one with overrides. Raises SpecError with all mistakes.

    Interpolations are evaluated again, so that ``--steps ${params.steps}`` follows ``params.steps=400``.
    """
    if not overrides:
        return Planned(plan, (), {})
    document = Document("plan.json", dict(plan.template))
    [planned] = _plan_all(document, overrides, (), default_name=None, cwd=Path(plan.workdir), python=plan.python)
    if planned.plan.spec.name != plan.spec.name:
        raise SpecError([Mistake("command line", "name", "a run keeps its name; submit a new run instead")])
    workdir = planned.plan.workdir if planned.plan.spec.workdir != plan.spec.workdir else plan.workdir
    return replace(planned, plan=replace(planned.plan, workdir=workdir))


def _plan_all(
    document: Document,
    override_texts: Sequence[str],
    sweep_texts: Sequence[str],
    *,
    default_name: str | None,
    cwd: Path,
    python: str,
) -> tuple[Planned, ...]:
    data = dict(document.data)
    overrides, wrong = _parse_all(override_texts, data, multiple=False)
    swept, wrong_too = _parse_all(sweep_texts, data, multiple=True)
    mistakes = _Mistakes(document, [*overrides, *swept])
    mistakes.extend([*wrong, *wrong_too])
    sweep = _sweep_of(data, swept, mistakes)
    if default_name is not None and "name" not in data:
        data["name"] = _name_from_file(default_name, mistakes)
    runs = []
    for combination in expand(sweep):
        varied = [_parse_value(key, value) for key, value in combination.items()]
        template = _merge(data, [*overrides, *varied], mistakes)
        resolved, skip = _resolve(template, mistakes)
        spec = read_spec(resolved, lambda at, message: None if at in skip else mistakes.add(at, message))  # noqa: B023
        if not mistakes.found:
            workdir = (cwd / Path(spec.workdir or ".").expanduser()).resolve()
            plan, secrets = make_plan(spec, workdir=str(workdir), python=python, template=template)
            runs.append(Planned(plan, tuple(o.text for o in [*overrides, *varied]), secrets))
    mistakes.check()
    return tuple(runs)


def _name_from_file(stem: str, mistakes: _Mistakes) -> str:
    try:
        check_name(stem)
    except ValueError as error:
        mistakes.add(("name",), f"the file's name is not fit to name the run ({error}); set 'name'")
    return stem


# --- overrides and sweeps -------------------------------------------------------------------------------------------


def _parse_all(
    texts: Sequence[str], data: Mapping[str, Any], *, multiple: bool
) -> tuple[list[Override], list[Mistake]]:
    overrides, wrong = [], []
    for text in texts:
        try:
            overrides.append(_parse_override(text, data, multiple=multiple))
        except ValueError as error:
            wrong.append(Mistake(f"command line ({_redact(text)})", "", str(error)))
    return overrides, wrong


def _parse_override(text: str, data: Mapping[str, Any], *, multiple: bool) -> Override:
    key, equals, raw = text.partition("=")
    if not equals or not key.strip():
        raise ValueError("expected key=value, for example resources.nodes=2")
    adds = key.startswith("+")
    path = tuple(key.removeprefix("+").strip().split("."))
    _check_path(path, data, adds=adds)
    value = _parse_list(raw) if multiple else _parse_scalar(raw)
    return Override(path, value, _redact(text.strip()))


def _parse_scalar(raw: str) -> Any:
    try:
        return yaml.load(raw, Loader=scalar_loader())  # noqa: S506 (a SafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"the value is not YAML: {' '.join(str(error).split())}") from None


def _parse_list(raw: str) -> list[Any]:
    value = _parse_scalar(raw if raw.strip().startswith("[") else f"[{raw}]")
    return value if isinstance(value, list) else [value]


def _parse_value(key: str, value: Any) -> Override:
    shown = (
        value
        if isinstance(value, str)
        else yaml.safe_dump(value, default_flow_style=True, width=10_000).splitlines()[0]
    )
    return Override(tuple(key.split(".")), value, _redact(f"{key}={shown}"))


def _redact(text: str) -> str:
    key, equals, _ = text.partition("=")
    path = key.removeprefix("+").split(".")
    return f"{key}={REDACTED}" if equals and path[0] == "env" and is_secret_variable(path[-1]) else text


def _check_path(path: KeyPath, data: Mapping[str, Any], *, adds: bool) -> None:
    """Raise ValueError unless an override may set this key: it is in the schema, or it is written in the file."""
    if path[0] == "sweep":
        raise ValueError("a sweep is varied with --sweep key=value,value")
    for length in range(1, len(path) + 1):
        field = _SCHEMA.get(path[:length])
        if field is None:
            siblings = [known[-1] for known in _SCHEMA if known[:-1] == path[: length - 1]]
            raise ValueError(f"there is no key {'.'.join(path[:length])!r}{suggestion(path[length - 1], siblings)}")
        kind = field.metadata["kind"]
        if isinstance(kind, Entries):
            if path[:length] == ("params",) and not adds:
                _check_written(path, data)
            return
        if not isinstance(kind, Section):
            if isinstance(kind, Scalar) and length < len(path) - 1:
                raise ValueError(f"{'.'.join(path[:length])!r} has no key {path[length]!r}")
            return


def _check_written(path: KeyPath, data: Mapping[str, Any]) -> None:
    inside: Any = data
    for depth, key in enumerate(path):
        if not isinstance(inside, Mapping) or key not in inside:
            near = suggestion(key, map(str, inside)) if isinstance(inside, Mapping) else ""
            here = ".".join(path[: depth + 1])
            raise ValueError(f"there is no {here!r} in the spec{near}; +{'.'.join(path)}=... adds a new parameter")
        inside = inside[key]


def _sweep_of(data: dict[str, Any], swept: Sequence[Override], mistakes: _Mistakes) -> dict[str, list[Any]]:
    """The sweep of file and command line together; the command line wins key by key."""
    written = data.pop("sweep", None) or {}
    for key, message in check_sweep(written):
        mistakes.add(("sweep", key) if key else ("sweep",), message)
    if not isinstance(written, Mapping):
        return {}
    for key in written:
        try:
            _check_path(tuple(str(key).split(".")), data, adds=False)
        except ValueError as error:
            mistakes.add(("sweep", str(key)), str(error))
    sweep = {str(key): values for key, values in written.items() if isinstance(values, list) and values}
    sweep.update({".".join(override.path): override.value for override in swept})
    return sweep


# --- interpolation --------------------------------------------------------------------------------------------------


def _merge(data: Mapping[str, Any], overrides: Sequence[Override], mistakes: _Mistakes) -> dict[str, Any]:
    """The spec with its overrides, interpolations left as they are written."""
    config = OmegaConf.create({})
    for path, value in [*(((key,), value) for key, value in data.items()), *map(_nested, overrides)]:
        try:
            OmegaConf.update(config, ".".join(path), _shielded(path, value), merge=False, force_add=True)
        except OmegaConfBaseException as error:
            mistakes.add(path, _reason(error))
    merged: dict[str, Any] = _unshielded(OmegaConf.to_container(config, resolve=False))
    return merged


def _shielded(path: KeyPath, value: Any) -> Any:
    """``setup`` holds shell, where ``${NAME}`` is the shell's own: it passes omegaconf as bytes, uninterpreted."""
    if path[0] == "setup" and isinstance(value, list):
        return [line.encode() if isinstance(line, str) else line for line in value]
    return value


def _unshielded(merged: Any) -> Any:
    if isinstance(merged.get("setup"), list):
        merged["setup"] = [line.decode() if isinstance(line, bytes) else line for line in merged["setup"]]
    return merged


def _resolve(template: Mapping[str, Any], mistakes: _Mistakes) -> tuple[dict[str, Any], set[KeyPath]]:
    """Interpolate. Returns plain data, and the keys whose interpolation failed (already reported)."""
    failed: set[KeyPath] = set()
    config = OmegaConf.create({key: value for key, value in template.items() if key != "setup"})
    resolved = _resolved(config, (), mistakes, failed)
    return {**resolved, **{key: template[key] for key in template if key == "setup"}}, failed


def _nested(override: Override) -> tuple[KeyPath, Any]:
    """``checkpoint.every.steps=5`` replaces the whole value of ``checkpoint.every``, which is one value."""
    for length in range(1, len(override.path)):
        field = _SCHEMA.get(override.path[:length])
        if field is not None and not isinstance(field.metadata["kind"], Section | Entries):
            value = override.value
            for key in reversed(override.path[length:]):
                value = {key: value}
            return override.path[:length], value
    return override.path, override.value


def _resolved(node: Any, at: KeyPath, mistakes: _Mistakes, failed: set[KeyPath]) -> Any:
    if isinstance(node, DictConfig):
        return {str(key): _resolved_child(node, key, (*at, str(key)), mistakes, failed) for key in node}
    if isinstance(node, ListConfig):
        return [_resolved_child(node, i, (*at, str(i)), mistakes, failed) for i in range(len(node))]
    return node


def _resolved_child(node: Any, key: Any, at: KeyPath, mistakes: _Mistakes, failed: set[KeyPath]) -> Any:
    try:
        if OmegaConf.is_missing(node, key):
            mistakes.add(at, "'???' marks a value that must be given; give it here or as key=value")
            failed.add(at)
            return None
        return _resolved(node[key], at, mistakes, failed)
    except OmegaConfBaseException as error:
        mistakes.add(at, _reason(error))
        failed.add(at)
    except RecursionError:
        mistakes.add(at, "the interpolation refers to itself")
        failed.add(at)
    return None


def _reason(error: Exception) -> str:
    what = str(error).splitlines()[0] if str(error) else type(error).__name__
    missing = re.search(r"Interpolation key '(.+)' not found", what)
    if missing:
        hint = f"; for an environment variable write ${{oc.env:{missing[1]}}}" if missing[1].isupper() else ""
        return f"the interpolation ${{{missing[1]}}} refers to a key that does not exist{hint}"
    return what


# --- secrets --------------------------------------------------------------------------------------------------------


def _without_secrets(text: str, document: Document) -> str:
    """The text as written, but for the values of secret variables."""
    spans = []
    for path, (start, end) in document.spans.items():
        secret = len(path) == 2 and path[0] == "env" and is_secret_variable(path[1])
        if secret and "${" not in text[start:end]:
            spans.append((start, end))
    for start, end in sorted(spans, reverse=True):
        text = f'{text[:start]}"{REDACTED}"{text[end:]}'
    return text
