"""What of this command's environment a job gets: options that say where it goes, and variables of its ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from slurmtrain.model.environment import (
    GPU_VARIABLES,
    SBATCH_PREFIX,
    describe_variables,
    place_options,
    places,
    telling,
    without_effect,
)
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.experiment.slurm_options import OPTIONS, named_options
from slurmtrain.runtime.environment.variables import scrubbed


def counting_variables(
    plan: Plan, earlier: Mapping[str, str] | None = None, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The variables of this environment that say where the job of a plan goes, by name.

    Args:
        plan: the plan.
        earlier: the variables of the attempt before it, which also hold for a job that is submitted again without a
            person.
        environ: the result of :func:`of_sbatch`, if the plans of a whole sweep are asked for.
    """
    environ = of_sbatch() if environ is None else environ
    return places({**(earlier or {}), **environ}, named_options(plan.spec.slurm))


def of_sbatch() -> dict[str, str]:
    """The variables of this environment that sbatch follows."""
    return {name: value for name, value in os.environ.items() if name.startswith(SBATCH_PREFIX)}


def telling_variables(plan: Plan) -> dict[str, str]:
    """The variables of this environment that decide what the ranks of a plan run, or how, by name."""
    return telling(os.environ, plan.spec.env)


def placed(plan: Plan, variables: Mapping[str, str] | None = None) -> Plan:
    """The plan with options for where its job goes, which the spec leaves open, as it is asked of Slurm.

    Args:
        plan: the plan.
        variables: the variables of :func:`counting_variables`, by default this environment's.
    """
    options = place_options(counting_variables(plan) if variables is None else variables)
    if not options:
        return plan
    # The spec's options last: a variable counts only where the spec says nothing.
    return plan.asking({**options, **plan.spec.slurm})


def environment_of_job(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment that sbatch hands on: this machine's GPUs are not the job's."""
    return {name: value for name, value in scrubbed(environ).items() if name not in GPU_VARIABLES}


def notes_on_ranks(plans: Sequence[Plan]) -> list[str]:
    """A line at most with the variables of this environment that decide what ranks run, or how."""
    reach = describe_variables({name: value for plan in plans for name, value in telling_variables(plan).items()})
    return [f"ranks get from this environment: {reach}"] if reach else []


def notes(plans: Sequence[Plan]) -> list[str]:
    """What a person should know who submits these plans from here: a line at most for what counts and what does not."""
    environ = of_sbatch()
    places = (counting_variables(plan, environ=environ) for plan in plans)
    counts = describe_variables({name: value for each in places for name, value in each.items()})
    # The runs of a sweep mostly set the same options, which are then looked at once.
    owns: dict[frozenset[str], None] = {}
    for plan in plans:
        resources = plan.spec.resources
        keys = {"resources.mem": resources.mem is not None, "resources.time": resources.time is not None,
                "resources.gpus_per_node": resources.most_gpus > 0}  # fmt: skip
        owns[frozenset({*named_options(plan.spec.slurm), *(key for key, is_set in keys.items() if is_set)})] = None
    lost = dict.fromkeys(text for own in owns for text in without_effect(os.environ, own, OPTIONS))
    parts = [f"from this environment: {counts}"] if counts else []
    return [*parts, *([f"without effect in this environment: {', '.join(lost)}"] if lost else [])]
