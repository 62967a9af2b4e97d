"""The options that sbatch and srun of this machine have, those of plug-ins included, from their own help."""

from __future__ import annotations

import os
import re
import shutil

from slurmtrain.errors import SlurmDown
from slurmtrain.slurm.command import run_command
from slurmtrain.system.user_cache import identity, load, store

# They read their configuration and load their plug-ins, and ask no daemon.
_TIMEOUT_S = 10.0
# A line such as "  -A, --account=name   charge job to specified account"; only it begins with an option.
_OPTION = re.compile(r"^\s+(?:-\w,?\s+)?--([A-Za-z0-9][\w-]*)", re.MULTILINE)


def read_options(option: str, program: str = "sbatch") -> frozenset[str]:
    """The long options of a program, without dashes; none if there is no such program, or it prints no help.

    They are remembered in the user's cache. As plug-ins come and go without a change of the program itself, they are
    asked for again if ``option`` is not among those that are remembered.
    """
    path = shutil.which(program)
    if path is None:
        return frozenset()
    key = [identity(path), os.environ.get("SLURM_CONF", "")]
    remembered = load(f"{program}-options", key)
    if isinstance(remembered, list) and option in remembered:
        return frozenset(map(str, remembered))
    try:
        options = frozenset(_OPTION.findall(run_command(path, "--help", timeout_s=_TIMEOUT_S)))
    except SlurmDown:
        return frozenset()
    store(f"{program}-options", key, sorted(options))
    return options
