"""What launchers print when one of their ranks has ended."""

from __future__ import annotations

import pytest

from slurmtrain.model.diagnosis.launcher_report import RankEnd, find_rank_end, without_report

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


def test_a_report_says_which_rank_ended_and_how() -> None:
    assert find_rank_end(OF_TORCH) == RankEnd(1, 1)


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


def test_the_newest_report_counts() -> None:
    later = "E1122 ... failed (exitcode: 75) local_rank: 0 (pid: 61) of binary: /opt/bin/python"
    assert find_rank_end([*OF_TORCH, later]) == RankEnd(75, 0)


def test_without_the_report_the_last_line_is_that_of_the_rank() -> None:
    assert without_report(OF_TORCH)[-1] == "ValueError: the loss is not a number"
    assert without_report(["a", "b"]) == ["a", "b"]


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
