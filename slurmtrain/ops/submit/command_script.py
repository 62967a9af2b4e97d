"""The program and the script of a command: whether they are there, and can do what the command has them do.

Python must have what the script imports, and a shell script must not start once for each rank a launcher that starts
ranks of its own.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slurmtrain.errors import NotAvailable, PathError, UserError
from slurmtrain.model.experiment.command_words import ScriptImport, in_shell, of_shell, script_imports
from slurmtrain.model.experiment.kinds import suggestion
from slurmtrain.model.experiment.launcher import (
    RANKS,
    calls_in,
    problem_of_calls,
    reads_task_variables,
    shell_script,
    shell_text,
    split_command,
)
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.experiment.sections import TORCH
from slurmtrain.model.experiment.slurm_options import runs_in_container
from slurmtrain.model.experiment.spec import Spec
from slurmtrain.model.experiment.values import SHELL_KEYS
from slurmtrain.system.files import file_identity, load_answer, store_answer

_PYTHON = re.compile(r"python[\d.]*")
# Options of Python that take no value; the second kind changes where it looks for modules.
_FLAGS = frozenset({"-u", "-O", "-OO", "-B", "-b", "-bb", "-q", "-v"})
_FLAGS_OF_PATHS = frozenset({"-E", "-I", "-s", "-S"})
# What a training script surely needs, whatever it does before it imports them.
NEEDED = ("torch", "slurmtrain")
# What a script with a session has in its text.
_SESSION = b"session("
# Programs that commands begin with, for a suggestion; and those that run a script which is not executable.
_COMMON = ("python", "python3", "torchrun", "accelerate", "deepspeed", "bash", "srun", "mpirun")
_INTERPRETERS = {".py": "python", ".sh": "bash"}
# A script is far shorter; what is longer is not read.
_LONGEST = 1 << 20
# A Python on a busy file server takes some seconds to start; one that takes longer is not waited for.
_TIMEOUT_S = 10.0
# Variables by which Python finds modules, besides those that begin with PYTHON.
_OF_PYTHON = ("HOME", "LD_LIBRARY_PATH")
# How bash says where a script is wrong.
_SYNTAX = re.compile(r"line (\d+): (.*)")
# Finds modules without importing any. With -c, the first entry of the path is the current directory.
_PROBE = """
import sys
if sys.path[:1] == [""]:  # before anything else is imported: the working directory may have a json.py
    del sys.path[0]
import importlib.util, json, os
def has(name):
    try:
        return importlib.util.find_spec(name) is not None
    except Exception:
        return True
path, present = [os.path.abspath(entry) for entry in sys.path], [name for name in sys.argv[1:] if has(name)]
print(json.dumps({"path": path, "present": present}))
"""


class Interpreter(NamedTuple):
    """A Python, as ranks start it.

    ``path``: where it is; empty if that is not known. ``flags``: those that change where it looks for modules.
    ``workdir``: where it runs, which decides what shims such as pyenv's start. ``env``: the variables
    that the spec sets.
    """

    path: str
    flags: tuple[str, ...]
    workdir: str
    env: tuple[tuple[str, str], ...]

    @property
    def environment(self) -> dict[str, str]:
        """The variables that it gets."""
        return {**os.environ, **dict(self.env)}

    @property
    def key(self) -> list[Any]:
        """What its answer depends on, besides the directories of its modules."""
        variables = {
            name: value for name, value in self.environment.items() if name.startswith("PYTHON") or name in _OF_PYTHON
        }
        # A wrapper may look at any variable. Their values may be secrets.
        own = hashlib.sha256(repr(sorted(self.env)).encode()).hexdigest()
        return [file_identity(self.path), list(self.flags), self.workdir, variables, own]


class Script(NamedTuple):
    """What the Python in a command runs.

    ``python``: the interpreter. ``path``: the script's; of a module, the directory where ``-m`` finds it first.
    ``module``: empty for a script.
    """

    python: Interpreter
    path: Path
    module: str = ""


def find_script(plan: Plan) -> Script | None:
    """What Python is to run; None if that cannot be told, or is in a container."""
    words = plan.words
    arguments = _python_arguments(words, plan.spec.slurm)
    if arguments is None:
        return None
    python = plan.python
    if words[0] != "python":
        path = plan.spec.env.get("PATH", os.environ.get("PATH"))
        python = find_program(words[0], path) or "" if "/" not in words[0] else str(Path(plan.workdir, words[0]))
    flags = tuple(word for word in words[1 : len(words) - len(arguments)] if word in _FLAGS_OF_PATHS)
    interpreter = Interpreter(python, flags, plan.workdir, tuple(plan.spec.env.items()))
    first, second = [*arguments[:2], "", ""][:2]
    if first == "-m" and re.fullmatch(r"[A-Za-z_][\w.]*", second):
        return Script(interpreter, Path(plan.workdir), second)
    return Script(interpreter, Path(plan.workdir, first)) if _is_script(first) else None


def _python_arguments(words: Sequence[str], slurm: Mapping[str, Any]) -> Sequence[str] | None:
    """What a command's Python is called with, behind its own options; None: it is no Python, or in a container."""
    if not words or not _PYTHON.fullmatch(Path(words[0]).name) or runs_in_container(slurm):
        return None
    first = next((i for i, word in enumerate(words[1:], 1) if word not in _FLAGS | _FLAGS_OF_PATHS), len(words))
    return words[first:]


def _is_script(word: str) -> bool:
    return word.endswith(".py") and "{" not in word and not word.startswith("-")


def missing_script(spec: Spec, workdir: Path) -> str:
    """What to say of the script that a spec names, if there certainly is none; else empty.

    Args:
        spec: It may have mistakes, though not in its command.
        workdir: Where the command runs.
    """
    script = next(iter(_python_arguments(split_command(spec.command), spec.slurm or {}) or ()), "")
    if spec.setup or not _is_script(script) or not workdir.is_dir() or not is_missing(workdir / script):
        return ""
    return _no_script(workdir / script)


def find_program(word: str, path: str | None) -> str | None:
    """Where a program is, as ``shutil.which`` says; what is found is looked for once for all runs of a sweep.

    Args:
        word: its name.
        path: the directories to look in, as in PATH; None: this process's.
    """
    key = (word, os.environ.get("PATH") if path is None else path)
    # What is not there is not remembered: it may be installed while this process lives.
    if key not in _PROGRAMS and (place := shutil.which(word, path=key[1])):
        _PROGRAMS[key] = place
    return _PROGRAMS.get(key)


_PROGRAMS: dict[tuple[str, str | None], str] = {}


def check_script(plan: Plan, executor: str) -> None:
    """Check what certainly fails at once.

    Lines of setup may change the directory, make the script, or install its imports: if there are any, nothing is
    checked. Nodes of a cluster may have other programs than this machine: there the script alone is checked.

    Raises:
        PathError: there is no such program; or the command is ``python SCRIPT``, and there is no such script.
        NotAvailable: its Python lacks a package that it imports first.
        UserError: bash cannot read the lines of setup.
    """
    for key in SHELL_KEYS:
        if problem := _setup_problem("\n".join(getattr(plan.spec, key)), key):
            raise UserError(problem)
    if plan.spec.setup or not Path(plan.workdir).is_dir():
        return
    if executor == "local" and (problem := _program_problem(plan)):
        raise PathError(problem)
    script = find_script(plan)
    if script is None:
        return
    if is_missing(script.path):
        raise PathError(_no_script(script.path))
    missing = _missing_import(script) if executor == "local" else None
    if missing is not None and missing.certain:
        raise NotAvailable(_no_module(script, missing))


@functools.cache
def _setup_problem(lines: str, key: str) -> str:
    """Why bash cannot read the lines of a key such as ``setup``; empty if it can, or is not here."""
    if not lines or shutil.which("bash") is None:
        return ""
    # Without the user's own start-up file.
    environ = {name: value for name, value in os.environ.items() if name != "BASH_ENV"}
    completed = subprocess.run(
        ["bash", "-n"], input=lines, env=environ, capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    if completed.returncode == 0:
        return ""
    messages = [match.groups() for line in completed.stderr.splitlines() if (match := _SYNTAX.search(line))]
    number, message = messages[0] if messages else ("?", completed.stderr.strip())
    return f"{key}: bash cannot parse line {number}: {message}; the lines run as one script, so fix this one first"


def note_script(plan: Plan, executor: str) -> list[str]:
    """A note if the program seems not to be there, or Python seems to lack what its script imports."""
    script = find_script(plan)
    missing = None if script is None else _missing_import(script)
    problem = _no_module(script, missing) if script is not None and missing is not None else _program_problem(plan)
    unless = ["'setup' adds it" if plan.spec.setup else "", "the nodes have it" if executor == "slurm" else ""]
    fine = " or ".join(filter(None, unless))
    return [f"{problem}; ignore this if {fine}" if fine else problem] if problem else []


def _program_problem(plan: Plan) -> str:
    """Why the program of a command cannot be started on this machine; empty if it can, or that cannot be told."""
    word = plan.words[0]
    if word == "python" or "{" in word or runs_in_container(plan.spec.slurm):
        return ""
    path = plan.spec.env.get("PATH", os.environ.get("PATH"))
    if "/" not in word:
        if not word or find_program(word, path):
            return ""
        if problem := of_shell(word):
            return f"{problem}; write {in_shell(plan.spec.command)}, or a script"
        installed = [each for each in _COMMON if each == "python" or find_program(each, path)]
        cure = suggestion(word, installed) or "; install it, or activate the environment that has it"
        return f"there is no program {word}{cure}"
    program = Path(plan.workdir, word)
    if is_missing(program):
        return f"there is no program {program}"
    if not os.access(program, os.X_OK):
        return f"{program} is not executable; write {_INTERPRETERS.get(program.suffix, 'its interpreter')} before it"
    return ""


def is_missing(path: Path) -> bool:
    """Whether there is certainly nothing at this path: what cannot be looked at may be there."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError as error:
        return error.errno == errno.ENAMETOOLONG
    return False


def _missing_import(script: Script) -> ScriptImport | None:
    """The first import that fails, of those that tell something about the run; None if none is known to fail."""
    if not script.python.path:
        return None
    # Where Python looks for modules first.
    beside = script.path if script.module else script.path.parent
    imports = [
        each
        for each in imports_of(script)
        if (each.certain or each.package in NEEDED)
        and is_missing(beside / each.package)
        and not any(beside.glob(f"{each.package}.*"))
    ]
    absent = _absent(script.python, tuple(each.package for each in imports))
    return next((each for each in imports if each.package in absent), None)


def note_profile(plan: Plan) -> list[str]:
    """A note if a script is to be traced whose steps slurmtrain does not see, as far as a look at it shows."""
    if plan.spec.profile is None or plan.spec.profile.tool != TORCH or (script := find_script(plan)) is None:
        return []
    source = b"" if script.module else _read_script(script.path)
    if not source or _SESSION in source:
        return []
    return [
        f"'profile.steps' traces the steps of slurmtrain.session(), which {script.path.name} itself does not call: "
        "there will be no trace unless its imports call it; 'profile: nsys' profiles any command"
    ]


def imports_of(script: Script) -> Sequence[ScriptImport]:
    """What a look at a script shows that it imports; of a module, itself."""
    if script.module:
        return [ScriptImport(script.module.partition(".")[0], 0, certain=True)]
    return _script_imports(script.path, tuple(map(str, file_identity(str(script.path)))))


@functools.cache
def _script_imports(path: Path, _identity: tuple[str, ...]) -> Sequence[ScriptImport]:
    """``_identity``: identifies the script's file, which may change."""
    return script_imports(_read_script(path))


@functools.cache
def _absent(python: Interpreter, packages: tuple[str, ...]) -> frozenset[str]:
    """The packages that a Python does not have; none if it does not answer.

    That it has a package is remembered, until its directories change; that it lacks one is asked anew by each command.
    """
    if not packages:
        return frozenset()
    name = f"python-{python.path.strip('/').replace('/', '-')[-200:]}"
    kept = load_answer(name, python.key)
    # A damaged file is nobody's.
    with contextlib.suppress(TypeError, KeyError, IndexError):
        # Whoever installs or removes a package changes the directory that it is in.
        if {*packages} <= {*kept["present"]} and kept["path"] == [file_identity(entry[0]) for entry in kept["path"]]:
            return frozenset()
    answer = _ask(python, packages)
    if answer is None:
        return frozenset()
    path, present = answer
    store_answer(name, python.key, {"path": [file_identity(entry) for entry in path], "present": sorted(present)})
    return frozenset(packages) - present


def _ask(python: Interpreter, packages: Sequence[str]) -> tuple[list[str], frozenset[str]] | None:
    """Where a Python looks for modules, and which of these packages it has; None if it does not answer."""
    try:
        completed = subprocess.run(
            [python.path, *python.flags, "-c", _PROBE, *packages],
            env=python.environment,
            cwd=python.workdir,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=True,
        )
        answer = json.loads(completed.stdout.strip().splitlines()[-1])
        return [str(entry) for entry in answer["path"]], frozenset(map(str, answer["present"]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError, TypeError, KeyError):
        return None


def _no_script(path: Path) -> str:
    scripts = [each.name for each in path.parent.glob("*.py")] if not is_missing(path.parent) else []
    hint = suggestion(path.name, scripts) or (
        "; paths in 'command' are relative to 'workdir', by default the directory that submit is called from"
    )
    return f"there is no script {path}{hint}"


def _no_module(script: Script, missing: ScriptImport) -> str:
    cure = "install it there, or activate the environment that has it"
    with contextlib.suppress(ImportError, ValueError):
        if script.python.path != sys.executable and importlib.util.find_spec(missing.package) is not None:
            cure = f"activate the environment of {sys.executable}, which has it"
    if script.module:
        return f"neither {script.python.path} nor {script.path} has a module {missing.package}; {cure}"
    return (
        f"{script.path.name}, line {missing.line}, imports {missing.package}, which is not installed for "
        f"{script.python.path}; {cure}"
    )


# --- shell scripts ---------------------------------------------------------------------------------------------------


def check_shell_script(plan: Plan) -> None:
    """Check that the shell script of a command starts no ranks of its own in each rank.

    Where the spec itself says who starts the ranks, that is only noted: not every line of a script is run.

    Raises:
        NotAvailable: it does.
    """
    if not plan.template.get("launcher") and (problem := _problem_of_ranks(plan, *_shell_of(plan))):
        raise NotAvailable(problem)


def notes_on_shell(plan: Plan) -> Iterator[str]:
    """What in the shell's part of a command suits its launcher badly, as sentences without a full stop."""
    name, text = _shell_of(plan)
    if problem := _problem_of_ranks(plan, name, text):
        yield problem
    line = reads_task_variables(text) if plan.spec.per_node else None
    if line is not None:
        yield (
            f"{name}, line {line}, reads SLURM_PROCID, SLURM_LOCALID or SLURM_NTASKS, but a command that starts once "
            "per node does not have these: its node is SLURM_NODEID, of SLURM_NNODES"
        )


def _problem_of_ranks(plan: Plan, name: str, text: str) -> str:
    spec = plan.spec
    if shell_text(spec.command) is not None:
        return ""  # the spec is refused
    problem = problem_of_calls(calls_in(text), spec.launcher or RANKS, spec.resources.most_ranks.world_size)
    return f"{name}, line {problem[0].line}, calls {problem[0].name}, {problem[1]}" if problem else ""


def _shell_of(plan: Plan) -> tuple[str, str]:
    """What a shell is to run, after its name for a person; both empty if the command runs none."""
    text = shell_text(plan.spec.command)
    if text is not None:
        return "the command", text
    path = shell_script(plan.spec.command)
    if path is None or "{" in path:
        return "", ""
    return Path(path).name, _read_script(Path(plan.workdir, path)).decode(errors="replace")


def _read_script(path: Path) -> bytes:
    """A script; empty if it cannot be read, or is none."""
    try:
        # Opening a pipe would wait for its writer.
        if not path.is_file():
            return b""
        with path.open("rb") as file:
            data = file.read(_LONGEST + 1)
    except OSError:
        return b""
    return data if len(data) <= _LONGEST and b"\0" not in data else b""
