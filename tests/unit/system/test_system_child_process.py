"""Commands that end with the process that has started them."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
from helpers.program import program
from helpers.site import until

from slurmtrain.system.child_process import ProcessGroup

# Starts a child that nothing waits for, and notes all ids when it is ready.
COMMAND = """
import os, signal, subprocess, sys, time
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "1000"])
with open("pids.new", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename("pids.new", "pids")
time.sleep(0 if "ends" in sys.argv else 1000)
"""
PARENT = f"""
import os, sys, time
from pathlib import Path
from slurmtrain.system.child_process import ProcessGroup
command = [sys.executable, "-c", {COMMAND!r}]
with ProcessGroup(command, environ=os.environ, cwd=Path("FOLDER"), output=sys.stderr.buffer) as group:
    print(group.pid, flush=True)
    time.sleep(1000)
"""


def read_pids(folder: Path) -> list[int]:
    until((folder / "pids").exists, "the command")
    return [int(word) for word in (folder / "pids").read_text().split()]


def have_ended(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


def start(folder: Path, behaviour: str) -> ProcessGroup:
    command = [sys.executable, "-c", COMMAND, behaviour]
    with (folder / "output").open("wb") as output:
        return ProcessGroup(command, environ=os.environ, cwd=folder, output=output)


def test_it_ends_with_the_context_also_what_ignores_sigterm(tmp_path: Path) -> None:
    with start(tmp_path, "stubborn") as group:
        pids = read_pids(tmp_path)
        assert not group.ended
    assert group.ended
    # The kernel ends all processes of the group at once, but not at the same moment.
    until(lambda: have_ended(pids), "the end of the group")


def test_what_the_command_has_started_ends_with_the_command(tmp_path: Path) -> None:
    with start(tmp_path, "ends") as group:
        until(lambda: group.ended and have_ended(read_pids(tmp_path)), "the end of the group")


def test_it_ends_when_the_process_that_has_started_it_is_killed(tmp_path: Path) -> None:
    with program(PARENT.replace("FOLDER", str(tmp_path))) as parent:
        pids = [int(parent.line()), *read_pids(tmp_path)]
        parent.send(signal.SIGKILL)
        until(lambda: have_ended(pids), "the end of the group")
