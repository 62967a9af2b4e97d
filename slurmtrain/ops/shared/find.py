"""Finding the run that a user names."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from slurmtrain.errors import RunNotFound
from slurmtrain.model.experiment.kinds import suggestion
from slurmtrain.model.run.layout import is_run_id
from slurmtrain.ops.shared.observe import ListedRuns, Observed, observe
from slurmtrain.ops.shared.workspace import Workspace

if TYPE_CHECKING:
    from slurmtrain.registry.queries import IndexRow
    from slurmtrain.registry.rows import Listed

    Runs = Mapping[str, IndexRow] | Mapping[str, Listed]

# No run can be called that: names have no '@' (model/experiment/values).
LAST = "@last"
_WILDCARDS = set("*?[")
_SHOWN = 5


def choose_run(runs: Runs, name: str) -> str:
    """The id of the run that ``name`` refers to: id, name, unique prefix of an id, or @last.

    Of several runs of that name the newest that has not ended is meant or, if all have ended, the newest.

    Raises RunNotFound if it matches no run, is a prefix of several ids, or the id of a sweep.
    """
    if not runs:
        raise RunNotFound(f"there is no run {name!r}: there are no runs here; 'slurmtrain submit' starts one")
    if name == LAST:
        # Ids begin with their time of creation, and sort by it.
        return max(runs)
    if name in runs:
        return name
    named = [run_id for run_id, listed in runs.items() if listed.name == name]
    if named:
        return max(namesakes(runs, named[0]) or named)
    swept = of_sweep(runs, name)
    if swept:
        raise RunNotFound(f"{name!r} is a sweep of {len(swept)} runs: {_few_names(runs, swept)}; name the run")
    # Ids have no capital letters.
    begun = sorted(run_id for run_id in runs if name and run_id.startswith(name.lower()))
    if len(begun) == 1:
        return begun[0]
    if begun:
        raise RunNotFound(
            f"{name!r} is a prefix of {len(begun)} run ids: {_few_names(runs, begun)}; type more characters"
        )
    near = suggestion(name, [*runs, *(listed.name for listed in runs.values())])
    raise RunNotFound(f"there is no run {name!r}{near or '; slurmtrain status lists them'}")


def of_sweep(runs: Runs, sweep: str) -> list[str]:
    """The runs of a sweep by its id, oldest first; empty if there is no such sweep."""
    return [run_id for run_id, listed in runs.items() if sweep and listed.sweep == sweep]


def _few_names(runs: Runs, run_ids: Sequence[str]) -> str:
    """The newest of these runs, and how many more there are."""
    shown = ", ".join(f"{run_id} ({runs[run_id].name})" for run_id in run_ids[-_SHOWN:])
    return shown + (f" and {len(run_ids) - _SHOWN} more" if len(run_ids) > _SHOWN else "")


def namesakes(runs: Runs, run_id: str) -> list[str]:
    """Runs with the name of this one that have not ended, itself included, oldest first."""
    name = runs[run_id].name
    return [other for other, listed in runs.items() if listed.name == name and not listed.ended]


def is_pattern(name: str) -> bool:
    """Whether it may refer to several runs: it contains ``*``, ``?`` or ``[``, as in a shell."""
    return bool(_WILDCARDS & set(name))


def choose_all(runs: Runs, names: Sequence[str], *, live: bool = False, namesakes: bool = False) -> list[str]:
    """The ids of the runs that names, sweeps and patterns refer to, without duplicates.

    Args:
        runs: All runs by id.
        names: Names that :func:`choose_run` accepts; ids of sweeps, for all their runs; and patterns, for all runs
            whose name or id they match.
        live: Sweeps and patterns refer only to runs that have not ended.
        namesakes: The name of a run refers to all runs of that name.

    Raises:
        RunNotFound: A name, sweep or pattern refers to no run.
    """
    ids: dict[str, None] = {}
    for name in names:
        swept = [] if name in runs else of_sweep(runs, name)
        if namesakes and (of_name := [run_id for run_id, listed in runs.items() if listed.name == name]):
            ids |= dict.fromkeys(of_name)
            continue
        if is_pattern(name):
            matching = [
                run_id
                for run_id, listed in runs.items()
                if fnmatchcase(listed.name, name) or fnmatchcase(run_id, name.lower())
            ]
            open_only = " that has not ended" if live else ""
            none = f"no run{open_only} matches {name!r}; slurmtrain status --all lists them"
        elif swept:
            matching, none = swept, f"all {len(swept)} runs of sweep {name} have ended"
        else:
            ids[choose_run(runs, name)] = None
            continue
        chosen = [run_id for run_id in matching if not (live and runs[run_id].ended)]
        if not chosen:
            raise RunNotFound(none)
        ids |= dict.fromkeys(chosen)
    return list(ids)


def find(workspace: Workspace, names: Sequence[str], *, ask_slurm: bool = True) -> tuple[list[str], Observed]:
    """The ids that the names refer to, and the current state of all runs.

    Args:
        workspace: Where the runs are.
        names: Names that :func:`choose_run` accepts.
        ask_slurm: Ask Slurm, if it may know more about any run.

    Raises:
        RunNotFound: As :func:`choose_run`.
    """
    observed = observe(workspace, ask_slurm=ask_slurm)
    refuse_others(workspace, observed, names)
    return [choose_listed(observed.runs, name) for name in names], observed


def choose_listed(runs: ListedRuns, name: str) -> str:
    """As :func:`choose_run`, but reads all runs only if it finds none. Raises RunNotFound."""
    try:
        return choose_run(runs.named([name]), name)
    except RunNotFound:
        # For the message alone, which suggests similar names of all runs.
        return choose_run(runs.index, name)


def choose_all_listed(runs: ListedRuns, name: str, *, namesakes: bool = False) -> list[str]:
    """As :func:`choose_all` for one name, but reads all runs only for a pattern, or if it finds none.

    Args:
        runs: All runs.
        name: A name, sweep or pattern.
        namesakes: The name of a run refers to all runs of that name.

    Raises:
        RunNotFound: It refers to no run.
    """
    if not is_pattern(name):
        with contextlib.suppress(RunNotFound):
            return choose_all(runs.named([name]), [name], namesakes=namesakes)
    return choose_all(runs.index, [name], namesakes=namesakes)


def find_all(workspace: Workspace, names: Sequence[str]) -> tuple[list[str], Observed]:
    """The ids that names and patterns refer to, and the state of all runs by their journals.

    Args:
        workspace: Where the runs are.
        names: Names and patterns that :func:`choose_all` accepts.

    Raises:
        RunNotFound: As :func:`choose_all`.
    """
    observed = observe(workspace, ask_slurm=False)
    refuse_others(workspace, observed, names)
    return choose_all(observed.runs.index, names), observed


def refuse_others(workspace: Workspace, observed: Observed, names: Sequence[str]) -> None:
    """Raise RunNotFound, which says whose it is, if one of the names is the id of a run of somebody else.

    Args:
        workspace: Where the runs are, maybe in a root that a group shares.
        observed: This user's runs.
        names: Names of runs.
    """
    shared_root = workspace.config.shared_root
    if shared_root is None:
        return
    # This user's registry knows nothing of others' runs: only their directories say whose an id is.
    for name in names:
        if is_run_id(name) and name not in observed.runs.named([name]):
            for place in shared_root.glob(f"*/{name}"):
                raise RunNotFound(f"there is no run {name!r} of yours: it is a run of {place.parent.name}'s")
