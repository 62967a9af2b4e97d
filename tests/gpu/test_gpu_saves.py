"""What a save of a GPU's state costs, beside torch's own ways to save."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.gpu_figures import Figures

SCRIPT = Path(__file__).parent / "scripts" / "compare_saves.py"
# Of the GPU's memory, of memory and of the disk: a state is on the GPU, twice in memory, and twice on the disk.
LARGEST_BYTES, SHARE, ROUNDS = 2 * 2**30, 6, 4


def state_bytes(folder: Path) -> int:
    """As many bytes as fit everywhere, up to LARGEST_BYTES."""
    memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    room = min(torch.cuda.mem_get_info()[0], memory, shutil.disk_usage(folder).free)
    return min(LARGEST_BYTES, room // SHARE)


@pytest.mark.slow
def test_a_save_stalls_training_for_less_than_a_save_by_torch(
    tmp_path: Path, device: torch.device, figures: Figures
) -> None:
    argv = [sys.executable, str(SCRIPT), str(tmp_path), str(state_bytes(tmp_path)), str(ROUNDS)]
    answer = subprocess.run(argv, capture_output=True, text=True, timeout=400, check=False)
    assert answer.returncode == 0, answer.stderr
    measured = json.loads(answer.stdout.splitlines()[-1])
    size = f"{measured['bytes'] / 1e9:.2g} GB of state on one GPU"
    stalls = {}
    for way, times in measured["times"].items():
        # The first of each way allocates memory and starts threads or processes.
        stalls[way] = statistics.median(stall for stall, _ in times[1:])
        figures.add(f"{way}, {size}: stall", stalls[way], "s")
        figures.add(f"{way}, {size}: until it is complete", statistics.median(wall for _, wall in times[1:]), "s")
    assert stalls["slurmtrain"] < stalls["dcp.save"]
