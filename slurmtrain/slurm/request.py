"""The Request: exactly what one attempt requests from Slurm. The same plan always gives the same batch script."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmtrain.model.hostlist import compress_hostlist, expand_hostlist
from slurmtrain.model.run.layout import SubmissionDir
from slurmtrain.model.run.root import ArrayDir
from slurmtrain.model.spec.plan import Plan
from slurmtrain.model.spec.resources import ResourcesSpec
from slurmtrain.model.spec.sbatch import SRUN, named_options
from slurmtrain.model.spec.sweep import Pack
from slurmtrain.model.spec.values import write_node_memory
from slurmtrain.runtime.environment import network_profile, variables
from slurmtrain.runtime.setup.script import setup_values, shell_templates
from slurmtrain.runtime.task import command as task_command
from slurmtrain.slurm.components import in_line, join_parts, part_options, sbatch_lines, step_parts
from slurmtrain.slurm.dependency import describe_after, join_dependencies
from slurmtrain.slurm.job_names import job_name
from slurmtrain.system.interpreter import UTF8, own_python

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
# Options that submitit's executor knows by name, with underscores; the others are passed through literally.
_NAMED = frozenset(
    {"account", "comment", "constraint", "dependency", "exclude", "exclusive", "gres", "mail_type", "mail_user",
     "nodelist", "partition", "qos"}
)  # fmt: skip
# In the shell of an element of a job array: its job's id, and the folder of submitit in its run.
_ELEMENT_JOB = "${slurmtrain_job}"
_ELEMENT_ATTEMPTS = '"${slurmtrain_submission%/submissions/*}"/attempts'
_ELEMENT_FOLDER = '"$slurmtrain_submission"/submitit'
# The runs of a pack go on when the agent of one of them has failed, or has ended long before the others.
_PACK_SRUN = ("--kill-on-bad-exit=0", "--wait=0")


@dataclass(frozen=True, slots=True)
class Request:
    """Parameters of submitit's SlurmExecutor, and the folder for its files.

    ``parts``: the other parts of the srun of a heterogeneous job (:func:`.components.step_parts`).
    """

    folder: Path
    parameters: Mapping[str, Any]
    parts: Sequence[str] = ()

    def script(self, command: str) -> str:
        """The batch script that submitit sends for these parameters; needs no Slurm on this machine.

        ``command``: what srun runs, which submitit knows only once it has pickled the task.
        """
        # A private function of submitit, but the only way to get the text without calling sbatch.
        from submitit.slurm.slurm import _make_sbatch_string

        return str(_make_sbatch_string(command=join_parts(command, self.parts), folder=self.folder, **self.parameters))


def make_request(
    plan: Plan,
    submission: SubmissionDir,
    excluded_nodes: Collection[str] = (),
    *,
    singleton: bool = False,
    after: Sequence[str] = (),
) -> Request:
    """The request of a plan to Slurm: one task per node, which runs the node agent.

    Args:
        plan: the plan to run.
        submission: the directory for its files.
        excluded_nodes: nodes that the job must not get, in addition to those that the plan excludes.
        singleton: whether the run had an earlier job; whatever its state, the two must not run at once.
        after: jobs that must end first.
    """
    run = submission.run
    # The run's id in the job's name is how the job of a killed submission is found.
    first, *others = plan.components
    # sbatch reads its options up to the first command: options of other components must precede the prologue.
    lines = sbatch_lines([each.spec for each in others], run.id)
    name = job_name(plan.spec.name, run.id)
    job = _Job(name, run.path, lines + prologue(plan, submission), epilogue(plan, submission))
    options = _options(first, excluded_nodes, dependency_of(plan, after, singleton=singleton))
    parameters = _parameters(first, job, options)
    if not others:
        return Request(folder=submission.submitit, parameters=parameters)
    parts = [
        [*part_options(number, each.spec.resources.nodes.max), *_srun_options(each)]
        for number, each in enumerate(plan.components)
    ]
    parameters["srun_args"] = parts[0]
    return Request(submission.submitit, parameters, step_parts(parts[1:], submission.submitit))


@dataclass(frozen=True, slots=True)
class Restrictions:
    """What an attempt adds to the restrictions of its plan.

    ``excluded_nodes``: nodes that the job must not get. ``after``: jobs that must end first.
    """

    excluded_nodes: Collection[str] = ()
    after: Sequence[str] = ()


_UNRESTRICTED = Restrictions()


def make_array_request(
    plan: Plan,
    array: ArrayDir,
    count: int,
    *,
    at_once: int | None = None,
    restrictions: Restrictions = _UNRESTRICTED,
    pack: Pack | None = None,
) -> Request:
    """The request of a job array to Slurm; each element is the job of a run, or of a pack of runs.

    Args:
        plan: the plan of any of the runs, which request the same.
        array: the directory of its files, with a link for each run.
        count: how many elements it has.
        at_once: how many of them may run at once; None: all.
        restrictions: restrictions of its elements, in addition to the plan's.
        pack: how the runs of an element share its job; None: each element has one run.
    """
    job = _Job(
        job_name(plan.spec.name, array.id),
        array.path,
        array_prologue(plan, array, packed=pack is not None),
        array_epilogue(plan) if pack is None else pack_epilogue(plan, array),
    )
    dependency = dependency_of(plan, restrictions.after)
    parameters = _parameters(plan, job, _options(plan, restrictions.excluded_nodes, dependency))
    # Slurm follows the link, so each run has the output of its own job: %A is the array's id, %a the element's index,
    # %t the task.
    log, batch_log = f"{array.elements}/%a/submitit/%A_%a_%t_log.out", f"{array.elements}/%a/submitit/%A_%a_0_log.out"
    if pack is not None:
        parameters |= _shared_by(pack, plan.spec.resources)
        log, batch_log = f"{array.elements}/%a.%t/submitit/%A_%a_0_log.out", f"{array.submitit}/%A_%a_0_log.out"
        parameters["srun_args"] = [*parameters["srun_args"], *_PACK_SRUN]
    parameters["srun_args"] = [*parameters["srun_args"], f"--output={log}"]
    parameters["additional_parameters"] |= {
        "array": f"0-{count - 1}" + (f"%{at_once}" if at_once else ""),
        "output": batch_log,
    }
    return Request(folder=array.submitit, parameters=parameters)


def _shared_by(pack: Pack, resources: ResourcesSpec) -> dict[str, Any]:
    """Parameters of submitit's executor for a job with a task for each run of a pack."""
    return {
        "ntasks_per_node": pack.runs,
        "gpus_per_node": resources.gpu_option(pack.gpu_sets),
        "mem": _memory(resources, pack.runs),
    }


def _memory(resources: ResourcesSpec, runs: int = 1) -> str | None:
    return None if resources.mem is None else write_node_memory(resources.mem * runs)


@dataclass(frozen=True, slots=True)
class _Job:
    """What the batch script of a plan has of its own: the job's name, its directory, the lines around srun."""

    name: str
    directory: Path
    prologue: str
    epilogue: str


def _parameters(plan: Plan, job: _Job, options: dict[str, Any]) -> dict[str, Any]:
    """The parameters of submitit's executor. ``options``: the plan's own for sbatch, with the attempt's."""
    resources = plan.spec.resources
    parameters: dict[str, Any] = {
        "job_name": job.name,
        "nodes": resources.allocated.max,
        **({} if _is_range(resources) else {"ntasks_per_node": 1}),
        "cpus_per_task": resources.cpus_per_node,
        "gpus_per_node": resources.gpu_option(),
        "mem": _memory(resources),
        "time": math.ceil(resources.time / 60) if resources.time else None,
        "signal_delay_s": _signal_lead_s(plan),
        "stderr_to_stdout": True,
        "wckey": options.pop("wckey", None),
        "setup": job.prologue.rstrip("\n").split("\n"),
        "teardown": job.epilogue.rstrip("\n").split("\n"),
        "srun_args": _srun_options(plan),
    }
    # Slurm itself requeues a preempted job that may be requeued, whatever the run's policy says.
    literal: dict[str, Any] = {
        "chdir": str(job.directory),
        "requeue" if plan.spec.requeue.enabled else "no-requeue": True,
        "propagate": _PROPAGATED,
    }
    if resources.elastic:
        # submitit needs a number for "nodes"; if an option is repeated, sbatch takes the last one, and these come last.
        literal.update({"nodes": str(resources.allocated), "no-kill": True})
    for name, value in options.items():
        named = name.replace("-", "_")
        if named in _NAMED:
            parameters[named] = value
        else:
            literal[name] = value
    parameters["additional_parameters"] = literal
    return parameters


def dependency_of(plan: Plan, after: Sequence[str], *, singleton: bool = False) -> str:
    """What a job waits for, as sbatch's ``--dependency`` has it; empty: nothing.

    Args:
        plan: its plan, which may have such an option of its own.
        after: jobs that must end first.
        singleton: whether the run had an earlier job.
    """
    own = str(named_options(plan.spec.slurm).get("dependency") or "")
    # Slurm runs one job per name and user at a time (sbatch(1), --dependency=singleton).
    return join_dependencies(own, describe_after(after), "singleton" if singleton else "")


def _options(plan: Plan, excluded_nodes: Collection[str], dependency: str) -> dict[str, Any]:
    """The plan's own sbatch options, by their long names, with options that an attempt adds."""
    options = named_options(plan.spec.slurm)
    if dependency:
        options["dependency"] = dependency
    if excluded_nodes:
        options["exclude"] = compress_hostlist({*expand_hostlist(str(options.get("exclude", ""))), *excluded_nodes})
    return {name: in_line(value) for name, value in options.items()}


def _is_range(resources: ResourcesSpec) -> bool:
    """Whether the job may get different numbers of nodes.

    In this case only srun gets --ntasks-per-node: given to sbatch, Slurm computes the number of tasks from the minimum
    number of nodes, and allocates no more nodes than that (measured on 22.05).
    """
    return resources.allocated.min < resources.allocated.max


def _srun_options(plan: Plan) -> list[str]:
    """Options of the srun that starts the node agents."""
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
        *(("--ntasks-per-node=1",) if _is_range(resources) else ()),
    ]


def _signal_lead_s(plan: Plan) -> int:
    """How long before the time limit Slurm warns the job, in seconds."""
    lead, limit_s = plan.spec.requeue.lead, plan.spec.resources.time
    if lead is not None:
        return lead
    return SIGNAL_LEAD_S if limit_s is None else max(_LEAST_LEAD_S, min(SIGNAL_LEAD_S, int(limit_s / 10)))


def prologue(plan: Plan, submission: SubmissionDir) -> str:
    """The shell lines between the options and srun."""
    run, folder = submission.run, shlex.quote(str(submission.submitit))
    return _prologue(
        plan,
        shlex.quote(str(submission.path)),
        shlex.quote(str(run.attempts)),
        run_id=run.id,
        plan_hash=plan.hash,
        variables={"SLURMTRAIN_RUN_ID": run.id, "SLURMTRAIN_RUN_DIR": str(run.path)},
        pickles=folder,
        folder=folder,
        job="${SLURM_JOB_ID:-}",
    )


def array_prologue(plan: Plan, array: ArrayDir, *, packed: bool = False) -> str:
    """The shell lines between the options and srun, in each element of a job array.

    Args:
        plan: the plan of any of its runs.
        array: its directory.
        packed: whether each element is the job of several runs.
    """
    return _prologue(
        plan,
        '"$slurmtrain_submission"',
        _ELEMENT_ATTEMPTS,
        array_id=array.id,
        elements=str(array.elements),
        packed=packed,
        pickles=shlex.quote(str(array.submitit)),
        folder=_pack_folder(array) if packed else _ELEMENT_FOLDER,
        job=_ELEMENT_JOB,
    )


def _prologue(plan: Plan, submission: str, attempts: str, **values: Any) -> str:
    """``submission``, ``attempts``: the directories of the submission and of its run's attempts, as words of shell."""
    setup = setup_values(plan, submission, f'{attempts}/"{values["job"]}.${{SLURM_RESTART_COUNT:-0}}"')
    several = plan.spec.resources.allocated.max > 1
    text: str = (
        shell_templates()
        .get_template("prologue.sh.j2")
        .render(
            profile=_profile_lines(plan),
            invite=f"{shlex.join(own_python())} -m slurmtrain.runtime.preflight.announce" if several else "",
            **{"packed": False, **setup, **values},
        )
    )
    return text


def epilogue(plan: Plan, submission: SubmissionDir) -> str:
    """The shell lines after srun."""
    return _epilogue(plan, shlex.quote(str(submission.run.attempts)), "$SLURM_JOB_ID")


def array_epilogue(plan: Plan) -> str:
    """The shell lines after srun, in each element of a job array."""
    return _epilogue(plan, _ELEMENT_ATTEMPTS, _ELEMENT_JOB)


def pack_epilogue(plan: Plan, array: ArrayDir) -> str:
    """The shell lines after srun, in each element of a job array whose elements are packs."""
    return _epilogue(plan, "", _ELEMENT_JOB, elements=str(array.elements))


def _epilogue(plan: Plan, attempts: str, job: str, elements: str = "") -> str:
    template = shell_templates().get_template("epilogue.sh.j2")
    text: str = template.render(
        attempts=attempts, job=job, elements=elements, setup=plan.spec.setup, marker=variables.SETUP_OF
    )
    return text


def _profile_lines(plan: Plan) -> tuple[str, ...]:
    """Shell lines of the plan's network profile, which run before the tasks start."""
    return network_profile.load(plan.spec.network.profile).setup if plan.spec.network.profile else ()


def agent_command(python: str, folder: Path) -> str:
    """What each task runs: the entry point of submitit's tasks, which calls the node agent."""
    return task_command(shlex.join([python, *UTF8]), shlex.quote(str(folder)))


def element_command(python: str) -> str:
    """What each task of an element of a job array runs: that entry point, in the folder of the element's run."""
    return task_command(shlex.join([python, *UTF8]), _ELEMENT_FOLDER)


def pack_command(python: str, array: ArrayDir) -> str:
    """What each task of a pack runs: that entry point, in the folder of the first of its runs."""
    return task_command(shlex.join([python, *UTF8]), _pack_folder(array))


def _pack_folder(array: ArrayDir) -> str:
    """In the shell: where submitit keeps the files of a pack's job. The array's own folder has files of all jobs."""
    return f'{shlex.quote(str(array.elements))}/"${{SLURM_ARRAY_TASK_ID:-}}.0"/submitit'
