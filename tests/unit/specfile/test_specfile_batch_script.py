"""Scripts that are given where a spec belongs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.specfiles import PYTHON, only_run

from slurmtrain.errors import PathError
from slurmtrain.specfile import PlannedRun, load_spec

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=gpt
#SBATCH -N 2
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:h100:4
#SBATCH -c 8
#SBATCH --mem=64000
#SBATCH -t 12:00:00   # half a day
#SBATCH -p gpu -A 0123
#SBATCH -o logs/%x-%j.out
#SBATCH --mail-type=END,FAIL
#SBATCH --array=0-9

set -e
module load cuda
if [ -e venv ]; then
  source venv/bin/activate
fi
srun --cpu-bind=none -n 8 python train.py \\
   --out ${SCRATCH}/x --note "it's"
echo done
"""


def planned_from(script: str, tmp_path: Path, name: str = "old.sbatch") -> tuple[PlannedRun, str]:
    """The run of the spec that is proposed instead of a script, and its text."""
    (tmp_path / name).write_text(script)
    with pytest.raises(PathError) as raised:
        load_spec(tmp_path / name, cwd=tmp_path, python=PYTHON)
    message, _, text = str(raised.value).partition("\n\n")
    assert f"is a batch script of sbatch; a spec is a YAML file: write this into {tmp_path}/old.yaml" in message
    (tmp_path / "old.yaml").write_text(text)
    return only_run(load_spec(tmp_path / "old.yaml", cwd=tmp_path, python=PYTHON)), text


def test_a_batch_script_is_told_as_a_spec_that_is_accepted(tmp_path: Path) -> None:
    planned, text = planned_from(SCRIPT, tmp_path)
    spec = planned.plan.spec
    assert spec.name == "gpt"
    assert planned.plan.words == ["bash", "-c", 'python train.py --out ${SCRATCH}/x --note "it\'s"']
    assert spec.setup == ("module load cuda", "if [ -e venv ]; then", "source venv/bin/activate", "fi")
    resources = spec.resources
    assert (resources.nodes.max, resources.procs_per_node, resources.cpus_per_proc) == (2, 4, 8)
    assert (resources.gpus_per_node, resources.gpu_type, resources.mem, resources.time) == (4, "h100", 64000, 43200)
    assert spec.slurm == {"partition": "gpu", "account": "0123", "mail_type": "END,FAIL"}
    assert spec.log == "logs/%x-%j.out"
    assert "# not translated: --array=0-9: use 'sweep'" in text


@pytest.mark.parametrize(
    ("body", "words", "keys"),
    [
        ("srun python train.py --lr 1", ["python", "train.py", "--lr", "1"], {"launcher": "ranks"}),
        (
            "srun -n1 --label torchrun --nnodes $SLURM_NNODES t.py",
            ["bash", "-c", "torchrun --nnodes $SLURM_NNODES t.py"],
            {"launcher": "node"},
        ),
        ("srun torchrun t.py", ["torchrun", "t.py"], {"launcher": "node"}),
        ("make\n./run.sh", ["bash", "{path}"], {"launcher": "ranks"}),
        ("", ["bash", "{path}"], {"launcher": "ranks"}),
        ('python t.py "unclosed', ["bash", "{path}"], {"launcher": "ranks"}),
    ],
)
def test_the_command_is_the_last_that_trains_without_srun(
    tmp_path: Path, body: str, words: list[str], keys: dict[str, Any]
) -> None:
    planned, _ = planned_from(f"#!/bin/bash -l\n#SBATCH -N 1\n{body}\n", tmp_path)
    assert planned.plan.words == [word.format(path=tmp_path / "old.sbatch") for word in words]
    assert {key: getattr(planned.plan.spec, key) for key in keys} == keys


@pytest.mark.parametrize(
    "directive",
    ["--mem=lots", "--nodes=2-4", "--nodes=x", "--time=UNLIMITED", "--gres=tmp:1", "--bogus", "-Z 1", "'", "--mem=0"],
)
def test_a_directive_that_cannot_be_translated_leaves_a_spec_that_is_accepted(tmp_path: Path, directive: str) -> None:
    planned, _ = planned_from(f"#!/bin/sh\n#SBATCH {directive}\npython t.py\n", tmp_path)
    assert planned.plan.words == ["python", "t.py"]


@pytest.mark.parametrize(
    ("name", "text", "command"),
    [
        ("train.py", "import torch\n", "python"),
        ("my train.sh", "ls\n", "bash"),
        ("train", "#!/usr/bin/env python3\n", "python"),
        ("job.slurm", "#!/bin/bash\npython x.py\n", "bash"),
    ],
)
def test_a_script_is_told_from_a_spec(tmp_path: Path, name: str, text: str, command: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(
        PathError, match=rf"is a script; a spec is a YAML file with a line such as 'command: {command} "
    ):
        load_spec(path, cwd=tmp_path, python=PYTHON)
