"""Finding the run that a user names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from slurmtrain.errors import RunNotFound
from slurmtrain.model.spec.kinds import suggestion
from slurmtrain.ops.shared.observe import Observed, observe
from slurmtrain.ops.shared.workspace import Workspace

LAST = "@last"
_SHOWN = 5


class Named(Protocol):
    """Anything that has the name of a run."""

    @property
    def name(self) -> str:
        """Its name."""


def choose(runs: Mapping[str, Named], name: str) -> str:
    """The id of the run that ``name`` refers to: id, name (the newest such run), unique prefix of an id, or @last.

    Raises RunNotFound if it matches no run, or is a prefix of several ids.
    """
    if not runs:
        raise RunNotFound(f"there is no run {name!r}: there are no runs here; 'slurmtrain submit' starts one")
    if name == LAST:
        return max(runs)
    if name in runs:
        return name
    named = [run_id for run_id, listed in runs.items() if listed.name == name]
    if named:
        return max(named)
    begun = sorted(run_id for run_id in runs if name and run_id.startswith(name.lower()))
    if len(begun) == 1:
        return begun[0]
    if begun:
        shown = ", ".join(f"{run_id} ({runs[run_id].name})" for run_id in begun[-_SHOWN:])
        more = f" and {len(begun) - _SHOWN} more" if len(begun) > _SHOWN else ""
        raise RunNotFound(f"{name!r} is a prefix of {len(begun)} run ids: {shown}{more}; type more characters")
    near = suggestion(name, [*runs, *(listed.name for listed in runs.values())])
    raise RunNotFound(f"there is no run {name!r}{near or '; slurmtrain status lists them'}")


def find(workspace: Workspace, names: Sequence[str], *, ask_slurm: bool = True) -> tuple[list[str], Observed]:
    """The ids that the names refer to, and the current state of all runs.

    Args:
        workspace: Where the runs are.
        names: Names that :func:`choose` accepts.
        ask_slurm: Ask Slurm, if it may know more about any run.

    Raises:
        RunNotFound: As :func:`choose`.
        UntrustedPath: The directory of a run is somebody else's.
    """
    observed = observe(workspace, ask_slurm=ask_slurm)
    for name in names:
        if name in observed.refused:
            raise observed.refused[name]
    return [choose(observed.runs.index, name) for name in names], observed
