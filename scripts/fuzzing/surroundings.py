"""What around a spec may outrank it, and what in it may be too much or become another type."""

from __future__ import annotations

import contextlib
import json
import re
import resource
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random

from helpers.sample_home import SampleHome

# Variables that a login shell, a module of a site or an allocation may have set; {home}: the home's directory.
OF_SITES = {
    "SBATCH_PARTITION": ("nowhere", ""), "SBATCH_TIMELIMIT": ("1", "x"), "SBATCH_MEM_PER_NODE": ("1M", "\x1b[31m"),
    "SBATCH_NO_REQUEUE": ("1",), "SBATCH_SIGNAL": ("KILL@1",), "SBATCH_EXPORT": ("NONE", "A=1"),
    "SBATCH_ARRAY_INX": ("0-3",), "SBATCH_NO_SUCH_OPTION": ("x" * 5000,), "SRUN_CPUS_PER_TASK": ("99", "x"),
    "SLURM_NTASKS": ("8", "-1"), "SLURM_NNODES": ("3",), "SLURM_JOB_NUM_NODES": ("3",), "SLURM_PROCID": ("5", ""),
    "SLURM_CLUSTERS": ("elsewhere",), "SLURM_CONF": ("{home}/nowhere",), "SLURM_EXIT_ERROR": ("77",),
    "SLURM_TIME_FORMAT": ("%s", "relative"), "SACCT_FORMAT": ("jobid",), "SINFO_FORMAT": ("%n",), "SQUEUE_SORT": ("x",),
    "SQUEUE_FORMAT2": ("jobid",), "SQUEUE_STATES": ("all", ""), "SQUEUE_USERS": ("nobody",),
    "LC_ALL": ("C", "POSIX", "nonsense"), "LANGUAGE": ("de",), "PYTHONUTF8": ("0",), "PYTHONPATH": ("{home}", "."),
    "PYTHONWARNINGS": ("error", "always"), "OMP_NUM_THREADS": ("64", "x", ""), "BASH_ENV": ("{home}/nowhere",),
    "ENV": ("{home}/nowhere",), "CDPATH": ("/",), "GIT_DIR": ("{home}/nowhere",), "GIT_WORK_TREE": ("/",),
    "IFS": ("/",), "RANK": ("3",), "WORLD_SIZE": ("4", "x"), "MASTER_ADDR": ("elsewhere",), "PMI_RANK": ("1",),
    "MLFLOW_RUN_ID": ("x",),
}  # fmt: skip
# Limits that sbatch and shells hand on (ulimit), as helpers.forked_commands sets them.
_LIMITS = {
    resource.RLIMIT_CORE: (0,),
    resource.RLIMIT_CPU: (20, 60),
    resource.RLIMIT_STACK: (256 << 10, 1 << 20),
    resource.RLIMIT_NOFILE: (48, 64),
    resource.RLIMIT_MEMLOCK: (0,),
}
# Text to most people, and something else to YAML.
_WORDS = (
    "0123", "1.10", "1_000", "1e3", "0x1F", "0b11", "0o17", ".5", "1.", "+1", "1e400", "9007199254740993", "12:30",
    "00:30:00", "yes", "on", "No", "TRUE", ".inf", "-.INF", ".NaN", "2020-01-01", "3.0e-05", "1" * 40, "-0", "=", "08",
)  # fmt: skip
_ENV = "env: {TOKEN_FILE: /tmp/token}"
# Longer than any line that a person reads, or that a terminal shows.
_LONGEST_LINE = 20_000
# Commands that print what a person has written, or logged, as it is.
_VERBATIM = frozenset({"logs", "render", "diff", "export", "completion", "plot", "metrics"})


def limit(limits: dict[int, int], random: Random) -> str:
    """Lower one of the limits of the command's process; says which."""
    kind = random.choice(sorted(_LIMITS))
    limits[kind] = random.choice(_LIMITS[kind])
    return f"limit {kind} is {limits[kind]}"


def retype(home: SampleHome, random: Random) -> str:
    """Let the spec have a value that is text in the end, unquoted."""
    word = random.choice(_WORDS)
    return _replace(home, _ENV, f"env: {{TOKEN_FILE: /tmp/token, TEXT: {word}}}", f"env.TEXT: {word}")


def make_too_much(home: SampleHome, random: Random) -> str:
    """Let the spec have much of something."""
    files = ", ".join(f"data/shard-{number:05}.tar" for number in range(9_000))
    old, new, description = random.choice(
        [
            ("params: {lr: 0.1,", f"params: {{files: [{files}], lr: 0.1,", "9,000 files"),
            ("params: {lr: 0.1,", f"params: {{text: {'x' * 200_000}, lr: 0.1,", "a long parameter"),
            (_ENV, f"env: {{TEXT: {'x' * 200_000}}}", "a long variable"),
            (_ENV, "env: {" + ", ".join(f"A{number}: '1'" for number in range(5_000)) + "}", "many variables"),
            ('["export A=1"]', "[" + ", ".join(["true"] * 5_000) + "]", "many lines of setup"),
            ('["export A=1"]', f"['{'x' * 200_000}']", "a long line of setup"),
            ("command: python train.py", f"command: python train.py {'x' * 200_000}", "a long argument"),
            ("command: python train.py", f"command: python train.py {'x ' * 50_000}", "many arguments"),
            ("name: digits", f"name: {'n' * 5_000}", "a long name"),
            ("sweep: {params.lr: [0.1, 0.2]}", f"sweep: {{params.lr: [{'0.1, ' * 50_000}1]}}", "a large sweep"),
        ]
    )
    return _replace(home, old, new, description)


def _replace(home: SampleHome, old: str, new: str, description: str) -> str:
    """Raises ValueError if an earlier change has left nothing to replace."""
    spec = home.project / "spec.yaml"
    text = spec.read_text()
    if old not in text:
        raise ValueError(old)
    spec.write_text(text.replace(old, new))
    return f"{description} in {spec}"


def plans_of(home: SampleHome) -> Mapping[Path, str]:
    """The plans of runs, as far as they can be read."""
    plans = {}
    with contextlib.suppress(OSError):
        for path in home.runs.glob("*/plan.json"):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                plans[path] = path.read_text()
    return plans


def find_retyped(home: SampleHome, before: Mapping[Path, str]) -> Iterator[str]:
    """What new plans have of the text that :func:`retype` has written, as ``category: detail``, unless it is the same.

    Args:
        home: Where the command ran.
        before: The plans that were there before.
    """
    with contextlib.suppress(OSError, UnicodeDecodeError):
        written = re.search(
            r"^env: \{TOKEN_FILE: /tmp/token, TEXT: (\S+)\}$", (home.project / "spec.yaml").read_text(), re.M
        )
        for path, text in plans_of(home).items() if written else ():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                if path not in before and (value := json.loads(text)["spec"]["env"]["TEXT"]) != written[1]:
                    yield f"retyped: env.TEXT is {value!r}, and {written[1]} in the spec"


def find_long_lines(arguments: Sequence[str], output: bytes) -> Iterator[str]:
    """Lines for people that nobody can read, as ``category: detail``.

    Args:
        arguments: Those of the command.
        output: What it has printed.
    """
    if (
        not _VERBATIM.intersection(arguments)
        and "--json" not in arguments
        and not any("json" in each for each in arguments)
    ):
        longest = max(map(len, output.splitlines()), default=0)
        if longest > _LONGEST_LINE:
            yield f"length: a line of {longest} bytes"
