"""What starts the ranks, also where a shell's script calls it."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from slurmtrain.model.experiment.launcher import (
    NODE,
    NONE,
    RANKS,
    NodePlace,
    NodeRanks,
    add_options,
    calls_in,
    choose_launcher,
    counts_of_command,
    describe_choice,
    find_contradictions,
    problem_of_calls,
    reads_task_variables,
    refused_programs,
    shell_script,
    shell_text,
)

PLACE = NodePlace(
    node_rank=1, ranks=NodeRanks((4, 4)), interface="eth0", address="10.0.0.2", master_addr="10.0.0.1",
    master_port=12345, hostfile="/runs/x/hostfile-1",
)  # fmt: skip


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        ("torchrun train.py", NODE),
        ("env A=b 'B=c d' torchrun train.py", NODE),
        ("python -m torch.distributed.run train.py", NODE),
        ("accelerate launch train.py", NODE),
        ("accelerate-launch train.py", NODE),
        ("accelerate config", RANKS),
        ("env", RANKS),
        ("python -m accelerate.commands.launch train.py", NODE),
        ("deepspeed train.py", NODE),
        ("python main.py --rank {node_rank} --world-size {nodes}", NODE),
        ("python train.py", RANKS),
        ("python torchrun", RANKS),
        ("python -m my.torch.distributed.run", RANKS),
        ("bash -c 'torchrun train.py'", RANKS),
        ("env -u X torchrun train.py", RANKS),
        ("python train.py --out {run_dir} '{unknown}'", RANKS),
    ],
)  # fmt: skip
def test_a_command_that_starts_with_a_launcher_or_asks_for_its_node_is_started_once_per_node(
    command: str, launcher: str
) -> None:
    assert choose_launcher(command) == launcher


def test_launchers_that_read_no_variables_get_the_nodes_as_options_before_their_own_which_win() -> None:
    words = add_options("env A=1 accelerate launch --multi_gpu train.py --lr 1", on_own_gpus=False)
    assert words[:4] == ["env", "A=1", "accelerate", "launch"]
    assert words[-4:] == ["--multi_gpu", "train.py", "--lr", "1"]
    assert dict(zip(words[4:-4:2], words[5:-4:2], strict=True)) == {
        "--num_machines": "{nodes}",
        "--machine_rank": "{node_rank}",
        "--num_processes": "{world_size}",
        "--main_process_ip": "{master_addr}",
        "--main_process_port": "{master_port}",
    }
    words = "deepspeed train.py"
    assert "--hostfile" in add_options(words, on_own_gpus=False)
    # It uses the GPUs that it sees.
    assert add_options(words, on_own_gpus=True) == ["deepspeed", "--master_port", "{master_port}", "train.py"]
    for command in ("torchrun train.py", "python train.py", "bash run.sh"):
        assert add_options(command, on_own_gpus=False) == shlex.split(command)


def test_launchers_read_the_place_of_their_node_from_variables() -> None:
    variables = PLACE.variables("SIGTERM")
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("10.0.0.1", "12345")
    assert (variables["NODE_RANK"], variables["NNODES"], variables["NPROC_PER_NODE"]) == ("1", "2", "4")
    assert variables["PET_RDZV_ENDPOINT"] == "10.0.0.1:12345"
    assert not variables.keys() & {"RANK", "LOCAL_RANK", "WORLD_SIZE"}
    assert replace(PLACE, master_addr="fd00::1").variables("SIGTERM")["PET_RDZV_ENDPOINT"] == "[fd00::1]:12345"
    # SIGTERM is ignored in the whole job with another signal, but not by processes that handle it, nor by those they
    # start.
    for name in ("SIGTERM", "SIGUSR1"):
        assert PLACE.variables(name)["PET_SIGNALS_TO_HANDLE"] == f"{name},SIGINT,SIGHUP,SIGQUIT"


def contradictions(command: str, launcher: str = NODE, *, nodes: int = 2, procs_per_node: int = 4) -> list[str]:
    return list(find_contradictions(command, launcher, NodeRanks((procs_per_node,) * nodes)))


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("torchrun --nproc-per-node=2 train.py", "has --nproc_per_node 2, but resources.procs_per_node is 4"),
        ("torchrun --nnodes 3 train.py", "has --nnodes 3, but resources.nodes is 2"),
        ("accelerate launch --num_processes 4 train.py", "has --num_processes 4, but"),
        ("deepspeed --num_gpus 8 train.py", "has --num_gpus 8, but resources.procs_per_node is 4"),
        ("torchrun --standalone train.py", "each of the 2 nodes would train on its own"),
        # Options that agree with the resources, and those of the script, are none of its business.
        ("torchrun --nproc-per-node=4 --nnodes=2 train.py --nnodes 9", None),
        ("accelerate launch --multi_gpu --num_processes 8 --num_machines 2 train.py", None),
    ],
)  # fmt: skip
def test_an_option_that_contradicts_the_resources_is_a_mistake(command: str, part: str | None) -> None:
    messages = contradictions(command)
    assert messages == [] if part is None else part in messages[0]
    assert len(messages) <= 1


def test_placeholders_of_a_node_and_launchers_do_not_go_with_ranks() -> None:
    [message] = contradictions("python x.py {master_port}", RANKS)
    assert "set 'launcher: node'" in message
    [message] = contradictions("torchrun x.py", RANKS)
    assert "torchrun would be started 4 times on each node" in message
    assert contradictions("torchrun x.py", RANKS, nodes=1, procs_per_node=1) == []
    assert contradictions("python x.py {node_rank} {master_port}", NONE) == []


def notes(command: str, launcher: str = NODE, *, chosen: bool = True) -> str:
    return "\n".join(describe_choice(command, launcher, chosen=chosen, on_own_gpus=False))


def test_a_choice_that_the_spec_does_not_make_is_said() -> None:
    assert (
        notes("torchrun train.py") == "'torchrun' starts ranks on its own, so it is started once per node ('launcher: "
        "node')"
    )
    assert "with --hostfile {hostfile} --no_ssh" in notes("deepspeed train.py")
    assert notes("torchrun train.py", chosen=False) == ""
    assert notes("python train.py", RANKS) == ""


def test_a_fixed_port_restarts_by_the_launcher_and_a_missing_kind_of_training_are_noted() -> None:
    assert "--master_port 29511 is a fixed port" in notes("torchrun --master-port=29511 train.py", chosen=False)
    assert notes("torchrun --master-port {master_port} train.py", chosen=False) == ""
    assert "restarts ranks itself (--max_restarts)" in notes("torchrun --max-restarts 3 train.py", chosen=False)
    assert "--multi_gpu" in notes("accelerate launch train.py", chosen=False)
    assert notes("accelerate launch --config_file a.yaml train.py", chosen=False) == ""


@pytest.mark.parametrize(
    ("command", "written", "counts"),
    [
        ("torchrun --nproc_per_node 4 train.py", [], {"procs_per_node": ("--nproc_per_node", 4)}),
        (
            "torchrun --nnodes=2 --nproc-per-node=4 train.py",
            [],
            {"nodes": ("--nnodes", 2), "procs_per_node": ("--nproc_per_node", 4)},
        ),
        ("torchrun --nnodes=2 --nproc-per-node=4 train.py", ["nodes", "procs_per_node"], {}),
        ("torchrun --nproc-per-node=4 train.py", ["gpus_per_node"], {}),
        ("torchrun --nnodes=2 train.py", ["components"], {}),
        (
            "accelerate launch --multi_gpu --num_machines 2 --num_processes 8 train.py",
            [],
            {"nodes": ("--num_machines", 2), "procs_per_node": ("--num_processes", 4)},
        ),
        ("python train.py --nproc_per_node 4", [], {}),
    ],
)  # fmt: skip
def test_numbers_that_only_the_launcher_is_told_are_those_of_the_run(
    command: str, written: list[str], counts: dict[str, tuple[str, int]]
) -> None:
    assert counts_of_command(command, written) == counts


UNEQUAL = NodeRanks((1, 2))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("accelerate launch train.py", "accelerate starts the same number of processes on each node"),
        ("torchrun --nproc-per-node 2 train.py", "but resources.procs_per_node is 1 or 2"),
        ("torchrun train.py", None),
    ],
)
def test_launchers_that_cannot_start_other_numbers_on_other_nodes_are_refused(
    command: str, message: str | None
) -> None:
    problems = list(find_contradictions(command, NODE, UNEQUAL))
    assert [message in each for each in problems if message] == [True] * bool(message)
    assert bool(problems) == bool(message)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("torchrun --nproc_per_node=2 train.py", "torchrun"),
        ("  exec /opt/env/bin/torchrun train.py", "torchrun"),
        ("OMP_NUM_THREADS=1 NCCL_DEBUG=INFO torchrun train.py", "torchrun"),
        ('LAUNCHER="torchrun --nnodes 2"', "torchrun"),
        ("srun bash -c 'torchrun train.py'", "srun"),
        ("python -u -m torch.distributed.run train.py", "torch.distributed.run"),
        ("accelerate launch --multi_gpu train.py", "accelerate launch"),
        ('export CMD="accelerate launch \\', "accelerate launch"),
        ("srun --ntasks-per-node=4 python train.py", "srun"),
        ("mpirun -np 4 python train.py", "mpirun"),
        # These only mention one.
        ("# torchrun train.py", None),
        ("python train.py  # not torchrun train.py", None),
        ("echo torchrun train.py", None),
        ("pip install accelerate deepspeed", None),
        ("module load deepspeed", None),
        ("python train.py --deepspeed ds.json", None),
        ("srun --overlap hostname", None),
    ],
)  # fmt: skip
def test_a_launcher_is_found_where_a_shell_calls_it(line: str, name: str | None) -> None:
    calls = calls_in(f"#!/bin/bash\nset -e\n{line}\n")
    assert calls == [] if name is None else (calls[0].name, calls[0].line) == (name, 3)


@pytest.mark.parametrize(
    ("line", "launcher", "ranks", "cure"),
    [
        ("torchrun train.py", "ranks", 2, "started 2 times: set 'launcher: node'"),
        ("mpirun python train.py", "ranks", 4, "started 4 times: set 'launcher: none'"),
        ("srun python train.py", "ranks", 1, "leave srun and its options out"),
        ("torchrun train.py", "node", 2, None),
        ("mpirun python train.py", "none", 2, None),
    ],
)  # fmt: skip
def test_what_a_script_calls_must_suit_who_starts_the_ranks(
    line: str, launcher: str, ranks: int, cure: str | None
) -> None:
    problem = problem_of_calls(calls_in(line), launcher, ranks)
    assert (problem is None) == (cure is None)
    # It goes on after "the shell calls torchrun,".
    assert problem is None or (problem[1].startswith("which ") and str(cure) in problem[1])


@pytest.mark.parametrize(
    ("command", "launcher", "instead"),
    [
        ("srun python train.py --lr 1", "ranks", "write 'python train.py --lr 1'"),
        ("env A=1 srun ./train.sh", "node", "leave srun and its options out"),
        ("srun hostname", "ranks", "leave srun and its options out"),
        ("sbatch --nodes=1 x.sh", "ranks", "leave sbatch and its options out"),
        ("mpirun -np 4 python train.py", "ranks", "'launcher: none'"),
        ("mpirun -np 4 python train.py", "none", None),
        ("srun --overlap python train.py", "none", None),
    ],
)  # fmt: skip
def test_a_command_that_begins_with_srun_or_mpirun_is_told_what_to_write(
    command: str, launcher: str, instead: str | None
) -> None:
    messages = list(refused_programs(command, launcher))
    assert messages == [] if instead is None else instead in messages[0]


def test_each_node_of_components_gets_its_own_number_of_ranks() -> None:
    second = replace(PLACE, ranks=UNEQUAL)
    assert (second.nodes, second.procs_per_node) == (2, 2)
    assert second.own_variables()["SLURMTRAIN_FIRST_RANK"] == "1"
    assert second.placeholders()["world_size"] == "3"
    assert second.variables("SIGTERM")["PET_NPROC_PER_NODE"] == "2"


@pytest.mark.parametrize(
    ("command", "script", "text"),
    [
        ("bash train.sh --lr 1", "train.sh", None),
        ("env A=1 bash -x scripts/train.sh", "scripts/train.sh", None),
        ("./train.sh", "./train.sh", None),
        ("bash -c 'torchrun x.py'", None, "torchrun x.py"),
        ("python train.py", None, None),
        ("bash", None, None),
    ],
)  # fmt: skip
def test_the_text_of_a_shell_is_found(command: str, script: str | None, text: str | None) -> None:
    assert (shell_script(command), shell_text(command)) == (script, text)


def test_scripts_that_ask_for_their_task_or_their_rank_are_noticed() -> None:
    assert reads_task_variables("set -e\ntorchrun --node_rank ${SLURM_PROCID} x.py") == 2
    assert reads_task_variables("torchrun --node_rank $SLURM_NODEID x.py  # not $SLURM_PROCID") is None
