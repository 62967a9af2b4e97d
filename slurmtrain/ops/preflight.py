"""Only the node checks, as a run that trains nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from slurmtrain.errors import UserError
from slurmtrain.model.experiment.checkpoint import CheckpointSpec
from slurmtrain.model.experiment.code import NONE, CodeSpec
from slurmtrain.model.experiment.plan import make_plan
from slurmtrain.model.experiment.sections import RequeueSpec
from slurmtrain.model.experiment.spec import Spec, write_spec
from slurmtrain.model.experiment.tracking import MlflowSpec, TrackingSpec
from slurmtrain.model.experiment.values import Nodes, read_node_count
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit import load, submit_spec, which_python
from slurmtrain.slurm.slurm_commands import read_options
from slurmtrain.specfile import PlannedRun, SpecFile, replan
from slurmtrain.system.inherited import current_directory

NAME = "preflight"
# Longer than the checks ever take, but so short that Slurm's backfill starts the job in a gap between others.
_MAX_TIME_S = 600


def submit_preflight(
    workspace: Workspace, path: Path | None, overrides: Sequence[str], *, nodes: int | None, executor: str
) -> tuple[str, list[str]]:
    """Submit a run that ends after its preflight.

    It excludes no node in the ledger, to show which nodes work again. Its findings are added to the ledger.

    Args:
        workspace: Where the run is kept.
        path: A spec that says which nodes to request, and how to check them.
        overrides: ``KEY=VALUE`` overrides of the spec.
        nodes: How many nodes; by default as many as the spec says.
        executor: local or slurm.

    Returns:
        The run's id, and notes for the user.

    Raises:
        UserError: ``nodes`` with a spec whose nodes are in components, or more than a spec may have.
        SlurmtrainError: As :func:`slurmtrain.ops.submit.submit_spec` does.
    """
    try:
        nodes = None if nodes is None else read_node_count(nodes)
    except ValueError as error:
        raise UserError(f"--nodes: {error}") from None
    if path is not None:
        # Of a sweep, the first run.
        planned = load(path, overrides, ()).runs[0]
    else:
        template = {"name": NAME, "command": _command()}
        plain = Spec(name=NAME, command=_command())
        plan, _ = make_plan(plain, workdir=str(current_directory()), python=which_python(), template=template)
        planned = replan(plan, overrides, read_options)
    if nodes is not None and planned.plan.spec.resources.components:
        raise UserError(
            f"--nodes {nodes} is ambiguous, because {path} has 'resources.components': leave it out to check the "
            "nodes of all components, or change their 'nodes'"
        )
    spec = planned.plan.spec
    resources = replace(spec.resources, time=min(spec.resources.time or _MAX_TIME_S, _MAX_TIME_S))
    # Everything that would outlive the checks is switched off: requeues, the node ledger, checkpoints, MLflow.
    spec = replace(
        spec,
        name=NAME,
        command=_command(),
        workdir=None,
        params={},
        resources=resources if nodes is None else replace(resources, nodes=Nodes(nodes, nodes), spares=0),
        preflight=replace(spec.preflight, exclude=False),
        checkpoint=CheckpointSpec(),
        requeue=RequeueSpec(enabled=False),
        tracking=TrackingSpec(mlflow=MlflowSpec(enabled=False)),
        code=CodeSpec(mode=NONE),
    )
    plan, _ = make_plan(spec, workdir=planned.plan.workdir, python=planned.plan.python, template=write_spec(spec))
    text = f"# slurmtrain preflight\n{json.dumps(plan.content, indent=1)}\n"
    spec_file = SpecFile(text=text, runs=(PlannedRun(plan, planned.overrides, planned.secrets),))
    [run_id], notes, _ = submit_spec(workspace, spec_file, executor=executor)
    return run_id, notes


def _command() -> str:
    # The checks are all that is wanted: whatever ranks run must only end well.
    return shutil.which("true") or "true"
