"""What the end of a process means, by its exception or exit code, and by what can be looked up."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import pytest

from slurmtrain.model.diagnosis.last_words import Ending, Facts, explain_end, raised_by
from slurmtrain.model.diagnosis.tracebacks import Raised, TraceFrame

FOLDER = "/home/me/exp"


@dataclass(frozen=True)
class StatedFacts:
    """Facts that a test states."""

    is_local: bool = True
    folder: str = FOLDER
    python: str = "/opt/env/bin/python"
    gpus: int = 0
    files: Collection[str] = ()
    importable: Collection[str] = ("torch", "numpy", "flash_attn", "random")
    versions: Mapping[str, str] = field(default_factory=dict)

    def exists(self, path: str) -> bool:
        return path in ("/", "/home", "/home/me", FOLDER) or path in self.files

    def names_in(self, folder: str) -> Collection[str]:
        return [path.rpartition("/")[2] for path in self.files if path.rpartition("/")[0] == folder]

    def modules(self) -> Collection[str]:
        return self.importable

    def programs(self) -> Collection[str]:
        return ["python", "nvcc"]

    def owner(self, path: str) -> str:
        return "root (-rw-------)" if path == f"{FOLDER}/a.bin" else ""

    def version(self, package: str) -> str:
        return self.versions.get(package, "")


ON_CLUSTER = StatedFacts(is_local=False)
TORCH = "/opt/env/lib/python3.11/site-packages/torch/__init__.py"


@pytest.mark.parametrize(
    ("error", "facts", "cause", "fix"),
    [
        ("ModuleNotFoundError: No module named 'flash_atn'", StatedFacts(),
         "there is no module flash_atn: did you mean flash_attn? (at train.py:3 in step())", "correct the import"),
        ("ModuleNotFoundError: No module named 'deepspeed'", StatedFacts(), "the module deepspeed is not installed, at",
         "if its name is right: `/opt/env/bin/python -m pip install deepspeed`"),
        ("ModuleNotFoundError: No module named 'cv2'", ON_CLUSTER, "the module cv2 is not installed, at",
         "pip install opencv-python`, in the environment that the nodes use"),
        ("ModuleNotFoundError: No module named 'torch'", ON_CLUSTER,
         "the environment on the node differs from the one here (/opt/env/bin/python), which has the module torch",
         "setup"),
        ("ModuleNotFoundError: No module named 'torch'", StatedFacts(),
         "the run did not find the module torch, which this environment has", "PYTHONPATH"),
        ("ModuleNotFoundError: No module named 'torch.nm'", StatedFacts(), "the installed torch has no module torch.nm",
         "torch"),
        ("ModuleNotFoundError: No module named 'torch.nn'; 'torch' is not a package",
         StatedFacts(files=[f"{FOLDER}/torch.py"]),
         "your torch.py hides the installed module torch, and is imported in its place", "rename torch.py"),
        ("ModuleNotFoundError: No module named 'net'", StatedFacts(files=[f"{FOLDER}/src/net.py"]),
         f"the module net lies in {FOLDER}/src, where Python does not look", f"PYTHONPATH: {FOLDER}/src"),
        ("AttributeError: partially initialized module 'random' has no attribute 'seed' (most likely due to a circular "
         "import)", StatedFacts(files=[f"{FOLDER}/random.py"]), "your random.py hides Python's module random",
         "rename random.py"),

                ("AttributeError: module 'random' has no attribute 'seed'",
         StatedFacts(), "your script raised AttributeError: module", ""),
        ("ImportError: cannot import name 'x' from partially initialized module 'net' (most likely due to a circular "
         f"import) ({FOLDER}/net.py)", StatedFacts(), "modules import each other in a circle: net was used before",
         "function"),
        ("ImportError: libcudnn.so.9: cannot open shared object file: No such file or directory", StatedFacts(),
         "the library libcudnn.so.9 is missing, at", "module load"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'data/a.csv'", StatedFacts(),
         f"there is no file data/a.csv, in {FOLDER}, at train.py:3 in step(); there is no directory {FOLDER}/data",
         "make it"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'a.csv'", StatedFacts(),
         f"there is no file a.csv, in {FOLDER}",
         "write an absolute path"),

                (f"FileNotFoundError: [Errno 2] No such file or directory: '{FOLDER}/a.csv'",
         replace(ON_CLUSTER, files=[f"{FOLDER}/a.csv"]),
         "; this machine has it", "that all nodes see"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'a.csv'", StatedFacts(files=[f"{FOLDER}/a.csv"]),
         "; it is there now: another process may make it", "before it is read"),
        ("PermissionError: [Errno 13] Permission denied: 'a.bin'",
         StatedFacts(), "a.bin may not be opened, at train.py:3 in "
         "step(): it belongs to root (-rw-------)", "rights"),
        ("AssertionError: Torch not compiled with CUDA enabled", StatedFacts(versions={"torch": "2.8.0+cpu"}),
         "the installed torch 2.8.0+cpu is a build without CUDA, at", "device = 'cpu'"),
        ("RuntimeError: No CUDA GPUs are available", StatedFacts(), "this machine has no GPU that torch can use",
         "use the CPU"),
        ("RuntimeError: Found no NVIDIA driver on your system.", ON_CLUSTER, "the run asked for no GPU",
         "gpus_per_node"),
        ("RuntimeError: No CUDA GPUs are available", replace(ON_CLUSTER, gpus=4),
         "the node has no GPU that torch can use, though the run asked for some", "nvidia-smi"),
        ("urllib.error.URLError: <urlopen error [Errno -3] Temporary failure in name resolution>", ON_CLUSTER,
         "the network did not reach what the script asked for", "fetch it before"),
        ("KeyboardInterrupt",
         StatedFacts(), "your script was interrupted (KeyboardInterrupt), at train.py:3 in step()", ""),
        ("ValueError: odd", StatedFacts(), "your script raised ValueError: odd, at train.py:3 in step()", ""),
    ],
)  # fmt: skip
def test_an_exception_is_explained_after_a_look(error: str, facts: Facts, cause: str, fix: str) -> None:
    kind, _, message = error.partition(": ")
    frames = (TraceFrame(f"{FOLDER}/train.py", 3, "step"), TraceFrame(TORCH, 9, "f"))
    explained = explain_end(Ending(1, Raised(kind, message, frames)), facts)
    assert cause in explained.cause
    assert fix in explained.fix
    assert not explained.follows


def test_a_file_that_a_library_imports_in_place_of_another_module_is_named() -> None:
    frames = (TraceFrame(TORCH, 9, "<module>"), TraceFrame(f"{FOLDER}/queue.py", 1, "<module>"))
    explained = explain_end(Ending(1, Raised("ValueError", "odd", frames)), StatedFacts())
    assert explained.fix == "rename queue.py: it hides Python's module queue"
    # torch looks for a package of this name.
    frames = (TraceFrame(f"{FOLDER}/cuda.py", 1, "<module>"), frames[0], TraceFrame(f"{FOLDER}/cuda.py", 1, "<module>"))
    message = "partially initialized module 'torch' has no attribute 'zeros' (most likely due to a circular import)"
    explained = explain_end(Ending(1, Raised("AttributeError", message, frames)), StatedFacts())
    assert explained.cause == "a library imports your cuda.py in place of the module cuda, at cuda.py:1"
    assert explained.fix == "rename cuda.py"


def test_an_exception_that_tells_of_the_end_of_another_rank_follows_from_it() -> None:
    assert explain_end(
        Ending(1, Raised("RuntimeError", "Connection closed by peer [10.0.0.1]:1")), StatedFacts()
    ).follows


@pytest.mark.parametrize(
    ("code", "last_line", "facts", "cause", "fix"),
    [
        (127, "bash: line 1: pythn: command not found",
         StatedFacts(), "there is no program pythn: did you mean python?",
         "correct the command"),
        (127, "go.sh: 3: nvc: not found", StatedFacts(), "there is no program nvc: did you mean nvcc?", "correct"),
        (127, "slurmtrain: cannot run 'julia': No such file or directory", StatedFacts(), "there is no program julia",
         "install"),
        (127, "bash: line 1: nvcc: command not found", ON_CLUSTER,
         "there is no program nvcc on the node; this machine has",
         "setup"),
        (127, "", StatedFacts(), "a command was not found", "last lines"),
        (126, "bash: line 1: ./go.sh: Permission denied", StatedFacts(), "./go.sh cannot be executed",
         "chmod +x ./go.sh"),
        (126, "slurmtrain: cannot run './go.sh': Exec format error", StatedFacts(), "./go.sh cannot be executed",
         "#!/bin/bash"),
        (2, "train.py: error: unrecognized arguments: --x", StatedFacts(),
         "refuses its arguments: unrecognized arguments: --x",
         "params"),
        (2, f"python: can't open file '{FOLDER}/trian.py': [Errno 2] No such file or directory",
         StatedFacts(files=[f"{FOLDER}/train.py"]), f"there is no script {FOLDER}/trian.py: did you mean train.py?",
         "correct"),
        (-11, "step 7", StatedFacts(), "SIGSEGV killed your script: a memory access", "PYTHONFAULTHANDLER=1"),
        (139, "Segmentation fault", StatedFacts(), "SIGSEGV killed your script", "PYTHONFAULTHANDLER=1"),
        (-9, "step 7", StatedFacts(), "SIGKILL killed your script: somebody, or the kernel", "dmesg"),
        (-64, "", StatedFacts(), "killed your script", ""),
        (3, "there is no data", StatedFacts(), "your script exited with code 3: there is no data", ""),
        (3, "", StatedFacts(), "your script exited with code 3, and said nothing", ""),
        (None, "gone", StatedFacts(), "your script ended with an error: gone", ""),
    ],
)  # fmt: skip
def test_an_exit_code_or_a_signal_is_explained(
    code: int | None, last_line: str, facts: Facts, cause: str, fix: str
) -> None:
    explained = explain_end(Ending(code, last_line=last_line), facts)
    assert cause in explained.cause
    assert fix in explained.fix


def test_a_line_of_a_log_may_be_all_that_is_left_of_an_exception() -> None:
    assert raised_by("torch.OutOfMemoryError: CUDA out of memory.") == Raised(
        "torch.OutOfMemoryError", "CUDA out of memory."
    )
    assert raised_by("step 7: no error") is None
