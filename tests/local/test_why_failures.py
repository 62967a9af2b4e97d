"""What `why` answers first when a run has failed, for failures made for real."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from helpers.little_memory import HUNGRY, little_memory
from helpers.site import ONE_PROCESS, Site

TWO = {**ONE_PROCESS, "procs_per_node": 2}
STEPS = """
def step(batch):
    if batch > 1:
        raise ValueError("the loss went up")

for batch in range(9):
    step(batch)
"""
FROM = """
def load(name):
    try:
        return {}[name]
    except KeyError as error:
        raise RuntimeError("cannot load it") from error

load("a")
"""
LOADER = """
from torch.utils.data import DataLoader
import words

for _ in DataLoader(words.Words(), num_workers=1):
    pass
"""
WORDS = """
class Words:
    def __len__(self):
        return 4
    def __getitem__(self, index):
        raise KeyError("no such word")
"""
ARGUMENTS = "import argparse\nargparse.ArgumentParser().parse_args()\n"
SEGFAULT = "import ctypes, faulthandler\nfaulthandler.enable()\ndef go():\n    ctypes.string_at(0)\ngo()\n"
FORBIDDEN = (
    "import os\nopen('secret.bin', 'w').close()\nos.chmod('secret.bin', 0o600)\nos.setuid(65534)\nopen('secret.bin')\n"
)
SURVIVED = (
    "import logging\ntry:\n    import flash_attn\nexcept ImportError:\n    logging.exception('slower without it')\n"
    + STEPS
)
RANK_1 = "import os, time\nif os.environ['RANK'] == '1':\n    raise OSError('the disk is broken')\ntime.sleep(60)\n"
PYTHON = "python train.py"

# By a name: the files beside the spec, the command, and the first line of the answer.
FAILURES: Mapping[str, tuple[Mapping[str, str], str, str]] = {
    "exception": ({"train.py": STEPS}, PYTHON,
                  "your script raised ValueError: the loss went up, at train.py:4 in step()"),
    "raised from another": ({"train.py": FROM}, PYTHON,
                            "your script raised RuntimeError: cannot load it, at train.py:6 in load(), raised from "
                            "KeyError: 'a'"),
    "data loader": ({"train.py": LOADER, "words.py": WORDS}, PYTHON,
                    "your script raised KeyError: 'no such word', at words.py:6 in __getitem__()"),
    "after a survived one": ({"train.py": SURVIVED}, PYTHON,
                             "your script raised ValueError: the loss went up, at train.py:9 in step()"),
    "syntax": ({"train.py": "import part\n", "part.py": "x = (1,\n"}, PYTHON,
               "your script raised SyntaxError: '(' was never closed, at part.py:1"),
    "exit with a message": ({"train.py": "import sys\nsys.exit('there is no data')\n"}, PYTHON,
                            "your script exited with code 1: there is no data"),
    "wrong argument": ({"train.py": ARGUMENTS}, f"{PYTHON} --lrr 3",
                       "the program refuses its arguments: unrecognized arguments: --lrr 3"),
    "interrupted": ({"train.py": "raise KeyboardInterrupt\n"}, PYTHON,
                    "your script was interrupted (KeyboardInterrupt), at train.py:1"),
    "no program": ({"go.sh": "pythn train.py\n"}, "bash go.sh",
                   "there is no program pythn: did you mean python?"),
    "not executable": ({"go.sh": "./part.sh\n", "part.sh": "echo\n"}, "bash go.sh", "./part.sh cannot be executed"),
    "segfault": ({"train.py": SEGFAULT}, PYTHON,
                 "SIGSEGV killed your script, at train.py:4 in go(): Segmentation fault"),
    "abort": ({"train.py": "import os\nos.abort()\n"}, PYTHON, "SIGABRT killed your script: it, or a library, gave up"),
    "missing file": ({"train.py": "open('data.cvs')\n", "data.csv": ""}, PYTHON,
                     "there is no file data.cvs, in {folder}, at train.py:1; did you mean {folder}/data.csv?"),
    "missing directory": ({"train.py": "open('{folder}/none/data.csv')\n"}, PYTHON,
                          "there is no file {folder}/none/data.csv, at train.py:1; there is no directory "
                          "{folder}/none"),
    "forbidden": ({"train.py": FORBIDDEN}, PYTHON,
                  "secret.bin may not be opened, at train.py:5: it belongs to root (-rw-------)"),
    "CPU build": ({"train.py": "import torch\ntorch.zeros(1).cuda()\n"}, PYTHON,
                  "the script asked for CUDA, and the installed torch .* is a build without CUDA, at train.py:2"),
    "hidden module": ({"train.py": "import random\nrandom.seed(1)\n", "random.py": ""}, PYTHON,
                      "your random.py hides Python's module random, and is imported in its place"),
    "misspelt module": ({"train.py": "import part\n", "part.py": "__import__('numpyy')\n"}, PYTHON,
                        "there is no module numpyy: did you mean numpy? (at part.py:1)"),
    "uninstalled module": ({"train.py": "__import__('flash_attn')\n"}, PYTHON,
                           "the module flash_attn is not installed, at train.py:1"),
    "module elsewhere": ({"train.py": "__import__('net')\n", "src/net.py": ""}, PYTHON,
                         "the module net lies in {folder}/src, where Python does not look, at train.py:1"),
    "circle": ({"train.py": "import a\n", "a.py": "from b import y\nx = 1\n", "b.py": "from a import x\ny = 1\n"},
               PYTHON, "modules import each other in a circle: a was used before it was complete, at b.py:1"),
    "launcher": ({"train.py": RANK_1}, "torchrun --nproc-per-node 2 train.py",
                 "your script raised OSError: the disk is broken, at train.py:3 (rank 1 on .*)"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
def test_the_first_line_says_what_happened(site: Site, name: str) -> None:
    files, command, answer = FAILURES[name]
    folder = str(site.path)
    for path, text in files.items():
        (site.path / path).parent.mkdir(exist_ok=True)
        (site.path / path).write_text(text.replace("{folder}", folder))
    resources = TWO if name == "launcher" else ONE_PROCESS
    run_id = failing(site, command, resources=resources)
    lines = site.call("why", run_id).stdout.splitlines()
    expected = re.escape(answer.replace("{folder}", folder)).replace(r"\.\*", ".*")
    assert re.fullmatch(expected, lines[0]), lines[0]
    text = "\n".join(lines)
    for wrong in ("no known pattern", "sacct", "resources.mem", "differs from", "slurm.exclude"):
        assert wrong not in text
    # Its reason begins with the error, not with the rank.
    reason = site.status(run_id)["reason"]
    assert not reason.startswith("rank 0 exited") or name in ("abort", "segfault")


def test_the_rank_that_failed_first_is_named(site: Site) -> None:
    (site.path / "train.py").write_text(RANK_1)
    run_id = failing(site, PYTHON, resources=TWO)
    headline = site.json("why", run_id)["headline"]
    assert re.fullmatch(r"your script raised OSError: the disk is broken, at train.py:3 \(rank 1 on \S+\)", headline)
    reason = "OSError: the disk is broken (train.py:3); rank 1 exited with code 1"
    assert site.status(run_id)["reason"].startswith(reason)


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [PYTHON, "bash -c 'python train.py; exit $?'"], ids=["python", "shell"])
def test_a_process_that_the_kernel_killed_for_memory_is_that_cause_everywhere(site: Site, command: str) -> None:
    (site.path / "train.py").write_text(HUNGRY)
    rules: dict[str, Any] = {"oom": {"accumulation": "x2", "max_accumulation": 4}}
    spec = site.commanding(command, name="hungry", requeue=rules)
    with little_memory(600) as limited:
        words = [*limited, sys.executable, "-m", "slurmtrain", "submit", str(spec), "--executor", "local", "--wait"]
        submitted = subprocess.run(words, cwd=site.path, env=site.environment(), capture_output=True, text=True)
    assert submitted.returncode == 1, submitted.stderr
    run_id = site.json("status")["runs"][0]["id"]
    answer = site.json("why", run_id)
    assert (answer["cause"], site.status(run_id)["state"]) == ("oom", "failed")
    assert answer["headline"] == "memory was full: the kernel killed 1 process of the job, whose limit is 0.6 GiB"
    attempts = site.show(run_id)["attempts"]
    assert {attempt["cause"] for attempt in attempts} == {"oom"}
    # The policy for memory has acted: each time with smaller parts of a batch.
    parts = [["resources.accumulation=2"], ["resources.accumulation=4"]]
    assert [attempt["overrides"] for attempt in attempts] == [[], *parts]


def failing(site: Site, command: str, **keys: Any) -> str:
    """Run this command until it has failed, once."""
    return site.submit(site.commanding(command, requeue={"enabled": False}, **keys), "--wait", code=1)
