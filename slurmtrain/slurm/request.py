"""The Request: exactly what is requested from Slurm for a run, or for several at once. The same plan, the same script.

The batch script is ``templates/batch.sh.j2``, from its options to its exit code. submitit pickles the task, keeps the
files of the job and calls sbatch with this script: its own has no requeue, no ``--wckey`` that can be left out, and no
job arrays whose tasks differ by their place alone.

Seen on 22.05: a step over all components of a heterogeneous job is one srun with a part for each,
``--het-group=0 ... : --het-group=1 ...``: its tasks and nodes are counted through, in the order of the components, and
SLURM_JOB_ID is the leader's everywhere. But ``%j`` in the name of a log is the id of the component's own job, and
SLURM_STEP_NODELIST is sorted by name.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.experiment.resources import OPTIONS_OF_COMPONENTS
from slurmtrain.model.experiment.slurm_options import SRUN, named_options
from slurmtrain.model.experiment.sweep import Pack
from slurmtrain.model.experiment.values import write_node_memory
from slurmtrain.model.hostlist import compress_hostlist, expand_hostlist
from slurmtrain.model.run.layout import ArrayDir, SubmissionDir
from slurmtrain.runtime.environment.ranks import load_profile
from slurmtrain.runtime.environment.setup_script import setup_values, shell_templates
from slurmtrain.runtime.task import task_command
from slurmtrain.slurm.parse import describe_after, job_name
from slurmtrain.system.interpreter import own_python

# Seconds before the time limit at which Slurm sends SIGUSR2 to the job's steps; it may come up to 60 s earlier
# (sbatch(1), --signal). A short job is warned when a tenth of its time is left, but not too late to save.
SIGNAL_LEAD_S = 90
_LEAST_LEAD_S = 15
# Seconds after the end of the first task after which srun kills the others (srun(1), --wait): agents need less to
# save.
_LAST_TASKS_S = 120
# The limits of the submitting shell that Slurm hands on. Open files and core dumps are a person's wish; the others are
# a login node's, where CPU time, processes or memory are scarce: a job has the limits of its nodes.
_PROPAGATED = "NOFILE,CORE"
_ESCAPE = "\\"


@dataclass(frozen=True, slots=True)
class Request:
    """One submission to Slurm.

    ``folder``: of submitit's files. ``script``: the batch script. ``task``: the function of :mod:`.task` that each task
    calls, with ``argument``.
    """

    folder: Path
    script: str
    task: str
    argument: str


@dataclass(frozen=True, slots=True)
class Elements:
    """The elements of a job array. ``count``: how many; ``at_once``: how many of them may run at once; None: all.

    ``pack``: how several runs share an element; None: each has its own.
    """

    count: int
    at_once: int | None = None
    pack: Pack | None = None


def make_request(
    plan: Plan,
    place: SubmissionDir | ArrayDir,
    elements: Elements | None = None,
    *,
    excluded_nodes: Collection[str] = (),
    after: Sequence[str] = (),
    singleton: bool = False,
) -> Request:
    """The request of a run, or of several that request the same: one task per node, which runs the node agent.

    Args:
        plan: the run's plan; of several runs, any of theirs.
        place: the submission of the run; of several, their array, with a link to the submission of each.
        elements: of the array.
        excluded_nodes: nodes that no job must get, in addition to those that the plan excludes.
        after: jobs that must end first.
        singleton: whether the run had an earlier job; whatever its state, the two must not run at once.
    """
    pack = elements.pack if elements is not None else None
    owner = place.run if isinstance(place, SubmissionDir) else place
    options = {
        **_options(plan, excluded_nodes, dependency_of(plan, after, singleton=singleton), pack),
        # The run's id in the job's name is how the job of a killed submission is found.
        "job-name": job_name(plan.spec.name, owner.id),
        "chdir": str(owner.path),
        "output": f"{place.submitit}/%j_0_log.out",
    }
    if isinstance(place, SubmissionDir):
        return Request(place.submitit, _script(plan, place, options, pack), "run_node", str(place.path))
    assert elements is not None
    folder = f"{place.elements}/%a/submitit" if pack is None else place.submitit
    options |= {
        "array": f"0-{elements.count - 1}" + (f"%{elements.at_once}" if elements.at_once else ""),
        "output": f"{folder}/%A_%a_0_log.out",
    }
    task = "run_element" if pack is None else "run_packed"
    return Request(place.submitit, _script(plan, place, options, pack), task, str(place.elements))


def _script(plan: Plan, place: SubmissionDir | ArrayDir, options: dict[str, Any], pack: Pack | None) -> str:
    """The batch script with these options of sbatch."""
    array, owner = (None, place.run) if isinstance(place, SubmissionDir) else (place, place)
    # Words of shell, which are different in each element of an array: the submission, the directory of the run's
    # attempts, the folder of the files of submitit, the id of the job.
    submission, folder, job = shlex.quote(str(place.path)), shlex.quote(str(place.submitit)), "${SLURM_JOB_ID:-}"
    attempts, pickles = shlex.quote(f"{owner.path}/attempts"), folder
    if array is not None:
        submission, job = '"$slurmtrain_submission"', "${slurmtrain_job}"
        attempts, folder = '"${slurmtrain_submission%/submissions/*}"/attempts', f"{submission}/submitit"
        if pack is not None:
            # The folders of its first run. The array's own folder has files of all jobs.
            folder = f'{shlex.quote(str(array.elements))}/"${{SLURM_ARRAY_TASK_ID:-}}.0"/submitit'
    profile = plan.spec.network.profile
    others = list(enumerate(plan.components))[1:]
    text: str = (
        shell_templates()
        .get_template("batch.sh.j2")
        .render(
            options=_sbatch_lines(options),
            components=[_sbatch_lines(_component_options(part, number, owner.id)) for number, part in others],
            array=array,
            run=owner,
            pack=pack,
            plan_hash=plan.hash,
            pickles=pickles,
            folder=folder,
            job=job,
            attempts=attempts,
            profile=load_profile(profile).setup if profile else (),
            several_nodes=plan.spec.resources.allocated.max > 1,
            srun=_srun(plan, place, pack, task_command(shlex.join(own_python()), folder)),
            **setup_values(plan, submission, f'{attempts}/"{job}.${{SLURM_RESTART_COUNT:-0}}"'),
        )
    )
    return text


def signal_lead_s(plan: Plan) -> int:
    """How long before the time limit Slurm warns the job, in seconds."""
    lead, limit_s = plan.spec.requeue.lead, plan.spec.resources.time
    if lead is not None:
        return lead
    return SIGNAL_LEAD_S if limit_s is None else max(_LEAST_LEAD_S, min(SIGNAL_LEAD_S, int(limit_s / 10)))


def dependency_of(plan: Plan, after: Sequence[str], *, singleton: bool = False) -> str:
    """What a job waits for, as sbatch's ``--dependency`` has it; empty: nothing.

    Args:
        plan: its plan, which may have such an option of its own.
        after: jobs that must end first.
        singleton: whether the run had an earlier job.
    """
    own = str(named_options(plan.spec.slurm).get("dependency") or "")
    # Slurm runs one job per name and user at a time (sbatch(1), --dependency=singleton).
    return ",".join(filter(None, (own, describe_after(after), "singleton" if singleton else "")))


def _options(plan: Plan, excluded_nodes: Collection[str], dependency: str, pack: Pack | None) -> dict[str, Any]:
    """The options of sbatch by their long names, without those that name files; the plan's own outrank others."""
    first = plan.components[0]
    resources, own = first.spec.resources, named_options(first.spec.slurm)
    if dependency:
        own["dependency"] = dependency
    if excluded_nodes:
        own["exclude"] = compress_hostlist({*expand_hostlist(str(own.get("exclude", ""))), *excluded_nodes})
    options = {
        **_resource_options(first, pack),
        "nodes": str(resources.allocated),
        "time": math.ceil(resources.time / 60) if resources.time else None,
        "signal": f"USR2@{signal_lead_s(first)}",
        "open-mode": "append",
        # Slurm itself requeues a preempted job that may be requeued, whatever the run's policy says.
        "requeue" if plan.spec.requeue.enabled else "no-requeue": True,
        "propagate": _PROPAGATED,
        **({"no-kill": True} if resources.elastic else {}),
        **own,
    }
    if _is_range(first):
        # Only srun gets it: given to sbatch, Slurm computes the number of tasks from the minimum number of nodes, and
        # allocates no more nodes than that (measured on 22.05).
        del options["ntasks-per-node"]
    return options


def _component_options(part: Plan, number: int, run_id: str) -> dict[str, Any]:
    """The options of a component of a heterogeneous job after the first: Slurm takes others from that (slurm_opt.c)."""
    return {
        # A name of its own: '--dependency=singleton' holds for all components. With the same name this one would wait
        # for the end of the first one, which starts together with it.
        "job-name": f"{part.spec.name}-{number}-{run_id}",
        "nodes": part.spec.resources.nodes.max,
        **_resource_options(part),
        **{name: value for name, value in named_options(part.spec.slurm).items() if name in OPTIONS_OF_COMPONENTS},
    }


def _resource_options(plan: Plan, pack: Pack | None = None) -> dict[str, Any]:
    """What each node is to have: for the agent of a run, or of each run of a pack."""
    resources = plan.spec.resources
    runs, gpu_sets = (1, 1) if pack is None else (pack.runs, pack.gpu_sets)
    return {
        "ntasks-per-node": runs,
        "cpus-per-task": resources.cpus_per_node,
        "gpus-per-node": resources.gpu_option(gpu_sets),
        "mem": None if resources.mem is None else write_node_memory(resources.mem * runs),
    }


def _sbatch_lines(options: dict[str, Any]) -> list[str]:
    """Options as lines of ``#SBATCH`` hold them: a backslash is an escape there, also in quotes (Slurm's opt.c)."""
    return [
        f"--{name}" if value is True else f"--{name}={shlex.quote(str(value).replace(_ESCAPE, _ESCAPE * 2))}"
        for name, value in sorted(options.items())
        if value is not None
    ]


def _is_range(plan: Plan) -> bool:
    """Whether the job may get different numbers of nodes."""
    nodes = plan.spec.resources.allocated
    return nodes.min < nodes.max


def _srun(plan: Plan, place: SubmissionDir | ArrayDir, pack: Pack | None, command: str) -> str:
    """The srun that starts the node agents, each by a ``command``."""
    options = [_srun_options(each) for each in plan.components]
    if len(options) > 1:
        for number, (part, of_part) in enumerate(zip(plan.components, options, strict=True)):
            nodes = part.spec.resources.nodes.max
            # Seen on 24.11: without the numbers, a component of two nodes after one of a single node has one task; on
            # 22.05 it has two.
            of_part[:0] = [f"--het-group={number}", f"--nodes={nodes}", f"--ntasks={nodes}"]
    if isinstance(place, ArrayDir):
        # Slurm follows the link, so each run has the output of its own job: %A is the array's id, %a the element's
        # index, %t the task.
        log = "%a/submitit/%A_%a_%t_log.out"
        if pack is not None:
            # Its runs go on when the agent of one of them has failed, or has ended long before the others.
            options[0] += ["--kill-on-bad-exit=0", "--wait=0"]
            log = "%a.%t/submitit/%A_%a_0_log.out"
        options[0].append(f"--output={place.elements}/{log}")
    first = shlex.join(["srun", "--unbuffered", "--output", f"{place.submitit}/%j_%t_log.out", *options[0]])
    log_of_part = f'{shlex.quote(str(place.submitit))}/"${{SLURM_JOB_ID}}_%t_log.out"'
    others = [f"{shlex.join([*of_part, '--unbuffered'])} --output {log_of_part}" for of_part in options[1:]]
    return " : ".join(f"{part} {command}" for part in (first, *others))


def _srun_options(plan: Plan) -> list[str]:
    resources = plan.spec.resources
    return [
        # The last of two options wins: the spec's come first.
        *plan.spec.slurm.get(SRUN, ()),
        # Variables exported by setup reach the tasks even if a site's sbatch exports nothing, which srun would inherit
        # (sbatch(1), --export).
        "--export=ALL",
        # A run that can continue on fewer nodes survives the loss of an agent or a node.
        *(("--kill-on-bad-exit=0", "--no-kill") if resources.elastic else ("--kill-on-bad-exit=1",)),
        f"--wait={0 if resources.elastic else _LAST_TASKS_S}",
        # Since Slurm 22.05, srun no longer inherits it from sbatch (srun(1)).
        f"--cpus-per-task={resources.cpus_per_node}",
        *(("--ntasks-per-node=1",) if _is_range(plan) else ()),
    ]
