"""What the scripts of a command call: launchers in a shell script, which would be started once for each rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from slurmtrain.errors import NotAvailable
from slurmtrain.model.spec.launcher import (
    RANKS,
    calls_in,
    is_distributed_alone,
    problem_of_calls,
    reads_task_variables,
    shell_script,
    shell_text,
)
from slurmtrain.model.spec.plan import Plan
from slurmtrain.ops.submit.script import find_script

# A script is far shorter; what is longer is not read.
_LONGEST = 1 << 20


def check_shell_script(plan: Plan) -> None:
    """Check that the shell script of a command starts no ranks of its own in each rank.

    Where the spec itself says who starts the ranks, that is only noted: not every line of a script is run.

    Raises:
        NotAvailable: it does.
    """
    if not plan.template.get("launcher") and (problem := _problem(plan)):
        raise NotAvailable(problem)


def notes_on_scripts(plan: Plan) -> Iterator[str]:
    """What in the scripts of a command suits its launcher badly, as sentences without a full stop."""
    if problem := _problem(plan):
        yield problem
    name, text = _shell_of(plan)
    line = reads_task_variables(text) if plan.spec.per_node else None
    if line is not None:
        yield (
            f"{name}, line {line}, reads SLURM_PROCID, SLURM_LOCALID or SLURM_NTASKS, which a command that is started "
            "once per node does not have: its node is SLURM_NODEID, of SLURM_NNODES"
        )
    script = find_script(plan)
    alone = not plan.spec.per_node and plan.spec.resources.most_ranks.world_size == 1
    if alone and script is not None and not script.module and is_distributed_alone(_read(script.path)):
        yield (
            f"{script.path.name} seems to train with others as soon as RANK is set, which it also is for a single "
            "process: set 'launcher: none' if it is to train alone"
        )


def _problem(plan: Plan) -> str:
    if shell_text(plan.spec.command) is not None:
        return ""  # the spec is refused
    name, text = _shell_of(plan)
    spec = plan.spec
    problem = problem_of_calls(calls_in(text), spec.launcher or RANKS, spec.resources.most_ranks.world_size)
    return f"{name}, line {problem[0].line}, calls {problem[0].name}, {problem[1]}" if problem else ""


def _shell_of(plan: Plan) -> tuple[str, str]:
    """What a shell is to run, and its name for a person; both empty if the command runs none."""
    text = shell_text(plan.spec.command)
    if text is not None:
        return "the command", text
    path = shell_script(plan.spec.command)
    if path is None or "{" in path:
        return "", ""
    return Path(path).name, _read(Path(plan.workdir, path))


def _read(path: Path) -> str:
    """The text of a script; empty if it cannot be read, or is none."""
    try:
        # Opening a pipe would wait for its writer.
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            data = file.read(_LONGEST + 1)
    except OSError:
        return ""
    return data.decode(errors="replace") if len(data) <= _LONGEST and b"\0" not in data else ""
