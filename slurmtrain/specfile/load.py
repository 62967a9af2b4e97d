"""Reading a spec: overrides, sweeps, interpolation, validation, plans."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slurmtrain.errors import Mistake, SpecError
from slurmtrain.model.experiment.chain import PLACES, dependencies_of, references, references_of
from slurmtrain.model.experiment.command_words import find_failures, find_oversights
from slurmtrain.model.experiment.kinds import MAX_RUNS, KeyPath, suggestion
from slurmtrain.model.experiment.launcher import (
    NODE,
    RANKS,
    calls_in,
    choose_launcher,
    counts_of_command,
    find_contradictions,
    problem_of_calls,
    refused_programs,
    shell_text,
)
from slurmtrain.model.experiment.plan import Plan, make_plan, written_resources
from slurmtrain.model.experiment.slurm_options import ReadOptions, is_singleton, refused_options
from slurmtrain.model.experiment.spec import Spec, read_spec
from slurmtrain.model.experiment.strategy import crossing_layers
from slurmtrain.model.experiment.sweep import (
    WORDS,
    Pack,
    Point,
    Sweep,
    packing_problem,
    read_sweep,
    varying_keys,
)
from slurmtrain.model.experiment.sweep_values import SearchSpec
from slurmtrain.model.experiment.values import SHELL_KEYS, Nodes, check_name
from slurmtrain.model.run.lineage import Parent
from slurmtrain.specfile.compose import NAME as DATA
from slurmtrain.specfile.compose import Composition, compose, spec_as_yaml
from slurmtrain.specfile.interpolate import Interpolator
from slurmtrain.specfile.overrides import (
    Mistakes,
    Override,
    SpecInputs,
    ValueSource,
    apply_overrides,
    check_path,
    override_for_value,
    parse_overrides,
    parse_sweeps,
)
from slurmtrain.specfile.proposals import MOST_MISTAKES, add_proposal, check_is_spec
from slurmtrain.specfile.recordable import (
    excesses,
    find_leaks,
    is_exposed,
    recorded_value,
    secret_in_shell,
    without_secrets,
)
from slurmtrain.system.inherited import expand_home
from slurmtrain.system.yaml_file import YamlDocument, parse_yaml, read_text

# Keys without mistakes from which it can be told whether the command is right.
_OF_COMMAND = (
    ("command",), ("launcher",),
    *(("resources", key) for key in ("nodes", "procs_per_node", "gpus_per_node", "components")),
)  # fmt: skip
# Names that the spec files of unrelated experiments share.
_SAYS_LITTLE = frozenset(
    {
        *("base", "conf", "config", "default", "exp", "experiment", "job", "main", "params", "run"),
        *("slurmtrain", "spec", "submit", "sweep", "train", "training"),
    }
)


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run that has not been submitted yet.

    ``overrides``: from the command line and from the sweep, without secrets. ``secrets``: environment variables that
    must not be written to any file. ``varies``: this run's values of the keys that the sweep varies, without secrets.
    ``parents``: the runs that it comes from. ``upstreams``: the ids of the runs that it starts after, by their names in
    its spec, where that is decided, as for a run that is submitted again. ``has_code``: whether it is decided which
    code it executes, as for a run that is submitted again. ``point``: the values that the sweep sets in this run, with
    secrets. ``trial``: its number in a search; None: in none. ``search``: the objective of that search.
    """

    plan: Plan
    overrides: tuple[str, ...]
    secrets: Mapping[str, str]
    varies: Mapping[str, Any] = field(default_factory=dict)
    parents: Sequence[Parent] = ()
    upstreams: Mapping[str, Sequence[str]] = field(default_factory=dict)
    has_code: bool = False
    point: Point = field(default_factory=dict, repr=False)
    trial: int | None = None
    search: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class SpecFile:
    """The runs of a spec, and its text without secrets.

    ``warnings``: allowed but unwise settings. ``path``: the file, absolute; None if there is none. ``bases``: the files
    that it extends. ``parallel``: how many of the runs of its sweep may run at once; None: it does not say. ``pack``:
    how they share jobs; None: each has its own. ``inputs``: the inputs of the plans; None: a plan that exists already.
    ``search``: how the values of runs are chosen; the only run here is then an example; None: these are the runs.
    """

    text: str
    runs: tuple[PlannedRun, ...]
    warnings: tuple[Mistake, ...] = ()
    path: Path | None = None
    parallel: int | None = None
    pack: Pack | None = None
    inputs: SpecInputs | None = None
    search: SearchSpec | None = None
    bases: tuple[Path, ...] = ()

    @property
    def files(self) -> list[Path]:
        """All files that it consists of, absolute and without symbolic links."""
        return [path.resolve() for path in (self.path, *self.bases) if path is not None]

    def sources(self, run: PlannedRun) -> list[ValueSource]:
        """Where each value of the plan of one of the ``runs`` comes from; empty if that is not known."""
        return self.inputs.sources(run.plan, run.point) if self.inputs is not None else []


@dataclass(frozen=True, slots=True)
class SiteRules:
    """What differs among sites: the options of their own sbatch, how many runs a sweep may have, which scripts exist.

    ``missing_script``: what to say of a spec, which has mistakes elsewhere, and its directory; empty: nothing.
    """

    read_options: ReadOptions = lambda _: frozenset()
    max_runs: int = MAX_RUNS
    missing_script: Callable[[Spec, Path], str] = lambda *_: ""


_ANY_SITE = SiteRules()


@dataclass(frozen=True, slots=True)
class _Machine:
    """Where a spec is submitted: the directory that ``workdir`` is relative to, the ``python`` of commands, the site.

    ``experiment``: the MLflow experiment of runs whose spec names none; None: the run's name. ``planned``: the spec of
    the attempts before, maybe of an earlier version; None: there are none.
    """

    cwd: Path
    python: str
    site: SiteRules
    experiment: str | None = None
    planned: Spec | None = None
    # Resolving a path takes system calls, and the runs of a sweep mostly have the same.
    _directories: dict[str | None, Path] = field(default_factory=dict, init=False, repr=False)

    def directory(self, workdir: str | None) -> Path:
        """Where a command runs, absolute and without links, by its spec's ``workdir``."""
        if workdir not in self._directories:
            self._directories[workdir] = (self.cwd / expand_home(workdir or ".")).resolve()
        return self._directories[workdir]

    def refused_options(self, spec: Spec) -> Iterator[tuple[KeyPath, str]]:
        """The options of Slurm in a ``spec`` that are not passed on, and why; not a run's present options."""
        before = {} if self.planned is None else self.planned.slurm
        changed = {key: value for key, value in spec.slurm.items() if key not in before or before[key] != value}
        # A wrong number of nodes is None.
        nodes = spec.resources.nodes
        fixed = nodes.max if nodes is not None and nodes.min == nodes.max else None
        sections: list[tuple[KeyPath, Mapping[str, Any], int | None]] = [(("slurm",), changed, fixed)]
        for number, each in enumerate(spec.resources.components if self.planned is None else ()):
            sections.append((("resources", "components", str(number), "slurm"), each.slurm, each.nodes))
        for section, slurm, count in sections:
            for at, message in refused_options(slurm, self.site.read_options, count):
                yield (*section, *at), message


def load_spec(
    spec: Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    sweep: Sequence[str] = (),
    *,
    cwd: Path,
    python: str,
    site: SiteRules = _ANY_SITE,
) -> SpecFile:
    """Read a spec and plan all of its runs.

    Args:
        spec: Its file, or what would be in it, as plain data.
        overrides: ``a.b=c``.
        sweep: ``a.b=1,2,3``: the keys to vary, with the values of each.
        cwd: The directory that ``workdir`` is relative to.
        python: What the word ``python`` in a command stands for.
        site: What its sbatch and its configuration allow.

    Raises:
        PathError: The file cannot be read.
        SpecError: Lists all mistakes in the spec and on the command line.
    """
    machine = _Machine(cwd, python, site)
    if isinstance(spec, Path):
        text = read_text(spec)
        check_is_spec(spec, text)
        machine = replace(machine, experiment=experiment_of(spec))
        composed = compose(text, str(spec), spec.parent, spec)
        return replace(_load_composed(composed, spec.stem, (overrides, sweep), machine), path=spec.absolute())
    try:
        loaded = _load_composed(compose(spec_as_yaml(spec), DATA, cwd), None, (overrides, sweep), machine)
    except SpecError as error:
        raise SpecError(_without_lines(error.mistakes)) from None
    return replace(loaded, warnings=_without_lines(loaded.warnings))


def _without_lines(mistakes: Iterable[Mistake]) -> tuple[Mistake, ...]:
    """Mistakes in a spec that has no lines which its author knows."""
    return tuple(replace(each, where=DATA) if each.where.startswith(f"{DATA}:") else each for each in mistakes)


def _load_composed(
    composed: Composition, default: str | None, changes: tuple[Sequence[str], Sequence[str]], machine: _Machine
) -> SpecFile:
    """Plan the runs of a spec.

    Args:
        composed: The spec, with all that it extends.
        default: The name of its runs if it has none; None: it must have one.
        changes: Overrides, and keys to vary.
        machine: Where it is submitted.
    """
    document = composed.document
    runs, sweep, inputs = _plan_all(document, *changes, default_name=default, machine=machine)
    # What was composed has places in several files: secrets are replaced by their places in the text of the whole.
    written = parse_yaml(composed.text, document.name) if document.layers else document
    return SpecFile(
        text=without_secrets(composed.text, written),
        runs=runs,
        warnings=_find_warnings(runs, sweep, inputs),
        # One run of a singleton is active at a time, in a sweep too.
        parallel=1 if any(is_singleton(run.plan.spec.slurm) for run in runs) else sweep.parallel,
        pack=sweep.pack,
        inputs=inputs,
        bases=composed.bases,
        search=sweep.search,
    )


def _find_warnings(runs: Sequence[PlannedRun], sweep: Sweep, inputs: SpecInputs) -> tuple[Mistake, ...]:
    """What is allowed in the ``runs`` of a spec, and hardly meant."""
    on_command_line = [*inputs.overrides, *inputs.swept]
    warnings = Mistakes(replace(inputs.document, mistakes=[]), on_command_line)
    for rule in sweep.idle_rules():
        warnings.add(("sweep", *rule.at), "this rule excludes no run")
    first: dict[str, int] = {}
    for number, run in enumerate(runs, 1):
        # Values of secrets are in no plan: runs that differ in them look alike.
        twin = first.setdefault(run.plan.hash, number) if len(runs) > 1 and not run.secrets else number
        if twin != number:
            warnings.add(("sweep",), f"runs {twin} and {number} of the sweep are identical")
        for index, line in enumerate(run.plan.spec.setup):
            if (secret := secret_in_shell(line)) is not None:
                warnings.add(
                    ("setup", str(index)),
                    f"this line seems to contain a secret ({secret}); it is recorded with the run, and Slurm keeps it "
                    "in the batch script: put it under 'env', because secret values there are never recorded",
                )
        warnings.add_all(find_oversights(run.plan.content))
        strategy, resources = run.plan.spec.strategy, run.plan.spec.resources
        if strategy and (crossing := crossing_layers(strategy, resources.most_ranks)):
            warnings.add(("strategy",), crossing)
    for override in on_command_line:
        if is_exposed(override.path, override.value):
            warnings.add(
                override.path,
                "every user of this machine can read command lines; set it in the environment and refer to it in the "
                "spec, as in 'env: {API_TOKEN: ${oc.env:API_TOKEN}}'",
            )
    return tuple(warnings.sorted())


def replan(
    plan: Plan,
    overrides: Sequence[str],
    read_options: ReadOptions = lambda _: frozenset(),
    *,
    renames: bool = False,
) -> PlannedRun:
    """The plan of a run's next attempt, or of a run that repeats it: the old plan with overrides.

    Interpolations are evaluated again, so that ``params.steps=400`` also changes ``--steps ${params.steps}``.

    Args:
        plan: The old plan.
        overrides: ``a.b=c``.
        read_options: The options of sbatch here; options that the plan has already are not looked for.
        renames: Whether an override may change the name.

    Raises:
        SpecError: Lists all mistakes.
    """
    # Not planned anew, since a newer version might make another plan of the same template.
    if not overrides:
        return PlannedRun(plan, (), {})
    # No lines: mistakes can only be in the overrides, as the template was read before.
    document = YamlDocument("plan.json", dict(plan.template))
    # A run stays in its experiment, whatever the default is in this version.
    experiment = plan.spec.tracking.mlflow.experiment
    machine = _Machine(Path(plan.workdir), plan.python, SiteRules(read_options), experiment, plan.spec)
    [planned], *_ = _plan_all(document, overrides, (), default_name=None, machine=machine)
    # An override is needed to name another checkpoint: by itself a run keeps the one that it began with.
    names_start = any(each.lstrip("+").partition("=")[0].partition(".")[0] == "start_from" for each in overrides)
    later, key, why = planned.plan.spec, "", ""
    names = {each.name for each in dependencies_of(plan.spec)}
    other = next((each for each in references_of(later) if each.run not in names), None)
    if later.name != plan.spec.name:
        key, why = "name", "the name of a run cannot be changed"
    elif later.after != plan.spec.after:
        key, why = "after", "the runs that a run starts after cannot be changed"
    elif other is not None:
        why = f"{other}: a run can only refer to runs that it was submitted to start after"
    elif names_start:
        key, why = "start_from", "the checkpoint that a run began with cannot be changed"
    if why and not renames:
        raise SpecError([Mistake("command line", key, f"{why}; submit a new run instead")])
    # If planned from the old workdir, a relative one would be applied twice; only an override changes it.
    workdir = planned.plan.workdir if planned.plan.spec.workdir != plan.spec.workdir else plan.workdir
    # A run keeps its snapshot, unless an override says that it is to have none any more.
    spec = planned.plan.spec if names_start else replace(planned.plan.spec, start_from=plan.spec.start_from)
    code = plan.code if planned.plan.spec.code.has_snapshot or not plan.spec.code.has_snapshot else None
    return replace(planned, plan=replace(planned.plan, spec=spec, workdir=workdir, code=code))


def _plan_all(
    document: YamlDocument,
    override_texts: Sequence[str],
    sweep_texts: Sequence[str],
    *,
    default_name: str | None,
    machine: _Machine,
) -> tuple[tuple[PlannedRun, ...], Sweep, SpecInputs]:
    """All runs of a document, its sweep, and their sources. Raises SpecError."""
    data = {key: value for key, value in document.data.items() if key != "sweep"}
    overrides, override_mistakes = parse_overrides(override_texts, data)
    swept, sweep_mistakes = parse_sweeps(sweep_texts, data)
    mistakes = Mistakes(document, overrides, swept)
    mistakes.add_from_command_line([*override_mistakes, *sweep_mistakes])
    sweep = _merge_sweeps(document.data.get("sweep"), data, swept, mistakes, max_runs=machine.site.max_runs)
    if default_name is not None and "name" not in data:
        data["name"] = default_name
        try:
            check_name(default_name)
        except ValueError as error:
            data["name"] = "unnamed"
            mistakes.add(("name",), f"the file's name cannot be the name of the run ({error}); set 'name'")
    for key in sweep.search.space if sweep.search is not None else ():
        if recorded_value(key, None) is not None:
            mistakes.add(("sweep", key), "the values of a search are recorded, so they must not contain secrets")
    # After a mistake one run is enough to find the mistakes in the rest of the spec.
    points = [sweep.first()] if mistakes else sweep.expand()
    varying = varying_keys(points)
    runs = []
    interpolator = Interpolator()
    for point in points:
        mistakes.set_point(point)
        values = {key: swept_to.value for key, swept_to in point.items()}
        run_overrides = [*overrides, *(override_for_value(key, value) for key, value in values.items())]
        template = apply_overrides(run_overrides, data)
        if "name" not in template:
            mistakes.add(("name",), "a spec that does not come from a file needs a 'name'")
        planned = _plan_one(template, run_overrides, mistakes, machine, interpolator)
        if planned is not None:
            varies = {key: recorded_value(key, values[key]) for key in varying if key in values}
            runs.append(replace(planned, varies=varies, point=point))
    # After all runs, whose resources and options may be swept.
    _check_together(runs, sweep, mistakes)
    mistakes.raise_if_any()
    return tuple(runs), sweep, SpecInputs(document, overrides, swept)


def _merge_sweeps(
    in_file: object, data: Mapping[str, Any], swept: Sequence[Override], mistakes: Mistakes, *, max_runs: int
) -> Sweep:
    """The sweep of the file merged with the sweep of the command line, which wins key by key.

    Args:
        in_file: The section ``sweep`` of the file; None: there is none.
        data: The rest of the file.
        swept: What the command line varies.
        mistakes: Receives what is wrong.
        max_runs: How many runs a sweep may have.
    """
    if in_file is None and not swept:
        return Sweep()
    new = {".".join(override.path): override.value for override in swept}

    def check_key(key: str) -> None:
        # Keys of the command line have been checked, and may be parameters that the file does not have.
        if key in new:
            return
        try:
            check_path(tuple(key.split(".")), data)
        except ValueError as error:
            near = suggestion(key, WORDS)
            raise ValueError(f"there is no key {key!r}{near}" if near else str(error)) from None

    merged = {**in_file, **new} if isinstance(in_file, Mapping) else in_file if in_file is not None else new
    return read_sweep(merged, lambda at, message: mistakes.add(("sweep", *at), message), check_key, max_runs=max_runs)


def _check_together(runs: Sequence[PlannedRun], sweep: Sweep, mistakes: Mistakes) -> None:
    """Check whether the runs of a sweep can share jobs, and run one at a time where the spec says so."""
    pack = sweep.pack
    if pack is not None and not mistakes:
        problems = (packing_problem(run.plan.spec.resources, pack, run.plan.spec.slurm) for run in runs)
        problem = next(filter(None, problems), "")
        if not problem and pack.runs > len(runs):
            problem = f"{pack.runs} runs cannot share a job: the sweep has only {len(runs)}"
        if problem:
            mistakes.add(("sweep", "pack"), problem)
    if any(is_singleton(run.plan.spec.slurm) for run in runs):
        if pack is not None:
            mistakes.add(
                ("sweep", "pack"),
                "runs that share a job run at the same time, so 'slurm.dependency: singleton' is not possible",
            )
        if sweep.search is not None and sweep.search.parallel > 1:
            mistakes.add(("sweep",), "with 'slurm.dependency: singleton' write 'parallel: 1'")


def _plan_one(
    template: dict[str, Any],
    overrides: Sequence[Override],
    mistakes: Mistakes,
    machine: _Machine,
    interpolator: Interpolator,
) -> PlannedRun | None:
    """One run; None if there is any mistake so far."""
    failed: set[KeyPath] = set()

    def report(path: KeyPath, message: str) -> None:
        failed.add(path)
        mistakes.add(path, message)

    resolved = interpolator.interpolate(template, report)
    # A failed interpolation is None in ``resolved``: one message for it is enough.
    unread = frozenset(failed)
    reported: list[tuple[KeyPath, str]] = []
    spec = read_spec(resolved, lambda at, message: None if at in unread else reported.append((at, message)))
    for number, (at, message) in enumerate(reported):
        report(at, add_proposal(message, at, resolved) if number < MOST_MISTAKES else message)
    mistakes.add_all(find_leaks(template, resolved))
    for key in resolved.keys() - {*PLACES, *SHELL_KEYS}:
        for reference in dict.fromkeys(references(resolved[key])):
            mistakes.add((key,), f"{reference} is known only when this run starts: write it in {' or '.join(PLACES)}")
    # This and the contradictions below are checked here, in new plans: plans of earlier versions, and of other sites,
    # must stay readable.
    mistakes.add_all(machine.refused_options(spec))
    if not any(path[: len(key)] == key for path in failed for key in _OF_COMMAND):
        counts = counts_of_command(spec.command, written_resources(template))
        if counts and (spec.launcher or choose_launcher(spec.command)) == NODE:
            numbers: dict[str, Any] = {
                key: Nodes(count, count) if key == "nodes" else count for key, (_, count) in counts.items()
            }
            spec = replace(spec, resources=replace(spec.resources, **numbers))
        mistakes.add_all((("command",), message) for message in _command_mistakes(spec, template))
    workdir = machine.directory(spec.workdir)
    if mistakes:
        # A script that is missing is found later otherwise, in a second round.
        is_known = not failed.intersection((("command",), ("workdir",), ("setup",)))
        if problem := machine.site.missing_script(spec, workdir) if is_known else "":
            mistakes.add(("command",), problem)
        return None
    plan, secrets = make_plan(
        spec, workdir=str(workdir), python=machine.python, template=template, experiment=machine.experiment
    )
    mistakes.add_all(excesses(spec))
    return PlannedRun(plan, tuple(override.text for override in overrides), secrets)


def _command_mistakes(spec: Spec, template: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with a command, as far as a spec tells whose :data:`_OF_COMMAND` are right."""
    yield from find_failures(template)
    launcher = spec.launcher or choose_launcher(spec.command)
    if spec.resources.bind and launcher != RANKS:
        yield (
            "this launcher starts its ranks itself, and 'resources.bind' only affects ranks that slurmtrain starts: "
            "leave that out, or set 'launcher: ranks'"
        )
    ranks = spec.resources.resolved().most_ranks
    yield from find_contradictions(spec.command, launcher, ranks)
    yield from refused_programs(spec.command, launcher)
    problem = problem_of_calls(calls_in(shell_text(spec.command) or ""), launcher, ranks.world_size)
    if problem is not None:
        yield f"the shell calls {problem[0].name}, {problem[1]}"


def experiment_of(path: Path) -> str | None:
    """The MLflow experiment of the runs of a spec file: the file's name or, where that says little, its directory's.

    None where neither can be a name, as for standard input.
    """
    path = path.absolute()
    for name in (path.parent.name, path.stem) if path.stem.lower() in _SAYS_LITTLE else (path.stem,):
        with contextlib.suppress(ValueError):
            check_name(name)
            return name if path.is_file() else None
    return None
