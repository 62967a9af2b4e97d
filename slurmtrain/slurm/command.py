"""Running Slurm's commands: the only place that starts them, but for submitit's sbatch."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

from slurmtrain.errors import SlurmDown
from slurmtrain.runtime.job.environment import scrubbed

# Slurm's own commands give up after MessageTimeout (10 s by default) and some retries.
_TIMEOUT_S = 60.0
_OPTIONS_OF = ("SQUEUE_", "SACCT_", "SCANCEL_")


def environment() -> dict[str, str]:
    """This environment without what would change the format or the scope of an answer."""
    environ = {name: value for name, value in scrubbed(os.environ).items() if not name.startswith(_OPTIONS_OF)}
    return {**environ, "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C.UTF-8"}


def found(name: str) -> bool:
    """Whether this machine has the command."""
    return shutil.which(name) is not None


def ask(*command: str, given: str = "", timeout_s: float | None = None) -> str:
    """The standard output of one of Slurm's commands, which reads ``given``. Raises SlurmDown with its complaint."""
    name, timeout_s = command[0], timeout_s or _TIMEOUT_S
    try:
        done = subprocess.run(
            command,
            env=environment(),
            input=given,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError as error:
        raise SlurmDown(f"there is no {name} on this machine's PATH") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmDown(f"{name} did not answer within {timeout_s:.0f} s") from error
    if done.returncode != 0:
        raise SlurmDown(f"{name}: {complaint(done.stderr.splitlines()) or f'exit code {done.returncode}'}")
    return done.stdout


def complaint(lines: Sequence[str]) -> str:
    """The errors among what one of Slurm's commands printed, without the program's name."""
    said = [line.strip() for line in lines if line.strip()]
    errors = [line.split(": error: ", 1)[1] for line in said if ": error: " in line] or said
    return "; ".join(dict.fromkeys(errors))
