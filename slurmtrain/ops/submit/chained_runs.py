"""Which runs the runs of a submission start after: names of its own specs, and of runs that exist already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slurmtrain.errors import RunNotFound, UserError
from slurmtrain.model.experiment.chain import Dependency, creation_order, dependencies_of, find_cycle, references_of
from slurmtrain.model.experiment.slurm_options import is_singleton
from slurmtrain.model.run.lineage import Upstream, describe_failure
from slurmtrain.ops.shared.find import choose_all_listed
from slurmtrain.ops.shared.observe import Observed, observe
from slurmtrain.ops.shared.start_order import active_namesakes
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.specfile import PlannedRun, SpecFile

if TYPE_CHECKING:
    from slurmtrain.registry.rows import Listed

# A run of the same submission: the number of its spec, and its own in that spec.
_Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Target:
    """What a dependency stands for. ``places``: runs that are about to be created; ``ids``: runs that exist."""

    dependency: Dependency
    places: Sequence[_Place] = ()
    ids: Sequence[str] = ()


class Chain:
    """The specs of a submission, and what their runs start after."""

    def __init__(self, workspace: Workspace, specs: Sequence[SpecFile], executor: str) -> None:
        """Nothing is looked up before :meth:`resolve`.

        Args:
            workspace: Where the runs go.
            specs: The specs.
            executor: What starts their runs.
        """
        self._workspace = workspace
        self._specs = specs
        self._executor = executor
        self._names = [{run.plan.spec.name for run in spec.runs} for spec in specs]
        self._targets: dict[_Place, list[_Target]] = {}
        self._listed: dict[str, Listed] = {}

    def order(self) -> list[int]:
        """The numbers of the specs in the order of their creation. Raises UserError for a cycle."""
        after = {number: list(dict.fromkeys(self._waits_for(number))) for number in range(len(self._specs))}
        cycle = find_cycle(after)
        if cycle:
            if len(set(cycle)) == 1:
                raise UserError(
                    f"{self._file(cycle[0])}: after: the run would wait for itself; to start it after an earlier run "
                    "of its name, write that run's id"
                )
            raise UserError(f"after: these would wait for each other: {' -> '.join(map(self._file, cycle))}")
        return creation_order(after)

    def resolve(self, numbers: Sequence[int]) -> None:
        """Find out which runs the runs of some specs start after.

        Args:
            numbers: The specs' numbers.

        Raises:
            UserError: There is no such run, or it cannot be started after.
        """
        observed: Observed | None = None
        for number in numbers:
            for index, planned in enumerate(self._specs[number].runs):
                targets = []
                if is_singleton(planned.plan.spec.slurm):
                    observed = observed or observe(self._workspace)
                    targets.append(self._namesakes(number, planned, observed))
                for dependency in dependencies_of(planned.plan.spec):
                    decided = planned.upstreams.get(dependency.name, ())
                    places = [] if decided else self._places(dependency.name)
                    ids: list[str] = []
                    if not places:
                        observed = observed or observe(self._workspace)
                        ids = self._existing(number, dependency, observed, decided)
                    targets.append(_Target(dependency, places, ids))
                if targets and self._specs[number].pack is not None and self._executor == "slurm":
                    raise UserError(
                        f"{self._file(number)}: runs that start after others cannot share a job; remove 'pack' or "
                        "'after'"
                    )
                if any(target.places or target.ids for target in targets):
                    self._check_references(number, planned, targets)
                    self._targets[number, index] = targets

    def upstreams(self, place: _Place, ids: Sequence[Sequence[str]]) -> list[Upstream]:
        """What a run starts after.

        Args:
            place: Which run.
            ids: The ids of the runs of each spec that have been created.
        """
        upstreams: dict[str, Upstream] = {}
        for target in self._targets.get(place, ()):
            name, any_end = target.dependency.name, target.dependency.any
            for run_id in [*(ids[spec][index] for spec, index in target.places), *target.ids]:
                upstreams.setdefault(run_id, Upstream(run_id, name, any_end))
        return list(upstreams.values())

    def _waits_for(self, number: int) -> Iterator[int]:
        """The specs of the same submission that one waits for, itself included if it does."""
        for planned in self._specs[number].runs:
            for dependency in dependencies_of(planned.plan.spec):
                if dependency.name in planned.upstreams:
                    continue
                yield from (other for other, names in enumerate(self._names) if dependency.name in names)

    def _places(self, name: str) -> list[_Place]:
        places = [
            (number, index)
            for number, spec in enumerate(self._specs)
            for index, planned in enumerate(spec.runs)
            if planned.plan.spec.name == name
        ]
        files = list(dict.fromkeys(number for number, _ in places))
        if len(files) > 1:
            raise UserError(
                f"after: {name!r} is the name of several specs: {', '.join(map(self._file, files))}; give them "
                "different names"
            )
        return places

    def _existing(self, number: int, dependency: Dependency, observed: Observed, decided: Sequence[str]) -> list[str]:
        """The ids of the runs that exist and that a dependency stands for: those ``decided``, if there are any."""
        where = f"{self._file(number)}: after"
        ids = list(decided) or self._find(where, dependency, observed)
        for run_id in ids:
            if not self._workspace.root.run(run_id).path.is_dir():
                cure = "; 'rerun RUN after=[...]' names other runs, and 'after=[]' none" if decided else ""
                raise UserError(f"{where}: the directory of run {Upstream(run_id, dependency.name)} was deleted{cure}")
        listed_runs = observed.runs.fetch(ids)
        self._check_search(where, dependency.name, list(listed_runs.values()))
        for run_id, listed in listed_runs.items():
            self._listed[run_id] = listed
            if problem := self._problem(Upstream(run_id, dependency.name, dependency.any), listed):
                raise UserError(f"{where}: {problem}")
        return ids

    def _namesakes(self, number: int, planned: PlannedRun, observed: Observed) -> _Target:
        """The runs of its name that one is not to run beside; runs of its own sweep run one at a time anyway.

        Raises UserError: one of them is on another executor.
        """
        name = planned.plan.spec.name
        before = [other for other in self.order()[: self.order().index(number)] if name in self._names[other]]
        places = [(other, index) for other in before for index in range(len(self._specs[other].runs))]
        ids = active_namesakes(observed.runs, name)
        for run_id, listed in observed.runs.fetch(ids).items():
            if problem := self._problem(Upstream(run_id, name, any=True), listed):
                raise UserError(f"{self._file(number)}: slurm.dependency: singleton: {problem}")
        return _Target(Dependency(name, any=True), places, ids)

    def _check_search(self, where: str, name: str, named: Sequence[Listed]) -> None:
        """Raise UserError if these are the runs of a search that may ask for more. ``where``: for the message."""
        searches = self._workspace.root.searches
        for sweep in {listed.sweep for listed in named if len(named) > 1 or listed.sweep == name}:
            if sweep and (searches / f"{sweep}.json").exists():
                raise UserError(
                    f"{where}: {name!r} is a search that is not over, so it may ask for more runs; 'slurmtrain wait "
                    f"{sweep}' waits for all of them"
                )

    def _find(self, where: str, dependency: Dependency, observed: Observed) -> list[str]:
        """The ids of the runs that a name stands for now. ``where``: it is, for messages. Raises RunNotFound."""
        try:
            ids = choose_all_listed(observed.runs, dependency.name)
        except RunNotFound as error:
            raise RunNotFound(f"{where}: {error}") from error
        named = observed.runs.fetch(ids)
        if len(ids) == 1 and named[ids[0]].sweep and named[ids[0]].name == dependency.name:
            # The name of a sweep's runs means all of them, as in its own submission.
            return choose_all_listed(observed.runs, str(named[ids[0]].sweep))
        return ids

    def _problem(self, upstream: Upstream, listed: Listed) -> str:
        """Why nothing can start after a run; empty if it can."""
        if listed.unreadable:
            return f"run {upstream} cannot be read: {listed.reason}"
        if listed.ended:
            if listed.state == "completed" or upstream.any:
                return ""
            failure = describe_failure(upstream, listed.state, listed.reason)
            again = f"'slurmtrain resume {upstream.run}' starts it again"
            return f"{failure}; {again}, and 'afterany:{upstream.name}' accepts any end"
        if listed.row["executor"] != self._executor:
            return (
                f"run {upstream} is on {listed.row['executor']}, and this one would be on {self._executor}; wait for "
                f"it with 'slurmtrain wait {upstream.run}'"
            )
        return ""

    def _check_references(self, number: int, planned: PlannedRun, targets: Sequence[_Target]) -> None:
        by_name = {target.dependency.name: target for target in targets}
        for reference in references_of(planned.plan.spec):
            target = by_name[reference.run]
            count = len(target.places) + len(target.ids)
            if count > 1:
                raise UserError(
                    f"{self._file(number)}: {reference}: {reference.run!r} stands for {count} runs; name one of them "
                    "by its id"
                )
            upstream = self._listed[target.ids[0]] if target.ids else None
            if reference.field == "checkpoint" and upstream and upstream.ended and upstream.checkpoint is None:
                raise UserError(f"{self._file(number)}: {reference}: run {upstream.id} has no checkpoint")

    def _file(self, number: int) -> str:
        spec = self._specs[number]
        return spec.path.name if spec.path is not None else str(min(self._names[number]))
