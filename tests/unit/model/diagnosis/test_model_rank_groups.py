"""Which ranks are connected, and what is said of those that are not."""

from __future__ import annotations

import pytest

from slurmtrain.model.diagnosis.rank_groups import (
    RankEnd,
    describe_apart,
    describe_fewer,
    find_rank_end,
    groups_of,
    without_report,
)

SERVER = ("10:1", "99:443")


@pytest.mark.parametrize(
    ("connections", "groups"),
    [
        ({0: [("a:1", "b:2")], 1: [("b:2", "a:1")]}, [[0, 1]]),
        ({0: [], 1: []}, [[0], [1]]),
        # All are connected to the same server, which connects nobody.
        ({0: [SERVER], 1: [("10:2", "99:443")]}, [[0], [1]]),
        # A ring, and one beside it.
        (
            {0: [("a:1", "b:1")], 1: [("b:1", "a:1"), ("b:2", "c:1")], 2: [("c:1", "b:2")], 3: [("d:1", "x:1")]},
            [[0, 1, 2], [3]],
        ),
        ({1: [("b:1", "d:1")], 3: [("d:1", "b:1")], 0: [("a:1", "c:1")], 2: [("c:1", "a:1")]}, [[0, 2], [1, 3]]),
    ],
)
def test_ranks_with_both_ends_of_a_connection_are_a_group(
    connections: dict[int, list[tuple[str, str]]], groups: list[list[int]]
) -> None:
    assert groups_of(connections) == groups


def test_groups_are_named_and_not_all_of_very_many() -> None:
    assert describe_apart([[0], [1]], per_node=False).startswith(
        "ranks 0 and 1 have no connection to each other: the same training runs 2 times, each for itself; the script"
    )
    assert describe_apart([[0, 1], [2, 3]], per_node=True).startswith("nodes 0 and 1, and nodes 2 and 3 have no")
    many = describe_apart([[rank] for rank in range(100)], per_node=False)
    assert many.startswith("ranks 0, 1, 2, 3, 4, 5, 6, 7 and 92 more have no connection")


def test_a_launcher_that_has_started_too_few_is_told_what_it_needs() -> None:
    assert describe_fewer("accelerate launch", 0, 2) == (
        "accelerate launch has started none of the 2 ranks, but a process on each node; it needs --multi_gpu, also on "
        "CPUs, or a configuration file, and not --cpu"
    )
    assert describe_fewer("torchrun", 2, 4).startswith("torchrun has started 2 of the 4 ranks; leave out")


# --- what launchers print when one of their ranks has ended -------------------------------------------------------

# Printed by torchrun of torch 2.13.
OF_TORCH = """\
step 3
Traceback (most recent call last):
  File "/w/train.py", line 9, in <module>
    raise ValueError("the loss is not a number")
ValueError: the loss is not a number
W1122 12:00:01.123000 41 torch/distributed/elastic/multiprocessing/api.py:1013] Sending process 5 closing signal SIGTERM
E1122 12:00:01.456000 4 torch/distributed/elastic/multiprocessing/api.py:9] failed (exitcode: 1) local_rank: 1 (pid: 5)
Traceback (most recent call last):
  File "/opt/bin/torchrun", line 10, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
""".splitlines()


@pytest.mark.parametrize(
    ("line", "end"),
    [
        ("E1122 ... failed (exitcode: -9) local_rank: 0 (pid: 51) of binary: /opt/bin/python", RankEnd(-9, 0)),
        (
            "torch.distributed.elastic.multiprocessing.api.SignalException: Process 41 got signal: 15",
            RankEnd(-15, None),
        ),
        ("torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with exit code 75", RankEnd(75, 1)),
        ("subprocess.CalledProcessError: Command '['python']' returned non-zero exit status 75.", RankEnd(75, None)),
        ("RuntimeError: boom", None),
    ],
)
def test_launchers_report_a_code_or_a_signal(line: str, end: RankEnd | None) -> None:
    assert find_rank_end(["before", line, ""]) == end


# As accelerate launch prints it for one process.
OF_ACCELERATE = """\
step 3
Traceback (most recent call last):
  File "/w/train.py", line 9, in <module>
    open("missing.bin")
FileNotFoundError: [Errno 2] No such file or directory: 'missing.bin'
Traceback (most recent call last):
  File "/opt/bin/accelerate", line 7, in <module>
    sys.exit(main())
  File "/opt/lib/accelerate/commands/launch.py", line 774, in simple_launcher
    raise subprocess.CalledProcessError(returncode=process.returncode, cmd=cmd)
subprocess.CalledProcessError: Command '['python', 'train.py']' returned non-zero exit status 1.
""".splitlines()
OF_SRUN = ["ValueError: nan", "srun: error: n1: task 0: Exited with exit code 1", "srun: Terminating StepId=7.1"]


@pytest.mark.parametrize(
    ("lines", "last"),
    [
        (OF_ACCELERATE, "FileNotFoundError: [Errno 2] No such file or directory: 'missing.bin'"),
        ([*OF_ACCELERATE, *OF_ACCELERATE[5:]], "FileNotFoundError: [Errno 2] No such file or directory: 'missing.bin'"),
        # A script that calls a program itself, which said nothing.
        (["step 3", *OF_ACCELERATE[5:]], OF_ACCELERATE[-1]),
        ([*OF_TORCH[:5], *OF_TORCH[7:]], "ValueError: the loss is not a number"),
        (OF_SRUN, "ValueError: nan"),
    ],
)
def test_what_a_rank_has_raised_comes_before_what_its_launcher_makes_of_it(lines: list[str], last: str) -> None:
    assert [line for line in without_report(lines) if line.strip()][-1] == last
