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
print(signal.Signals(answer.value).name, "SLURMTRAIN_AGENT_PID" in os.environ, os.environ.get("SUBMITIT_X"))
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
        "SUBMITIT_X": "1",
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
    assert (code, lines) == (0, [ignored, f"{chosen} False None"])


def test_a_script_survives_other_signals_and_is_ended_by_the_stop_signal(tmp_path: Path) -> None:
    kill = "import os, signal; [os.kill(os.getpid(), s) for s in (signal.SIGUSR2, signal.SIGTERM, signal.SIGUSR1)]"
    code, lines = run(tmp_path, sys.executable, "-c", f"{kill}; print('too far')", SLURMTRAIN_STOP_SIGNAL="SIGUSR1")
    assert (code, lines) == (-signal.SIGUSR1, [])


# What torch elastic sets for a process that it starts.
ELASTIC = {
    "RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "ROLE_RANK": "1", "ROLE_NAME": "worker", "ROLE_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "12345", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "False", "TORCHELASTIC_ERROR_FILE": "/x",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT",
}  # fmt: skip
# What Slurm sets for the node agent, its task.
TASK = {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "PMIX_RANK": "1"}


@pytest.mark.parametrize(
    ("launcher", "kept"),
    [
        ("ranks", {*ELASTIC, *TASK} - {"TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}),
        ("node", {"MASTER_ADDR", "MASTER_PORT"}),
        ("none", set()),
    ],
)
def test_a_command_that_starts_the_ranks_itself_does_not_inherit_those_of_a_rank(
    launcher: str, kept: set[str], tmp_path: Path
) -> None:
    variables = {**ELASTIC, **TASK}
    report = f"import os; print(*sorted({set(variables)} & os.environ.keys()))"
    run_main(tmp_path, sys.executable, "-c", report, **variables, SLURMTRAIN_LAUNCHER=launcher, SLURMTRAIN_NODE="3")
    log = tmp_path / ("rank-1.log" if launcher == "ranks" else "node-3.log")
    assert log.read_text().split() == sorted(kept)


def test_ranks_that_share_a_store_of_the_agent_are_told_so(tmp_path: Path) -> None:
    report = "import os; print(os.environ['TORCHELASTIC_USE_AGENT_STORE'])"
    _, lines = run(tmp_path, sys.executable, "-c", report, TORCHELASTIC_USE_AGENT_STORE="True")
    assert lines == ["True"]


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
