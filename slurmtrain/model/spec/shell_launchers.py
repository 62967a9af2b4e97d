"""Launchers where slurmtrain does not see them at once: as the program of a command, or inside a shell script.

Looked at shallowly: lines of the text of a shell, without what its variables hold or which branch is taken.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import NamedTuple

from slurmtrain.model.spec.launcher import NONE, RANKS, SHELLS, command_without_env, split_command

_STEPS = frozenset({"srun", "sbatch", "salloc"})
_MPI = frozenset({"mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun"})
# Where a command of a shell begins: a line, what separates commands, an assignment to a variable, a quote.
_BEGIN = (
    r"""(?:^|[;&|({`"'=]|\b(?:exec|time|nohup|then|do|else|env|srun|numactl)\s)\s*"""
    r"(?:[A-Za-z_]\w*=\S*\s+)*(?:[-\w$./{}]*/)?"
)
_CALL = re.compile(
    rf"{_BEGIN}(?P<plain>torchrun|deepspeed|accelerate-launch|srun|mpirun|mpiexec(?:\.hydra)?|orterun)(?=\s|$|[\"'\\])"
    r"|-m\s+(?P<module>torch\.distributed\.(?:run|launch)|accelerate\.commands\.launch|deepspeed\.launcher\.runner)\b"
    r"|\b(?P<accelerate>accelerate\s+launch)\b"
)
# Lines that only mention a program.
_MENTION = re.compile(
    r"\s*(?:#|echo\b|printf\b|module\b|which\b|type\b|command\s+-v\b|(?:\S*\s-m\s+)?pip3?\b|conda\b|uv\b)"
)
# Looking for calls takes time that grows with the square of a line's length.
_LONGEST_LINE = 2000
_TASK = re.compile(r"\$\{?SLURM_(?:PROCID|LOCALID|NTASKS|NPROCS)\b")
# A Python script that trains with others as soon as there is a rank, also alone: os.environ.get("RANK", -1) != -1.
_RANK_ALONE = re.compile(
    r"""environ\.get\(\s*['"](?:RANK|LOCAL_RANK)['"]\s*,\s*['"]?-1|['"](?:RANK|LOCAL_RANK)['"]\s+in\s+os\.environ"""
)


class LauncherCall(NamedTuple):
    """A launcher that the text of a shell calls: its ``name``, and the ``line`` from 1."""

    name: str
    line: int


def shell_text(command: str) -> str | None:
    """The text that a command hands to a shell (``bash -c``); None if it does not."""
    words = command_without_env(split_command(command))
    if len(words) < 3 or PurePath(words[0]).name not in SHELLS:
        return None
    at = next((i for i, word in enumerate(words[1:], 1) if re.fullmatch(r"-[a-z]*c", word)), len(words))
    return words[at + 1] if at + 1 < len(words) else None


def shell_script(command: str) -> str | None:
    """The path of the shell script that a command runs; None if it runs none, as far as its words tell."""
    words = command_without_env(split_command(command))
    if not words:
        return None
    if PurePath(words[0]).name not in SHELLS:
        return words[0] if words[0].endswith((".sh", ".bash", ".slurm", ".sbatch")) else None
    rest = [word for word in words[1:] if not word.startswith("-")]
    return rest[0] if rest and shell_text(command) is None else None


def calls_in(text: str) -> list[LauncherCall]:
    """The launchers that the text of a shell calls, each once."""
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > _LONGEST_LINE or _MENTION.match(line):
            continue
        for match in _CALL.finditer(line.split(" #")[0]):
            name = match["plain"] or match["module"] or "accelerate launch"
            if name != "srun" or "--overlap" not in line:
                lines.setdefault(name, number)
    return [LauncherCall(name, line) for name, line in lines.items()]


def problem_of_calls(calls: Sequence[LauncherCall], launcher: str, ranks: int) -> tuple[LauncherCall, str] | None:
    """The first call of a launcher that must not be called there, and what to do; None if all are right.

    Args:
        calls: the calls in the text that each rank runs, or each node.
        launcher: who starts the ranks.
        ranks: how many ranks there are.
    """
    for call in calls:
        if call.name == "srun":
            return call, f"which {_WAITS}: leave srun and its options out, slurmtrain starts the command on each node"
        if launcher == RANKS and ranks > 1:
            other = NONE if call.name in _MPI else "node"
            return call, (
                f"which starts ranks itself, and with 'launcher: ranks' it would be started {ranks} times: set "
                f"'launcher: {other}' to start it once per node"
            )
    return None


def refused_programs(command: str, launcher: str) -> Iterator[str]:
    """What is wrong with a command that begins with srun, sbatch or mpirun, as sentences without a full stop."""
    words = command_without_env(split_command(command))
    program = PurePath(words[0]).name if words else ""
    rest = _program_behind(words)
    instead = f"write {shlex.join(rest)!r}" if rest else f"leave {program} and its options out"
    counts = "'resources.nodes' and 'resources.procs_per_node' say how many processes there are"
    if program == "srun" and not (launcher != RANKS and "--overlap" in words):
        yield f"'srun' inside a job {_WAITS}: {instead}; {counts}"
    elif program in _STEPS - {"srun"}:
        yield f"'{program}' would submit another job, which is what slurmtrain does: {instead}; {counts}"
    elif program in _MPI and launcher == RANKS:
        yield (
            f"'{program}' starts ranks itself: {instead}, and slurmtrain starts it; {counts}; or set 'launcher: none' "
            f"to start {program} once per node"
        )


_WAITS = "waits for resources that the run's own step holds"


def _program_behind(words: Sequence[str]) -> list[str]:
    """The command that srun or mpirun is to start; empty if that cannot be told."""
    for at, word in enumerate(words[1:], 1):
        name = PurePath(word).name
        is_program = re.fullmatch(r"python[\d.]*|torchrun|deepspeed|accelerate", name) or name in SHELLS
        is_script = not word.startswith("-") and word.endswith((".sh", ".py"))
        is_value = words[at - 1].startswith("-") and "=" not in words[at - 1]
        if is_program or (is_script and not is_value):
            interpreter = {".sh": "bash", ".py": "python"}.get(PurePath(word).suffix) if "/" not in word else None
            return [interpreter, *words[at:]] if interpreter else [*words[at:]]
    return []


def reads_task_variables(text: str) -> int | None:
    """The line of a shell's text that reads which task this is, which commands per node do not have; None: none."""
    lines = (line.split(" #")[0] for line in text.splitlines())
    return next((number for number, line in enumerate(lines, 1) if _TASK.search(line)), None)


def is_distributed_alone(source: str) -> bool:
    """Whether a Python script seems to train with others as soon as it has a rank, also if it is the only one."""
    return bool(_RANK_ALONE.search(source))
