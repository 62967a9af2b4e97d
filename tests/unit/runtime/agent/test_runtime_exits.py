"""How ranks ended, and commands that start the ranks of a node themselves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slurmtrain.model.experiment.launcher import NodeRanks
from slurmtrain.model.interruption.exit_report import STOPPED, KernelEvidence
from slurmtrain.model.run.events.rank_events import ExceptionRaised, TrainingCompleted
from slurmtrain.model.run.layout import AttemptDir
from slurmtrain.runtime.agent import exits
from slurmtrain.runtime.agent.exits import (
    CommandExits,
    KernelState,
    MemoryEvents,
    RankExits,
    last_record,
    memory_events,
    xids,
)
from slurmtrain.system.files import make_directory
from slurmtrain.system.journal import Journal

REPORT = (
    "E1122 12:00:01.456000 4 torch/distributed/elastic/multiprocessing/api.py:9] failed (exitcode: {}) local_rank: {}"
)


@dataclass
class Ended:
    """A process that has ended."""

    returncode: int | None
    pid: int = 7

    def poll(self) -> int | None:
        return self.returncode


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    attempt = AttemptDir(tmp_path / "7.0", 1)
    make_directory(attempt.logs)
    return attempt


def raised(attempt: AttemptDir, rank: int, message: str) -> None:
    with Journal(attempt.rank_journal(rank), durable=False) as journal:
        journal.write(ExceptionRaised(type="ValueError", message=message))


def test_a_rank_ends_as_its_journal_and_its_log_say(attempt: AttemptDir) -> None:
    raised(attempt, 3, "boom")
    attempt.rank_log(3).write_text("step 1\nValueError: boom\n")
    rank_exit = RankExits(attempt).read(3, Ended(1), at=5.0)
    assert (rank_exit.rank, rank_exit.node, rank_exit.code, rank_exit.finished) == (3, None, 1, False)
    assert rank_exit.describe() == "ValueError: boom; rank 3 exited with code 1"
    assert rank_exit.last_lines == ["step 1", "ValueError: boom"]


def test_reports_of_leaks_behind_a_traceback_do_not_hide_it(attempt: AttemptDir) -> None:
    leaks = "nanobind: leaked 64 types!\n" + ' - leaked type "ATOMIC_OP"\n' * 40 + " - ... skipped remainder\n"
    attempt.rank_log(3).write_text(f"step 1\nValueError: boom\n{leaks}See https://nanobind.readthedocs.io/leaks\n")
    assert RankExits(attempt).read(3, Ended(1), at=5.0).last_lines == ["step 1", "ValueError: boom"]


def test_a_command_ends_like_the_rank_that_its_launcher_blames(attempt: AttemptDir) -> None:
    raised(attempt, 4, "a peer has closed the connection")
    raised(attempt, 5, "boom")
    attempt.node_log(2).write_text(f"ValueError: boom\n{REPORT.format(1, 1)}\nTraceback: of torchrun\n=====\n")
    exits, process = CommandExits(attempt, 2, NodeRanks((2, 2, 2))), Ended(1)
    assert exits.code(process) == 1
    command_exit = exits.read(2, process, at=5.0)
    assert (command_exit.rank, command_exit.node) == (5, 2)
    assert command_exit.describe() == "ValueError: boom; rank 5 exited with code 1"
    assert command_exit.last_lines == ["ValueError: boom"]


def test_a_launcher_that_blames_a_rank_for_the_loss_of_another_is_not_believed(attempt: AttemptDir) -> None:
    raised(attempt, 4, "Connection closed by peer")
    raised(attempt, 5, "boom")
    attempt.node_log(2).write_text(REPORT.format(-6, 0) + "\n")
    assert CommandExits(attempt, 2, NodeRanks((2, 2, 2))).read(2, Ended(1), at=5.0).describe() == (
        "ValueError: boom; rank 5 exited with code 1"
    )


@pytest.mark.parametrize("code", [STOPPED, -15, -9])
def test_launchers_exit_with_1_whatever_the_code_of_their_rank(attempt: AttemptDir, code: int) -> None:
    # What another one has raised is a consequence.
    raised(attempt, 1, "an unknown consequence")
    attempt.node_log(0).write_text(REPORT.format(code, 0) + "\n")
    exits = CommandExits(attempt, 0, NodeRanks((2, 2)))
    assert exits.code(Ended(1)) == code
    command_exit = exits.read(0, Ended(1), at=5.0)
    assert (command_exit.rank, command_exit.code) == (0, code)


def test_a_command_that_says_nothing_of_its_ranks_ends_by_itself(attempt: AttemptDir) -> None:
    attempt.node_log(0).write_text("torchrun: error: unrecognized arguments: --x\n")
    exits = CommandExits(attempt, 0, NodeRanks((2, 2)))
    assert exits.code(Ended(2)) == 2
    assert exits.read(0, Ended(2), at=5.0).describe() == (
        "torchrun: error: unrecognized arguments: --x; the command on node 0 exited with code 2"
    )
    assert exits.code(Ended(None)) is None


def test_the_work_of_a_command_is_done_if_that_of_all_of_its_ranks_is(attempt: AttemptDir) -> None:
    exits = CommandExits(attempt, 0, NodeRanks((2, 2)))
    for rank, finished in ((0, False), (1, True)):
        with Journal(attempt.rank_journal(rank), durable=False) as journal:
            journal.write(TrainingCompleted(step=9))
        assert exits.read(0, Ended(0), at=5.0).finished is finished


# --- what the kernel knows --------------------------------------------------------------------------------------------


GIB = 2**30
TASK = "slurm/uid_7/job_5/step_0/task_0"


class Machine:
    """A machine's files below a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def v2(self, *, kills: int, cgroup: str = f"0::/{TASK}\n") -> None:
        """Version 2, with a limit on the job's cgroup only."""
        self.write("proc/self/cgroup", cgroup)
        self.write(f"sys/fs/cgroup/{TASK}/memory.events", f"low 0\noom 9\noom_kill {kills}\noom_group_kill 0\n")
        self.write(f"sys/fs/cgroup/{TASK}/memory.max", "max\n")
        self.write("sys/fs/cgroup/slurm/uid_7/job_5/memory.max", f"{4 * GIB}\n")

    def v1(self, *, kills: int) -> None:
        """Version 1 beside a version 2 without a memory controller."""
        self.write("proc/self/cgroup", f"4:memory:/{TASK}\n2:cpu,cpuacct:/\n0::/elsewhere\n")
        folder = f"sys/fs/cgroup/memory/{TASK}"
        self.write(f"{folder}/memory.oom_control", f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
        self.write(f"{folder}/memory.limit_in_bytes", f"{2 * GIB}\n")
        self.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# --- memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "limit_bytes"), [("v1", 2 * GIB), ("v2", 4 * GIB)])
def test_kills_and_the_limit_of_the_job_are_read_from_both_versions(
    machine: Machine, version: str, limit_bytes: int
) -> None:
    write = getattr(machine, version)
    write(kills=1)
    before = memory_events(machine.root)
    assert before == MemoryEvents(kills=1, limit_bytes=limit_bytes)
    write(kills=3)
    assert memory_events(machine.root).since(before) == MemoryEvents(kills=2, limit_bytes=limit_bytes)


def test_the_smallest_limit_around_a_process_holds(machine: Machine) -> None:
    machine.v2(kills=0)
    machine.write("sys/fs/cgroup/slurm/memory.max", f"{9 * GIB}\n")
    machine.write("sys/fs/cgroup/slurm/uid_7/job_5/step_0/memory.max", f"{3 * GIB}\n")
    assert memory_events(machine.root).limit_bytes == 3 * GIB


@pytest.mark.parametrize("cgroup", ["0::/../outside\n", "0::/docker/abc\n", "0::/\n"])
def test_a_container_reads_its_own_part_of_the_hierarchy(machine: Machine, cgroup: str) -> None:
    machine.v2(kills=0, cgroup=cgroup)
    machine.write("sys/fs/cgroup/memory.events", "oom_kill 5\n")
    machine.write("sys/fs/cgroup/memory.max", f"{GIB}\n")
    assert memory_events(machine.root) == MemoryEvents(kills=5, limit_bytes=GIB)


def test_without_a_cgroup_the_kills_of_the_whole_machine_are_counted(machine: Machine) -> None:
    machine.v2(kills=7)
    machine.write(f"sys/fs/cgroup/{TASK}/memory.events", "low 0\n")
    machine.write("proc/vmstat", "nr_free_pages 5\noom_kill 2\n")
    before = memory_events(machine.root)
    assert before == MemoryEvents(kills=2, own=False)
    machine.write("proc/vmstat", "oom_kill 3\n")
    assert memory_events(machine.root).since(before) == MemoryEvents(kills=1, own=False)


def test_unreadable_files_give_unknown_counts(machine: Machine) -> None:
    nothing = memory_events(machine.root)
    assert nothing == MemoryEvents(own=False)
    assert nothing.since(nothing).kills == 0
    # Those of a cgroup and of the machine are not compared.
    assert MemoryEvents(kills=50, own=False).since(MemoryEvents(kills=1)).kills == 0
    assert MemoryEvents(kills=50).since(MemoryEvents()).kills == 0
    assert MemoryEvents(kills=1).since(MemoryEvents(kills=2)).kills == 0


@given(cgroup=st.text())
@example(cgroup="x" * 300)
@example(cgroup="x\0")
def test_reading_cgroups_never_raises(tmp_path_factory: pytest.TempPathFactory, cgroup: str) -> None:
    machine = Machine(tmp_path_factory.getbasetemp() / "machine")
    (machine.root / "proc/self").mkdir(parents=True, exist_ok=True)
    (machine.root / "proc/self/cgroup").write_bytes(f"0::/{cgroup}".encode("utf-8", "surrogatepass"))
    assert memory_events(machine.root).limit_bytes is None


# --- the kernel log ---------------------------------------------------------------------------------------------

LOG = (
    "6,100,1000000,-;usb 1-1: new device\n SUBSYSTEM=usb\n"
    "4,101,1000001,-;NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', GPU has fallen off the bus.\n"
)
LATER = "4,102,9,-;NVRM: Xid (PCI:0000:2b:00): 31, pid=77, name=python\n"


def test_errors_of_gpus_after_a_record_are_returned(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text(LOG)
    before = last_record(log)
    assert before == 101
    assert xids(before, log) == []
    log.write_text(LOG + LATER)
    assert [(xid["bus"], xid["code"], xid["times"]) for xid in xids(before, log)] == [("0000:2b:00", 31, 1)]


def test_an_unreadable_kernel_log_gives_no_errors(tmp_path: Path) -> None:
    assert last_record(tmp_path / "none") is None
    assert xids(None, tmp_path / "none") == []
    assert xids(5, tmp_path / "none") == []
    assert xids(5, tmp_path) == []


def test_what_the_kernel_logged_before_the_ranks_started_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    xid = {"bus": "0000:3b:00", "code": 31, "times": 1}
    monkeypatch.setattr(exits, "memory_events", lambda: MemoryEvents(kills=3, limit_bytes=GIB))
    monkeypatch.setattr(exits, "last_record", lambda: 40)
    monkeypatch.setattr(exits, "xids", {40: [xid]}.__getitem__)
    before = KernelState.now()
    assert before == KernelState(MemoryEvents(kills=3, limit_bytes=GIB), 40)
    monkeypatch.setattr(exits, "memory_events", lambda: MemoryEvents(kills=5, limit_bytes=GIB))
    assert before.changes() == KernelEvidence(oom_kills=2, memory_limit=GIB, xids=[xid])
