"""Finding the runs that a user names: one rule for all commands, which :func:`choose` decides."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from slurmtrain.errors import RunNotFound
from slurmtrain.model.experiment.kinds import suggestion
from slurmtrain.model.run.layout import is_run_id
from slurmtrain.ops.shared.observe import ListedRuns, Observed, observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.system.locks import print_notice

if TYPE_CHECKING:
    from slurmtrain.registry.queries import IndexRow
    from slurmtrain.registry.rows import Listed

    Runs = Mapping[str, IndexRow] | Mapping[str, Listed]

# No run can be called that: names have no '@' (model/experiment/values).
LAST = "@last"
_WILDCARDS = set("*?[")
_SHOWN = 5


def choose(runs: Runs, name: str, *, live: bool = False) -> list[str]:
    """The ids of the runs that a word refers to, oldest first.

    It is an id, ``@last``, a name, the id of a sweep, a pattern for names and ids, or the beginning of an id. A name
    means its newest submission: one run or, of a sweep, all its runs of that name.

    Args:
        runs: All runs by id, oldest first, or at least those that the word may refer to.
        name: The word.
        live: Of several runs, only those that have not ended.

    Raises:
        RunNotFound: It matches no run, is the beginning of several ids, or all of several runs have ended.
    """
    if not runs:
        raise RunNotFound(f"there is no run {name!r}: there are no runs here; 'slurmtrain submit' starts one")
    if is_pattern(name):
        chosen = [each for each in runs if fnmatchcase(runs[each].name, name) or fnmatchcase(each, name.lower())]
        open_only = " that has not ended" if live else ""
        return _only(
            runs, chosen, live=live, none=f"no run{open_only} matches {name!r}; slurmtrain status --all lists them"
        )
    if name == LAST:
        # Ids begin with their time of creation, and sort by it.
        return [max(runs)]
    if name in runs:
        return [name]
    chosen = [each for each in runs if runs[each].name == name]
    if chosen:
        sweep = runs[max(chosen)].sweep
        chosen = [each for each in chosen if runs[each].sweep == sweep] if sweep else [max(chosen)]
    else:
        chosen = [each for each in runs if name and runs[each].sweep == name]
    if len(chosen) > 1:
        return _only(runs, chosen, live=live, none=f"all {_describe(runs, name, chosen)} have ended")
    return chosen or _begun(runs, name)


def _begun(runs: Runs, name: str) -> list[str]:
    """The run whose id begins so. Raises RunNotFound if there is none, or if there are several."""
    # Ids have no capital letters.
    begun = [run_id for run_id in runs if name and run_id.startswith(name.lower())]
    if len(begun) > 1:
        shown = ", ".join(f"{run_id} ({runs[run_id].name})" for run_id in begun[-_SHOWN:])
        more = f" and {len(begun) - _SHOWN} more" if len(begun) > _SHOWN else ""
        raise RunNotFound(f"{name!r} is a prefix of {len(begun)} run ids: {shown}{more}; type more characters")
    if not begun:
        near = suggestion(name, [*runs, *(row.name for row in runs.values())])
        raise RunNotFound(f"there is no run {name!r}{near or '; slurmtrain status lists them'}")
    return begun


def _only(runs: Runs, chosen: Sequence[str], *, live: bool, none: str) -> list[str]:
    """The chosen runs, or those that are ``live``. Raises RunNotFound, with ``none``, if there are none."""
    ids = [run_id for run_id in chosen if not (live and runs[run_id].ended)]
    if not ids:
        # Who names a sweep may mean another run of that name, which goes on.
        others = namesakes(runs, chosen[-1]) if chosen and live else []
        raise RunNotFound(none + (f"; also called so, and not ended: {', '.join(others[:_SHOWN])}" if others else ""))
    return ids


def _describe(runs: Runs, name: str, chosen: Sequence[str]) -> str:
    sweeps = {runs[run_id].sweep for run_id in chosen}
    sweep = sweeps.pop() if len(sweeps) == 1 else None
    return f"{len(chosen)} runs of " + (f"sweep {sweep}" if sweep else name)


def namesakes(runs: Runs, run_id: str) -> list[str]:
    """Runs with the name of this one that have not ended, itself included, oldest first."""
    name = runs[run_id].name
    return [other for other, row in runs.items() if row.name == name and not row.ended]


def is_pattern(name: str) -> bool:
    """Whether it may refer to several runs: it contains ``*``, ``?`` or ``[``, as in a shell."""
    return bool(_WILDCARDS & set(name))


def choose_all(
    workspace: Workspace, runs: ListedRuns, names: Sequence[str], *, live: bool = False, widely: bool = False
) -> list[str]:
    """The ids of all runs that names refer to, as :func:`choose` says, without duplicates.

    Args:
        workspace: Where the runs are.
        runs: All runs, as observed; they are read only for a pattern, or if a name refers to none.
        names: The names.
        live: Of several runs that a name refers to, only those that have not ended.
        widely: The name of a run that was submitted alone means all runs of that name, as a notice says.

    Raises:
        RunNotFound: A name refers to no run, or to one of somebody else.
    """
    ids: dict[str, None] = {}
    for name in names:
        rows, chosen = _choose_listed(workspace, runs, name, live=live)
        if widely and len(chosen) == 1 and rows[chosen[0]].name == name:
            chosen = [run_id for run_id, row in rows.items() if row.name == name]
            if len(chosen) > 1:
                print_notice(f"{name}: the newest was submitted alone; these are all {len(chosen)} runs of this name")
        ids |= dict.fromkeys(chosen)
    return list(ids)


def choose_one(workspace: Workspace, runs: ListedRuns, name: str, *, prefer: Collection[str] = ("running",)) -> str:
    """The id of the run that a command for one run takes; of several, a notice says which.

    Args:
        workspace: Where the runs are.
        runs: All runs, as observed.
        name: What :func:`choose` takes.
        prefer: Of several, the newest in one of these states; else the newest that has not ended, or has.

    Raises:
        RunNotFound: As :func:`choose_all`.
    """
    rows, chosen = _choose_listed(workspace, runs, name)
    run_id = max(chosen, key=lambda each: (rows[each].state in prefer, not rows[each].ended, each))
    if len(chosen) > 1:
        print_notice(
            f"{name}: {_describe(rows, name, chosen)}, and this takes one of them: {run_id} ({rows[run_id].state}); "
            f'"slurmtrain status {shlex.quote(name)}" lists the others'
        )
    return run_id


def _choose_listed(
    workspace: Workspace, runs: ListedRuns, name: str, *, live: bool = False
) -> tuple[Mapping[str, IndexRow], list[str]]:
    """As :func:`choose`, with the rows that it chose from: all of them only for a pattern, or if there is no run."""
    rows = runs.index if is_pattern(name) else runs.named([name])
    try:
        return rows, choose(rows, name, live=live)
    except RunNotFound:
        refuse_others(workspace, runs, [name])
        # For the message alone, which suggests similar names of all runs.
        return runs.index, choose(runs.index, name, live=live)


def find(
    workspace: Workspace, names: Sequence[str], *, ask_slurm: bool = True, prefer: Collection[str] = ("running",)
) -> tuple[list[str], Observed]:
    """One run for each name, as :func:`choose_one` says, and the current state of all runs.

    Args:
        workspace: Where the runs are.
        names: What :func:`choose` takes.
        ask_slurm: Ask Slurm, if it may know more about any run.
        prefer: As :func:`choose_one`.

    Raises:
        RunNotFound: As :func:`choose_all`.
    """
    observed = observe(workspace, ask_slurm=ask_slurm)
    return [choose_one(workspace, observed.runs, name, prefer=prefer) for name in names], observed


def find_all(workspace: Workspace, names: Sequence[str]) -> tuple[list[str], Observed]:
    """All runs that names refer to, as :func:`choose_all` says, and the state of all runs by their journals.

    Args:
        workspace: Where the runs are.
        names: What :func:`choose` takes.

    Raises:
        RunNotFound: As :func:`choose_all`.
    """
    observed = observe(workspace, ask_slurm=False)
    return choose_all(workspace, observed.runs, names), observed


def refuse_others(workspace: Workspace, runs: ListedRuns, names: Sequence[str]) -> None:
    """Raise RunNotFound, which says whose it is, if one of the names is the id of a run of somebody else.

    Args:
        workspace: Where the runs are, maybe in a root that a group shares.
        runs: This user's runs.
        names: Names of runs.
    """
    # This user's registry knows nothing of others' runs: only their directories say whose an id is.
    if (shared_root := workspace.config.shared_root) is None:
        return
    for name in names:
        for path in shared_root.glob(f"*/{name}") if is_run_id(name) and name not in runs.named([name]) else ():
            raise RunNotFound(f"run {name!r} is not yours: it belongs to {path.parent.name}")
