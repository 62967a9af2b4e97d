"""Submitting a search: its record, then its first runs."""

from __future__ import annotations

import socket

from slurmtrain.errors import SubmitFailed
from slurmtrain.ops.search.advance import Advance, advance, locked_search
from slurmtrain.ops.search.record import SearchRecord, forget, store
from slurmtrain.ops.search.study import check_methods
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit.code import with_snapshots
from slurmtrain.ops.submit.creation import new_sweep
from slurmtrain.ops.submit.submission import Submission
from slurmtrain.specfile import SpecFile
from slurmtrain.system.files import make_directory


def begin(workspace: Workspace, spec: SpecFile, executor: str) -> Submission:
    """Submit a search. From the moment that its record is there, every ``sync`` takes it further.

    Args:
        workspace: where the runs go.
        spec: the spec, whose only run is an example.
        executor: ``slurm`` or ``local``.

    Raises:
        SlurmtrainError: as :func:`slurmtrain.ops.submit.submit_spec`; or Optuna is not installed.
    """
    assert spec.search is not None
    check_methods(spec.search)
    [example] = spec.runs
    workspace.prepare()
    [plan], notes = with_snapshots(workspace, [example.plan])
    record = SearchRecord(
        sweep=new_sweep(workspace),
        search=spec.search,
        executor=executor,
        plan=plan,
        overrides=tuple(override.text for override in spec.inputs.overrides) if spec.inputs is not None else (),
        text=spec.text,
        spec_file=str(spec.path) if spec.path is not None else None,
        host=socket.gethostname() if executor == "local" else None,
    )
    make_directory(workspace.root.searches)
    advanced = Advance(notes=[*map(str, spec.warnings), *notes])
    with locked_search(workspace, record.sweep, wait=True):
        store(workspace, record)
        try:
            advance(workspace, record, advanced, is_new=True)
        except BaseException as error:
            # Whoever created no run has submitted nothing.
            if not (advanced.runs or isinstance(error, SubmitFailed)):
                forget(workspace, record.sweep)
            raise
    if advanced.problems:
        raise SubmitFailed("; ".join(advanced.problems), advanced.runs)
    return Submission(advanced.runs, advanced.notes, record.sweep)
