"""What a rank is before it becomes the user's command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slurmtrain.runtime.agent import workers

RANK_MAIN = Path(workers.__file__).with_name("rank_main.py")
# The command: which signals it ignores, and which one it gets when the node agent dies.
REPORT = """
import ctypes, os, signal
answer = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(answer), 0, 0, 0)
names = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP")
print(*(name for name in names if signal.getsignal(signal.Signals[name]) == signal.SIG_IGN))
print(signal.Signals(answer.value).name, "SLURMTRAIN_AGENT_PID" in os.environ)
"""


def run(folder: Path, *command: str, agent: int | None = None, **environ: str) -> tuple[int, list[str]]:
    """Run a command by way of rank_main.py, as rank 3; returns the exit code and the lines of its log."""
    code = run_main(folder, *command, agent=agent, RANK="3", **environ)
    return code, (folder / "rank-3.log").read_text().splitlines()


def run_main(folder: Path, *command: str, agent: int | None = None, **environ: str) -> int:
    variables = {
        "SLURMTRAIN_LOG_DIR": str(folder),
        "SLURMTRAIN_AGENT_PID": str(os.getpid() if agent is None else agent),
        "SLURMTRAIN_OPEN_FILES": "100",
    }
    process = subprocess.run(
        [sys.executable, "-I", "-S", str(RANK_MAIN), *command], env={**os.environ, **variables, **environ}, check=False
    )
    return process.returncode


@pytest.mark.parametrize(
    ("chosen", "ignored"),
    [
        ("SIGTERM", "SIGUSR1 SIGUSR2"),
        ("SIGUSR1", "SIGTERM SIGUSR2"),
        ("SIGUSR2", "SIGTERM SIGUSR1"),
        ("SIGINT", "SIGTERM SIGUSR1 SIGUSR2"),
    ],
)
def test_signals_sent_to_all_processes_are_ignored_except_the_stop_signal(
    chosen: str, ignored: str, tmp_path: Path
) -> None:
    # nohup starts the tests with SIGHUP ignored.
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        ignored = f"{ignored} SIGHUP"
    code, lines = run(tmp_path, sys.executable, "-c", REPORT, SLURMTRAIN_STOP_SIGNAL=chosen)
    assert (code, lines) == (0, [ignored, f"{chosen} False"])


def test_a_script_survives_other_signals_and_is_ended_by_the_stop_signal(tmp_path: Path) -> None:
    kill = "import os, signal; [os.kill(os.getpid(), s) for s in (signal.SIGUSR2, signal.SIGTERM, signal.SIGUSR1)]"
    code, lines = run(tmp_path, sys.executable, "-c", f"{kill}; print('too far')", SLURMTRAIN_STOP_SIGNAL="SIGUSR1")
    assert (code, lines) == (-signal.SIGUSR1, [])


def test_the_environment_of_a_rank_is_changed_as_its_agent_says(tmp_path: Path) -> None:
    report = "import os; print(*(os.environ.get(n) for n in ('A', 'B', 'C', 'SLURMTRAIN_CHANGES', 'SLURM_TASK_PID')))"
    _, [line] = run(tmp_path, sys.executable, "-c", report, A="1", SLURMTRAIN_CHANGES="A\nB=x=y\nC=\nNOT_THERE")
    assert line == "None x=y  None None"
    pid = "import os; print(os.environ['SLURM_TASK_PID'] == str(os.getpid()))"
    assert run(tmp_path, sys.executable, "-c", pid, SLURMTRAIN_CHANGES="SLURM_PROCID=3")[1][-1] == "True"


def test_a_rank_may_open_as_many_files_as_its_user_may_and_not_as_many_as_its_agent(tmp_path: Path) -> None:
    _, lines = run(tmp_path, "sh", "-c", "ulimit -Sn; echo $SLURMTRAIN_OPEN_FILES")
    assert lines == ["100", ""]


def test_a_rank_does_not_begin_without_its_agent(tmp_path: Path) -> None:
    assert run(tmp_path, "true", agent=1) == (1, ["the node agent is gone"])


def test_a_command_that_cannot_be_run_is_named(tmp_path: Path) -> None:
    code, lines = run(tmp_path, str(tmp_path / "nothing"))
    assert code == 127
    assert "cannot run" in lines[0]
    assert "No such file" in lines[0]
