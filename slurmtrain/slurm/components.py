"""What the batch script of a heterogeneous job has for each of its components after the first.

Seen on 22.05: a step over all components is one srun with a part for each, ``--het-group=0 ... : --het-group=1 ...``:
its tasks and nodes are counted through, in the order of the components, and SLURM_JOB_ID is the leader's everywhere.
But ``%j`` in the name of a log is the id of the component's own job, and SLURM_STEP_NODELIST is sorted by name.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmtrain.model.spec.resources import OPTIONS_OF_COMPONENTS
from slurmtrain.model.spec.sbatch import named_options
from slurmtrain.model.spec.spec import Spec
from slurmtrain.model.spec.values import write_node_memory


def sbatch_lines(others: Sequence[Spec], run_id: str) -> str:
    """The lines of a batch script that request components after the first, which precede all of its commands.

    Args:
        others: the requests of these components.
        run_id: the run's id, which the names of its jobs end in.
    """
    lines = []
    for number, spec in enumerate(others, start=1):
        resources = spec.resources
        options: dict[str, Any] = {
            # A name of its own: '--dependency=singleton' holds for all components. With the same name this one would
            # wait for the end of the first one, which starts together with it.
            "job-name": f"{spec.name}-{number}-{run_id}",
            "nodes": resources.nodes.max,
            "ntasks-per-node": 1,
            "cpus-per-task": resources.cpus_per_node,
            "gpus-per-node": resources.gpu_option(),
            "mem": None if resources.mem is None else write_node_memory(resources.mem),
            # What Slurm resets for each component; it takes the others from the first one (slurm_opt.c).
            **{name: value for name, value in named_options(spec.slurm).items() if name in OPTIONS_OF_COMPONENTS},
        }
        lines += [f"# component {number}", "#SBATCH hetjob", *_lines(options)]
    return "".join(f"{line}\n" for line in lines)


def in_line(value: Any) -> Any:
    """A ``value`` as a line of ``#SBATCH`` holds it: a backslash is an escape there, also in quotes (Slurm's opt.c)."""
    return value.replace("\\", "\\\\") if isinstance(value, str) else value


def _lines(options: Mapping[str, Any]) -> list[str]:
    return [
        f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={shlex.quote(str(in_line(value)))}"
        for name, value in sorted(options.items())
        if value is not None
    ]


def step_parts(others: Sequence[Sequence[str]], folder: Path) -> list[str]:
    """For each component after the first, the text before the command of its tasks in the srun over all components.

    Args:
        others: the options of srun for each of these components, including the ones from :func:`part_options`.
        folder: the directory of the logs.
    """
    log = f'{shlex.quote(str(folder))}/"${{SLURM_JOB_ID}}_%t_log.out"'
    return [f"{shlex.join([*options, '--unbuffered'])} --output {log}" for options in others]


def part_options(number: int, nodes: int) -> list[str]:
    """The options of srun for a part of the step: a task on each of the ``nodes`` of the component ``number``.

    Seen on 24.11: without the numbers, a component of two nodes after one of a single node has one task; on 22.05 it
    has two.
    """
    return [f"--het-group={number}", f"--nodes={nodes}", f"--ntasks={nodes}"]


def join_parts(command: str, parts: Sequence[str]) -> str:
    """What follows the options of the first component in the srun of a job: the ``command`` of tasks, for each part."""
    return " : ".join([command, *(f"{part} {command}" for part in parts)])
