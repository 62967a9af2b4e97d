"""Slurm's commands and their options: the only place that starts them, except for submitit's sbatch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from slurmtrain.errors import SlurmDown
from slurmtrain.runtime.environment.variables import scrubbed
from slurmtrain.system.files import file_identity, load_answer, store_answer

# Slurm's own commands give up after MessageTimeout (10 s by default, slurm.conf(5)) and some retries.
_TIMEOUT_S = 60.0
# For their help they read their configuration and load their plug-ins, and ask no daemon.
_HELP_S = 10.0
# A line such as "  -A, --account=name   charge job to specified account"; only it begins with an option.
_OPTION = re.compile(r"^\s+(?:-\w,?\s+)?--([A-Za-z0-9][\w-]*)", re.MULTILINE)
# Prefixes of variables that stand for options of Slurm's commands ("INPUT ENVIRONMENT VARIABLES" in each
# manual page): a user's own SQUEUE_FORMAT would change what is parsed here.
_OPTION_PREFIXES = ("SQUEUE_", "SACCT_", "SACCTMGR_", "SCANCEL_", "SCONTROL_", "SINFO_", "SPRIO_", "SSTAT_")


def command_environment() -> dict[str, str]:
    """This environment without variables that would change the format or scope of an answer."""
    environ = {name: value for name, value in scrubbed(os.environ).items() if not name.startswith(_OPTION_PREFIXES)}
    # Times as seconds since 1970, whatever the time zone; node and job names may contain any UTF-8 character.
    # Lists of an array's elements are cut after 64 characters otherwise (sacct(1), squeue(1)).
    return {**environ, "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C.UTF-8", "SLURM_BITSTR_LEN": "0"}


def is_installed(name: str) -> bool:
    """Whether this machine has the command on PATH."""
    return shutil.which(name) is not None


def run_command(
    *command: str,
    stdin: str = "",
    timeout_s: float | None = None,
    environ: Mapping[str, str] | None = None,
    errors_too: bool = False,
) -> str:
    """The standard output of one of Slurm's commands.

    Args:
        command: the command's name and arguments.
        stdin: its standard input.
        timeout_s: seconds that it may run, 60 by default.
        environ: its environment, by default the one of :func:`command_environment`. sbatch hands its own on to the job.
        errors_too: whether to return its standard error, too.

    Raises:
        SlurmDown: it does not exist, did not end in time, or failed; includes the errors that it printed.
    """
    name, timeout_s = command[0], timeout_s or _TIMEOUT_S
    try:
        completed = subprocess.run(
            command,
            env=command_environment() if environ is None else environ,
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError as error:
        raise SlurmDown(f"there is no {name} on this machine's PATH") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmDown(f"{name} did not answer within {timeout_s:.0f} s") from error
    if completed.returncode != 0:
        problem = extract_errors(completed.stderr.splitlines()) or f"exit code {completed.returncode}"
        raise SlurmDown(f"{name}: {problem}")
    return completed.stdout + (completed.stderr if errors_too else "")


def extract_errors(lines: Sequence[str]) -> str:
    """The errors in the output of a Slurm command, without the program's name; all of the output if none is marked.

    Slurm marks them as ``sbatch: error: ...``; repeated lines are kept once.
    """
    printed = [line.strip() for line in lines if line.strip()]
    errors = [line.split(": error: ", 1)[1] for line in printed if ": error: " in line] or printed
    return "; ".join(dict.fromkeys(errors))


def read_options(option: str, program: str = "sbatch") -> frozenset[str]:
    """The long options of one of Slurm's programs, without dashes: its own and its plug-ins'.

    There are none if there is no such program, or it prints no help.

    They are remembered in the user's cache. As plug-ins come and go without a change of the program itself, they are
    asked for again if ``option`` is not among the remembered ones.
    """
    path = shutil.which(program)
    if path is None:
        return frozenset()
    # The configuration says which plug-ins add options.
    key = [file_identity(path), os.environ.get("SLURM_CONF", "")]
    remembered = load_answer(f"{program}-options", key)
    if isinstance(remembered, list) and option in remembered:
        return frozenset(map(str, remembered))
    try:
        options = frozenset(_OPTION.findall(run_command(path, "--help", timeout_s=_HELP_S)))
    except SlurmDown:
        return frozenset()
    store_answer(f"{program}-options", key, sorted(options))
    return options
