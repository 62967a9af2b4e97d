"""Checkpoints that trainers really wrote, on two processes: made once, copied for each test that damages them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import saving_scripts

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


def run_script(trainer: str, directory: Path, *arguments: str) -> None:
    """Run a script of helpers/saving_scripts on two processes until it has ended."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    process = subprocess.run(
        [*launch, str(SCRIPTS / f"save_{trainer}.py"), str(directory), *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
    )
    assert process.returncode == 0, process.stderr
