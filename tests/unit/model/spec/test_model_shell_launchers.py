"""Launchers in shell scripts, and programs that are no command of a run."""

from __future__ import annotations

import pytest

from slurmtrain.model.spec.launcher import (
    calls_in,
    is_distributed_alone,
    problem_of_calls,
    reads_task_variables,
    refused_programs,
    shell_script,
    shell_text,
)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("torchrun --nproc_per_node=2 train.py", "torchrun"),
        ("  exec /opt/env/bin/torchrun train.py", "torchrun"),
        ("OMP_NUM_THREADS=1 NCCL_DEBUG=INFO torchrun train.py", "torchrun"),
        ("cd x && torchrun \\", "torchrun"),
        ("if true; then torchrun train.py; fi", "torchrun"),
        ('LAUNCHER="torchrun --nnodes 2"', "torchrun"),
        ("srun bash -c 'torchrun train.py'", "srun"),
        ("python -u -m torch.distributed.run train.py", "torch.distributed.run"),
        ("python3 -m torch.distributed.launch train.py", "torch.distributed.launch"),
        ("accelerate launch --multi_gpu train.py", "accelerate launch"),
        ('export CMD="accelerate launch \\', "accelerate launch"),
        ("deepspeed train.py --deepspeed ds.json", "deepspeed"),
        ("srun --ntasks-per-node=4 python train.py", "srun"),
        ("time srun python train.py", "srun"),
        ("mpirun -np 4 python train.py", "mpirun"),
        ("mpiexec -n 4 python train.py", "mpiexec"),
        # These only mention one.
        ("# torchrun train.py", None),
        ("python train.py  # not torchrun train.py", None),
        ("echo torchrun train.py", None),
        ("pip install accelerate deepspeed", None),
        ("python -m pip install deepspeed", None),
        ("module load deepspeed", None),
        ("which torchrun", None),
        ("python train.py --deepspeed ds.json", None),
        ("python train.py --launcher torchrun", None),
        ("cd deepspeed/examples", None),
        ("export DEEPSPEED=1 torchrun_like=2", None),
        ("srun --overlap hostname", None),
        ("python my_torchrun.py", None),
        ("ls deepspeed.sh", None),
    ],
)
def test_a_launcher_is_found_where_a_shell_calls_it(line: str, name: str | None) -> None:
    calls = calls_in(f"#!/bin/bash\nset -e\n{line}\n")
    assert calls == [] if name is None else (calls[0].name, calls[0].line) == (name, 3)


@pytest.mark.parametrize(
    ("line", "launcher", "ranks", "cure"),
    [
        ("torchrun train.py", "ranks", 2, "started 2 times: set 'launcher: node'"),
        ("mpirun python train.py", "ranks", 4, "started 4 times: set 'launcher: none'"),
        ("srun python train.py", "ranks", 1, "leave srun and its options out"),
        ("srun python train.py", "node", 2, "leave srun and its options out"),
        ("torchrun train.py", "ranks", 1, None),
        ("torchrun train.py", "node", 2, None),
        ("mpirun python train.py", "none", 2, None),
        ("python train.py", "ranks", 2, None),
    ],
)
def test_what_a_script_calls_must_suit_who_starts_the_ranks(
    line: str, launcher: str, ranks: int, cure: str | None
) -> None:
    problem = problem_of_calls(calls_in(line), launcher, ranks)
    assert (problem is None) == (cure is None)
    # It goes on after "the shell calls torchrun,".
    assert problem is None or (problem[1].startswith("which ") and str(cure) in problem[1])


@pytest.mark.parametrize(
    ("command", "script", "text"),
    [
        ("bash train.sh --lr 1", "train.sh", None),
        ("env A=1 bash -x scripts/train.sh", "scripts/train.sh", None),
        ("./train.sh", "./train.sh", None),
        ("bash -c 'torchrun x.py'", None, "torchrun x.py"),
        ("bash -lc 'torchrun x.py' a", None, "torchrun x.py"),
        ("python train.py", None, None),
        ("bash", None, None),
    ],
)
def test_the_text_of_a_shell_is_found(command: str, script: str | None, text: str | None) -> None:
    assert (shell_script(command), shell_text(command)) == (script, text)


@pytest.mark.parametrize(
    ("command", "launcher", "instead"),
    [
        ("srun python train.py --lr 1", "ranks", "write 'python train.py --lr 1'"),
        ("srun -N 2 --ntasks-per-node=4 -o logs/x.out python -u train.py", "ranks", "write 'python -u train.py'"),
        ("srun torchrun train.py", "ranks", "write 'torchrun train.py'"),
        ("env A=1 srun ./train.sh", "node", "write './train.sh'"),
        ("srun hostname", "ranks", "leave srun and its options out"),
        ("sbatch --nodes=1 x.sh", "ranks", "write 'bash x.sh'"),
        ("mpirun -np 4 python train.py", "ranks", "'launcher: none'"),
        ("mpirun -np 4 python train.py", "none", None),
        ("srun --overlap python train.py", "none", None),
        ("python srun", "ranks", None),
    ],
)
def test_a_command_that_begins_with_srun_or_mpirun_is_told_what_to_write(
    command: str, launcher: str, instead: str | None
) -> None:
    messages = list(refused_programs(command, launcher))
    assert messages == [] if instead is None else instead in messages[0]


def test_scripts_that_ask_for_their_task_or_their_rank_are_noticed() -> None:
    assert reads_task_variables("set -e\ntorchrun --node_rank ${SLURM_PROCID} x.py") == 2
    assert reads_task_variables("torchrun --node_rank $SLURM_NODEID x.py  # not $SLURM_PROCID") is None
    assert is_distributed_alone("ddp = int(os.environ.get('RANK', -1)) != -1 # is this a ddp run?")
    assert is_distributed_alone('if "RANK" in os.environ and "WORLD_SIZE" in os.environ:')
    assert not is_distributed_alone('rank = int(os.environ.get("RANK", 0))')
