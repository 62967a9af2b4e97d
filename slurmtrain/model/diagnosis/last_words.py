"""What the end of a process means: its exception, its exit code or its signal, checked against facts. Pure.

An explanation asserts only what is known: of a missing module whether its name is misspelt, and of a missing file what
lies beside its place. The facts are looked up where the question is asked (:class:`Facts`), and only the ones that an
explanation needs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Protocol

from slurmtrain.model.diagnosis.tracebacks import Raised
from slurmtrain.model.experiment.kinds import nearest
from slurmtrain.model.interruption.exit_report import is_cascade, shell_signal

EXCEPTION, EXIT, KILLED = "exception", "exit", "killed"
"""Names of hits: an exception that no more special explanation covers, an exit code or a signal, and SIGKILL."""
IMPORT = "import"
"""The name of hits about modules and libraries that are missing."""
# What is installed under another name than it is imported by.
_PACKAGES = {
    "cv2": "opencv-python", "PIL": "pillow", "sklearn": "scikit-learn", "skimage": "scikit-image", "yaml": "pyyaml",
    "bs4": "beautifulsoup4", "dotenv": "python-dotenv", "hydra": "hydra-core", "flash_attn": "flash-attn",
    "dateutil": "python-dateutil", "attr": "attrs",
}  # fmt: skip
_ALIKE = 0.75
_RAISED = re.compile(r"^([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Warning))(?:: (.*))?$")


class Facts(Protocol):
    """What can be looked up about a failure without asking anybody."""

    @property
    def is_local(self) -> bool:
        """Whether it ran on this machine."""

    @property
    def folder(self) -> str:
        """Where its command ran."""

    @property
    def python(self) -> str:
        """Its interpreter."""

    @property
    def gpus(self) -> int:
        """How many GPUs a node was to have."""

    def exists(self, path: str) -> bool:
        """Whether this machine has this file or directory now."""

    def names_in(self, folder: str) -> Collection[str]:
        """The names in a directory of this machine; none if it cannot be read."""

    def modules(self) -> Collection[str]:
        """The modules that its interpreter can import here; none if that is not known."""

    def programs(self) -> Collection[str]:
        """The programs on this machine's PATH."""

    def owner(self, path: str) -> str:
        """Whom a path belongs to and its rights, in words; empty if that is unknown."""

    def version(self, package: str) -> str:
        """The version of a package that its interpreter can import here; empty if that is unknown."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process that failed ended.

    ``code``: its exit code, negative for a signal; None: unknown. ``raised``: the exception that ended it. ``message``
    and ``stack``: its last words when a signal killed it (:func:`~.tracebacks.find_fatal`). ``last_line``: of its log.
    """

    code: int | None
    raised: Raised | None = None
    message: str = ""
    stack: Raised | None = None
    last_line: str = ""


@dataclass(frozen=True, slots=True)
class Explained:
    """The meaning of an end: a name for it, its cause and a fix as phrases; ``follows``: another one died first."""

    name: str
    cause: str
    fix: str = ""
    follows: bool = False


def explain_end(ending: Ending, facts: Facts) -> Explained:
    """What an end means. ``ending``: how the process ended. ``facts``: what can be looked up."""
    raised = ending.raised
    if raised is None:
        return _explain_exit(ending, facts)
    for expression, explain in _EXCEPTIONS:
        match = re.search(expression, raised.text)
        if match is not None and (explained := explain(match, raised, facts)) is not None:
            return explained
    return Explained(
        EXCEPTION, f"your script raised {describe_raised(raised)}", _hides(raised), is_cascade(raised.text)
    )


def raised_by(line: str) -> Raised | None:
    """The exception that a ``line`` is the rest of; None if it is none."""
    match = _RAISED.match(line)
    return Raised(match[1], match[2] or "") if match else None


def describe_raised(raised: Raised) -> str:
    """``ValueError: the loss went up, at train.py:31 in step()``. ``raised``: the exception."""
    cause = f", raised {raised.cause}".replace("raised while", "while") if raised.cause else ""
    return raised.text + at_place(raised) + cause


def at_place(raised: Raised | None) -> str:
    """``, at train.py:31 in step()``; empty if that is unknown. ``raised``: the exception, or a stack."""
    place = raised.place(function=True) if raised is not None else ""
    return f", at {place}" if place else ""


# --- exceptions -------------------------------------------------------------------------------------------------------


def _missing_module(match: re.Match[str], raised: Raised, facts: Facts) -> Explained | None:
    module, top = match[1], match[1].partition(".")[0]
    importable, where = facts.modules(), at_place(raised)
    if match[2] and (hiding := _hiding(top, raised, facts)):
        return _shadow(hiding, top)
    if top in importable and top != module:
        cause = f"the installed {top} has no module {module}{where}"
        return Explained(IMPORT, cause, f"install the version of {top} that the script was written for")
    if top in importable:
        python = f" ({facts.python})" if facts.python else ""
        if facts.is_local:
            cause = f"the run did not find the module {top}, which this environment has{python}{where}"
            return Explained(IMPORT, cause, "look at PYTHONPATH, and at what `setup` activates")
        cause = f"the environment on the node differs from the one here{python}, which has the module {top}{where}"
        return Explained(IMPORT, cause, "activate it in setup, or put it on a file system that all nodes see")
    for folder in (facts.folder, f"{facts.folder}/src", str(PurePosixPath(facts.folder).parent)):
        if facts.exists(f"{folder}/{top}") or facts.exists(f"{folder}/{top}.py"):
            cause = f"the module {top} lies in {folder}, where Python does not look{where}"
            return Explained(IMPORT, cause, f"set env: {{PYTHONPATH: {folder}}}, or install it")
    if near := nearest(top, importable, _ALIKE):
        cause = f"there is no module {top}: did you mean {near}?{where.replace(', ', ' (') + ')' if where else ''}"
        return Explained(IMPORT, cause, "correct the import")
    pip = f"{facts.python or 'python'} -m pip install {_PACKAGES.get(top, top)}"
    nodes = "" if facts.is_local else ", in the environment that the nodes use"
    return Explained(IMPORT, f"the module {top} is not installed{where}", f"if its name is right: `{pip}`{nodes}")


def _partly_imported(match: re.Match[str], raised: Raised, facts: Facts) -> Explained | None:
    if hiding := _hiding(match[1], raised, facts):
        return _shadow(hiding, match[1])
    if replacement := next(_imported_by_libraries(raised), None):
        cause = f"a library imports your {replacement.name} in place of the module {replacement.stem}{at_place(raised)}"
        return Explained("shadowed", cause, f"rename {replacement.name}")
    cause = f"modules import each other in a circle: {match[1]} was used before it was complete{at_place(raised)}"
    return Explained("circular-import", cause, "move one of the imports into the function that needs it")


def _attribute_of_module(match: re.Match[str], raised: Raised, facts: Facts) -> Explained | None:
    hiding = _hiding(match[1], raised, facts)
    return _shadow(hiding, match[1]) if hiding else None


def _hiding(module: str, raised: Raised, facts: Facts) -> str:
    """The user's file that is imported in place of a module of Python's or of a package; empty if there is none."""
    if module not in sys.stdlib_module_names and module not in facts.modules():
        return ""
    folder = str(PurePosixPath(raised.script).parent) if raised.script else facts.folder
    return next((path for path in (f"{folder}/{module}.py", f"{folder}/{module}") if facts.exists(path)), "")


def _shadow(path: str, module: str) -> Explained:
    name = PurePosixPath(path).name
    whose = "Python's" if module in sys.stdlib_module_names else "the installed"
    cause = f"your {name} hides {whose} module {module}, and is imported in its place"
    return Explained("shadowed", cause, f"rename {name}")


def _hides(raised: Raised) -> str:
    """What to do about a user's file that a library has imported in place of a module; empty if there is none."""
    paths = (path for path in _imported_by_libraries(raised) if path.stem in sys.stdlib_module_names)
    return next((f"rename {path.name}: it hides Python's module {path.stem}" for path in paths), "")


def _imported_by_libraries(raised: Raised) -> Iterator[PurePosixPath]:
    """The user's files that libraries import, which look for modules of these names elsewhere."""
    frames = [frame for frame in raised.frames if not frame.file.startswith("<")]
    for outer, frame in pairwise(frames):
        if outer.is_library and not frame.is_library and frame.function == "<module>":
            yield PurePosixPath(frame.file)


def _missing_file(match: re.Match[str], raised: Raised, facts: Facts) -> Explained:
    path = match[1]
    full = PurePosixPath(facts.folder, path)
    beside = f", in {facts.folder}" if not path.startswith("/") and facts.folder else ""
    cause = f"there is no file {path}{beside}{at_place(raised)}"
    if facts.exists(str(full)):
        other = "it is there now: another process may make it" if facts.is_local else "this machine has it"
        fix = "make it before it is read" if facts.is_local else "put it on a file system that all nodes see"
        return Explained("missing-file", f"{cause}; {other}", fix)
    missing = next(place for place in (*reversed(full.parents), full) if place == full or not facts.exists(str(place)))
    near = nearest(missing.name, facts.names_in(str(missing.parent)), _ALIKE)
    if near:
        return Explained("missing-file", f"{cause}; did you mean {missing.parent / near}?", "correct the path")
    if missing != full:
        return Explained("missing-file", f"{cause}; there is no directory {missing}", "make it, or correct the path")
    relative = "write an absolute path: a relative one begins where the command runs (workdir)"
    return Explained("missing-file", cause, relative if beside else "correct the path, or make the file")


def _no_gpu(_: re.Match[str], raised: Raised, facts: Facts) -> Explained:
    if facts.is_local:
        cause, fix = "this machine has no GPU that torch can use", "use the CPU, or run it where there are GPUs"
    elif not facts.gpus:
        cause, fix = "the run asked for no GPU", "set resources.gpus_per_node, or use the CPU"
    else:
        cause = "the node has no GPU that torch can use, though the run asked for some"
        fix = "look at `nvidia-smi` there, and set no CUDA_VISIBLE_DEVICES in env"
    return Explained("no-gpu", f"{cause}{at_place(raised)}", fix)


# Of what an exception says, to what explains it; the first one that does not return None counts.
_EXCEPTIONS: tuple[tuple[str, Callable[[re.Match[str], Raised, Facts], Explained | None]], ...] = (
    (r"^ModuleNotFoundError: No module named '([\w.]+)'(; '\w+' is not a package)?", _missing_module),
    (r"partially initialized module '([\w.]+)'", _partly_imported),
    (r"^AttributeError: module '(\w+)' has no attribute", _attribute_of_module),
    (r"^ImportError: cannot import name '\w+' from '(\w+)' \(/", _attribute_of_module),
    (r"^(?:ImportError|OSError): (\S+\.so[.\d]*): cannot open shared object file",
     lambda match, raised, _: Explained(
         IMPORT, f"the library {match[1]} is missing{at_place(raised)}",
         "load it in setup (`module load ...`), or add its directory to LD_LIBRARY_PATH")),
    (r"^FileNotFoundError: .*No such file or directory: '([^']+)'", _missing_file),
    (r"^PermissionError: .*: '([^']+)'",
     lambda match, raised, facts: Explained(
         "permission", f"{match[1]} may not be opened{at_place(raised)}"
         + (f": it belongs to {owner}" if (owner := facts.owner(str(PurePosixPath(facts.folder, match[1])))) else ""),
         "choose another place, or have its rights changed")),
    (r"Torch not compiled with CUDA enabled",
     lambda _, raised, facts: Explained(
         "cpu-build", "the script asked for CUDA, and the installed torch"
         f"{f' {version}' if (version := facts.version('torch')) else ''} is a build without CUDA{at_place(raised)}",
         "install a build with CUDA (https://pytorch.org/get-started), or use the CPU: device = 'cpu'")),
    (r"No CUDA GPUs are available|Found no NVIDIA driver|no CUDA-capable device", _no_gpu),
    (r"Temporary failure in name resolution|Name or service not known|Max retries exceeded",
     lambda match, raised, _: Explained(
         "no-network", f"the network did not reach what the script asked for ({match[0]}){at_place(raised)}",
         "fetch it before: nodes of many clusters have no way to the internet")),
    (r"^KeyboardInterrupt\b",
     lambda _, raised, __: Explained(
         "interrupted", f"your script was interrupted (KeyboardInterrupt){at_place(raised)}")),
)  # fmt: skip


# --- exit codes and signals -------------------------------------------------------------------------------------------

_SIGNALS = {
    "SIGSEGV": ("a memory access to a wrong address, mostly in a library written in C",
                "run it with PYTHONFAULTHANDLER=1 in env to see where"),
    "SIGABRT": ("it, or a library, gave up", "look at its last lines"),
    "SIGBUS": ("a file that it had mapped became shorter, or /dev/shm is full",
               "use fewer data loader workers, or have /dev/shm made larger"),
    "SIGILL": ("an instruction that this processor does not have",
               "install builds for the processor of the node"),
    "SIGFPE": ("an arithmetic error, such as a division of integers by zero", "look at its last lines"),
    "SIGKILL": ("somebody, or the kernel for lack of memory, ended it; nothing recorded which",
                "`dmesg` on that machine names processes killed for memory"),
}  # fmt: skip
_NOT_FOUND = re.compile(
    r"cannot run '([^']+)'|(?:^|: )(?:line )?\d*:? ?([^\s:]+): (?:command )?not found|: '?([^\s:']+)'?: No such file"
)
_NO_SCRIPT = re.compile(r"can't open file '([^']+)': \[Errno 2\]")
_USAGE = re.compile(r"^(?:\S+: error|Error|usage error): (.+)", re.IGNORECASE)


def _explain_exit(ending: Ending, facts: Facts) -> Explained:
    code, last = ending.code, ending.last_line
    if code is not None and (name := _signal_of(code)):
        why, fix = _SIGNALS.get(name, ("", ""))
        end = f"{name} killed your script{at_place(ending.stack)}"
        why, fix = ending.message or why, "" if at_place(ending.stack) else fix
        return Explained(KILLED if name == "SIGKILL" else EXIT, f"{end}: {why}" if why else end, fix)
    if match := _NO_SCRIPT.search(last):
        path = PurePosixPath(match[1])
        near = nearest(path.name, facts.names_in(str(path.parent)), _ALIKE)
        return Explained(
            EXIT, f"there is no script {path}" + (f": did you mean {near}?" if near else ""), "correct the command"
        )
    if code == 127:
        return _missing_program(last, facts)
    if code == 126:
        quoted = re.search(r"cannot run '([^']+)'|([^\s:]+): (?:Permission denied|cannot execute)", last)
        program = next(filter(None, quoted.groups())) if quoted else "the command"
        fix = f"`chmod +x {program}`, begin it with a line such as #!/bin/bash, or write its interpreter before it"
        return Explained(EXIT, f"{program} cannot be executed", fix)
    if code == 2 and (match := _USAGE.match(last)):
        return Explained(EXIT, f"the program refuses its arguments: {match[1]}", "correct command, or params")
    ended = "ended with an error" if code is None else f"exited with code {code}"
    words = f": {last}" if last else ", and said nothing"
    return Explained(EXIT, f"your script {ended}{words}", follows=is_cascade(last))


def _signal_of(code: int) -> str:
    from signal import Signals

    if code >= 0:
        return shell_signal(code)
    return Signals(-code).name if -code in set(Signals) else f"signal {-code}"


def _missing_program(last: str, facts: Facts) -> Explained:
    match = _NOT_FOUND.search(last)
    if match is None:
        return Explained(EXIT, "a command was not found", "look at its last lines")
    name = next(filter(None, match.groups()))
    programs = facts.programs()
    if name in programs and not facts.is_local:
        cause = f"there is no program {name} on the node; this machine has one"
        return Explained(EXIT, cause, "load or activate its environment in setup")
    near = nearest(name, programs, _ALIKE)
    cause = f"there is no program {name}" + (f": did you mean {near}?" if near else "")
    return Explained(EXIT, cause, "correct the command" if near else "install it, or activate its environment in setup")
