"""What tests of checkpoints share: processes that are ranks, and checkpoints that they or trainers have saved."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import saving_scripts
from helpers.ranks import Pair
from helpers.small_model import save_two

from slurmtrain.runtime.preflight.ports import reserve_port


@pytest.fixture(scope="session")
def pair() -> Iterator[Pair]:
    """Two processes that are the ranks of one world, for all tests: starting them takes seconds."""
    pair = Pair()
    yield pair
    pair.close()


@pytest.fixture(scope="session")
def four() -> Iterator[Pair]:
    """Four such processes, for the few tests that need more than two ranks."""
    four = Pair(4)
    yield four
    four.close()


@pytest.fixture(scope="session")
def saved_by_two(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of two ranks at steps 1 and 2."""
    root = tmp_path_factory.mktemp("run")
    pair.run(save_two, root)
    return root


@pytest.fixture
def run(saved_by_two: Path, tmp_path: Path) -> Path:
    """A copy of it that may be damaged."""
    copied = tmp_path / "run"
    shutil.copytree(saved_by_two, copied)
    return copied


# --- checkpoints of trainers --------------------------------------------------------------------------------------

SCRIPTS = Path(saving_scripts.__file__).parent
Saved = Callable[..., Path]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Runs a script of helpers/saving_scripts on two processes; returns the directory that it wrote to."""
    directories: dict[tuple[str, ...], Path] = {}

    def save(trainer: str, *arguments: str) -> Path:
        library = "transformers" if trainer == "hf" else trainer
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed (extra 'trainers')")
        key = (trainer, *arguments)
        if key not in directories:
            directories[key] = tmp_path_factory.mktemp(trainer)
            run_script(trainer, directories[key], *arguments)
        return directories[key]

    return save


# Both ranks are forked from a process that has imported the trainer, which takes seconds.
LAUNCH = """
import os, runpy, sys
{imports}
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
ranks = []
for rank in range(2):
    child = os.fork()
    if child == 0:
        os.environ |= {{"RANK": str(rank), "LOCAL_RANK": str(rank)}}
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        finally:
            sys.stderr.flush()
            os._exit(1)
    ranks.append(child)
sys.exit(any(os.waitpid(child, 0)[1] for child in ranks))
"""
IMPORTS = {
    "hf": "from transformers import Trainer",
    "accelerate": "from accelerate import Accelerator",
    "lightning": "import lightning.pytorch",
}


def run_script(trainer: str, directory: Path, *arguments: str) -> None:
    """Run a script of helpers/saving_scripts on two processes until it has ended."""
    launch = [sys.executable, "-c", LAUNCH.format(imports=IMPORTS.get(trainer, "import torch"))]
    with reserve_port(f"tests of {os.getpid()}", 0) as reserved:
        elastic = {
            "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(reserved.getsockname()[1]), "TORCHELASTIC_RUN_ID": "tests",
        }  # fmt: skip
        process = subprocess.run(
            [*launch, str(SCRIPTS / f"save_{trainer}.py"), str(directory), *arguments],
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, **elastic, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
        )
    assert process.returncode == 0, process.stderr
