"""Reading a spec: overrides, sweeps, interpolation, validation, plans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slurmtrain.errors import Mistake, SpecError
from slurmtrain.model.spec.names import check_name
from slurmtrain.model.spec.plan import Plan, make_plan
from slurmtrain.model.spec.spec import read_spec
from slurmtrain.model.spec.sweep import check_sweep, expand_sweep
from slurmtrain.specfile.interpolate import interpolate
from slurmtrain.specfile.overrides import (
    Override,
    apply_overrides,
    check_path,
    override_for_value,
    parse_overrides,
    parse_sweeps,
)
from slurmtrain.specfile.secrets import find_leaks, without_secrets
from slurmtrain.system.yaml_file import Document, parse_yaml, read_text

KeyPath = tuple[str, ...]
_COMMAND_LINE = 1 << 30


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run to be: its plan, what was said beside the file, and what must not be written anywhere."""

    plan: Plan
    overrides: tuple[str, ...]
    secrets: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SpecFile:
    """All runs of a spec, and its text with secrets left out."""

    text: str
    runs: tuple[PlannedRun, ...]


class _Mistakes:
    """Collects mistakes and knows where each key was written."""

    def __init__(self, document: Document, overrides: Sequence[Override]) -> None:
        self.found = [(int(mistake.where.rpartition(":")[2]), mistake) for mistake in document.mistakes]
        self._document = document
        self._overrides = overrides
        self._swept: list[str] = []

    def sweeps(self, keys: Iterable[str]) -> None:
        """Tell which keys a sweep in the file varies: mistakes in them are the sweep's."""
        self._swept = list(keys)

    def add(self, path: KeyPath, message: str) -> None:
        line, where = self._locate(path)
        mistake = Mistake(where, ".".join(path), message)
        if all(mistake != known for _, known in self.found):
            self.found.append((line, mistake))

    def extend(self, mistakes: Iterable[Mistake]) -> None:
        """Take in mistakes of the command line."""
        self.found.extend((_COMMAND_LINE, mistake) for mistake in mistakes)

    def check(self) -> None:
        """Raise SpecError if there is any mistake, in the order of the file."""
        if self.found:
            raise SpecError([mistake for _, mistake in sorted(self.found, key=lambda pair: pair[0])])

    def _locate(self, path: KeyPath) -> tuple[int, str]:
        for override in self._overrides:
            if _meet(path, override.path):
                return _COMMAND_LINE, f"command line ({override.text})"
        swept = next((key for key in self._swept if _meet(path, tuple(key.split(".")))), None)
        line = self._document.line_of(path if swept is None else ("sweep", swept))
        return line, f"{self._document.name}:{line}"


def _meet(path: KeyPath, other: KeyPath) -> bool:
    """Whether one of two keys lies at or below the other."""
    length = min(len(path), len(other))
    return length > 0 and path[:length] == other[:length]


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
    return SpecFile(text=without_secrets(text, document), runs=runs)


def replan(plan: Plan, overrides: Sequence[str]) -> PlannedRun:
    """The plan of a run's next attempt: the old one with overrides. Raises SpecError with all mistakes.

    Interpolations are evaluated again, so that ``--steps ${params.steps}`` follows ``params.steps=400``.
    """
    if not overrides:
        return PlannedRun(plan, (), {})
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
) -> tuple[PlannedRun, ...]:
    data = {key: value for key, value in document.data.items() if key != "sweep"}
    overrides, wrong = parse_overrides(override_texts, data)
    swept, wrong_too = parse_sweeps(sweep_texts, data)
    mistakes = _Mistakes(document, [*overrides, *swept])
    mistakes.extend([*wrong, *wrong_too])
    sweep = _sweep_of(document.data.get("sweep"), data, swept, mistakes)
    if default_name is not None and "name" not in data:
        data["name"] = _name_from_file(default_name, mistakes)
    runs = []
    for combination in expand_sweep(sweep):
        said = [*overrides, *(override_for_value(key, value) for key, value in combination.items())]
        template = apply_overrides(said, data)
        planned = _plan_one(template, said, mistakes, cwd=cwd, python=python)
        if planned is not None:
            runs.append(planned)
    mistakes.check()
    return tuple(runs)


def _plan_one(
    template: dict[str, Any], said: Sequence[Override], mistakes: _Mistakes, *, cwd: Path, python: str
) -> PlannedRun | None:
    """One run; None if there is any mistake so far."""
    failed: set[KeyPath] = set()

    def failed_at(path: KeyPath, message: str) -> None:
        failed.add(path)
        mistakes.add(path, message)

    resolved = interpolate(template, failed_at)
    spec = read_spec(resolved, lambda at, message: None if at in failed else mistakes.add(at, message))
    for path, message in find_leaks(template, resolved):
        mistakes.add(path, message)
    if mistakes.found:
        return None
    workdir = (cwd / Path(spec.workdir or ".").expanduser()).resolve()
    plan, secrets = make_plan(spec, workdir=str(workdir), python=python, template=template)
    return PlannedRun(plan, tuple(override.text for override in said), secrets)


def _name_from_file(stem: str, mistakes: _Mistakes) -> str:
    try:
        check_name(stem)
    except ValueError as error:
        mistakes.add(("name",), f"the file's name is not fit to name the run ({error}); set 'name'")
        return "unnamed"
    return stem


def _sweep_of(
    written: object, data: Mapping[str, Any], swept: Sequence[Override], mistakes: _Mistakes
) -> dict[str, list[Any]]:
    """The sweep of file and command line together; the command line wins key by key."""
    sweep: dict[str, list[Any]] = {}
    wrong = check_sweep(written) if written is not None else []
    for key, message in wrong:
        mistakes.add(("sweep", key) if key else ("sweep",), message)
    bad = {key for key, _ in wrong}
    for key, values in written.items() if isinstance(written, Mapping) and "" not in bad else ():
        try:
            check_path(tuple(key.split(".")), data)
        except ValueError as error:
            mistakes.add(("sweep", key), str(error))
            continue
        if key not in bad:
            sweep[key] = values
    mistakes.sweeps(sweep)
    for override in swept:
        key = ".".join(override.path)
        about = [Mistake(f"command line ({override.text})", "", why) for _, why in check_sweep({key: override.value})]
        mistakes.extend(about)
        if not about:
            sweep[key] = override.value
    if swept and not wrong:
        mistakes.extend(Mistake("command line (--sweep)", "", why) for key, why in check_sweep(sweep) if not key)
    return sweep if not mistakes.found else {key: values[:1] for key, values in sweep.items()}
