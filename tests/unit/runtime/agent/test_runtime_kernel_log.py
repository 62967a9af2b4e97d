"""What a node knows of why a rank died: cgroups of both versions, the kernel log, and what is concluded."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slurmtrain.runtime.agent.kernel_log import MemoryEvents, last_record, look, oom_reason, xids

GIB = 2**30
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
)
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
        self.write("proc/self/mountinfo", "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + V2_MOUNT)
        self.write(f"sys/fs/cgroup/{TASK}/memory.events", f"low 0\noom 9\noom_kill {kills}\noom_group_kill 0\n")
        self.write(f"sys/fs/cgroup/{TASK}/memory.max", "max\n")
        self.write("sys/fs/cgroup/slurm/uid_7/job_5/memory.max", f"{4 * GIB}\n")

    def v1(self, *, kills: int) -> None:
        """Version 1 beside a version 2 without a memory controller."""
        self.write("proc/self/cgroup", f"4:memory:/{TASK}\n2:cpu,cpuacct:/\n0::/elsewhere\n")
        self.write("proc/self/mountinfo", V1_MOUNTS)
        folder = f"sys/fs/cgroup/memory/{TASK}"
        self.write(f"{folder}/memory.oom_control", f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
        self.write(f"{folder}/memory.limit_in_bytes", f"{2 * GIB}\n")
        self.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# --- memory -----------------------------------------------------------------------------------------------------


def test_kills_and_the_limit_of_the_job_are_read_from_version_2(machine: Machine) -> None:
    machine.v2(kills=1)
    before = look(machine.root)
    assert before == MemoryEvents(kills=1, limit_bytes=4 * GIB)
    machine.v2(kills=3)
    assert look(machine.root).since(before) == MemoryEvents(kills=2, limit_bytes=4 * GIB)


def test_kills_and_the_limit_of_the_job_are_read_from_version_1(machine: Machine) -> None:
    machine.v1(kills=0)
    before = look(machine.root)
    assert before == MemoryEvents(kills=0, limit_bytes=2 * GIB)
    machine.v1(kills=1)
    assert look(machine.root).since(before).kills == 1


def test_no_limit_is_no_number(machine: Machine) -> None:
    machine.v1(kills=0)
    machine.write(f"sys/fs/cgroup/memory/{TASK}/memory.limit_in_bytes", "9223372036854771712\n")
    assert look(machine.root).limit_bytes is None
    machine.v2(kills=0)
    machine.write("sys/fs/cgroup/slurm/uid_7/job_5/memory.max", "max\n")
    assert look(machine.root).limit_bytes is None


def test_the_smallest_limit_around_a_process_holds(machine: Machine) -> None:
    machine.v2(kills=0)
    machine.write("sys/fs/cgroup/slurm/memory.max", f"{9 * GIB}\n")
    machine.write("sys/fs/cgroup/slurm/uid_7/job_5/step_0/memory.max", f"{3 * GIB}\n")
    assert look(machine.root).limit_bytes == 3 * GIB


@pytest.mark.parametrize("cgroup", ["0::/../outside\n", "0::/docker/abc\n", "0::/\n"])
def test_in_a_container_its_own_part_of_the_hierarchy_counts(machine: Machine, cgroup: str) -> None:
    machine.v2(kills=0, cgroup=cgroup)
    machine.write("proc/self/mountinfo", V2_MOUNT.replace(" / ", " /docker/abc ", 1))
    machine.write("sys/fs/cgroup/memory.events", "oom_kill 5\n")
    machine.write("sys/fs/cgroup/memory.max", f"{GIB}\n")
    assert look(machine.root) == MemoryEvents(kills=5, limit_bytes=GIB)


def test_where_no_cgroup_tells_the_whole_machine_counts(machine: Machine) -> None:
    machine.v2(kills=7)
    machine.write(f"sys/fs/cgroup/{TASK}/memory.events", "low 0\n")
    machine.write("proc/vmstat", "nr_free_pages 5\noom_kill 2\n")
    before = look(machine.root)
    assert before == MemoryEvents(kills=2, own=False)
    machine.write("proc/vmstat", "oom_kill 3\n")
    assert look(machine.root).since(before) == MemoryEvents(kills=1, own=False)


def test_where_nothing_is_readable_nothing_is_known(machine: Machine) -> None:
    nothing = look(machine.root)
    assert nothing == MemoryEvents(own=False)
    assert nothing.since(nothing).kills == 0


def test_numbers_of_different_origin_are_not_compared() -> None:
    assert MemoryEvents(kills=50, own=False).since(MemoryEvents(kills=1)).kills == 0
    assert MemoryEvents(kills=50).since(MemoryEvents()).kills == 0
    assert MemoryEvents(kills=1).since(MemoryEvents(kills=2)).kills == 0


@given(cgroup=st.text(), mountinfo=st.text() | st.text().map(lambda text: f"1 2 3 {text} / - cgroup2 {text}"))
@example(cgroup="x" * 300, mountinfo="1 2 3 / / - cgroup2 x")
@example(cgroup="x", mountinfo="1 2 3 / /\0 - cgroup2 x")
def test_looking_never_raises(tmp_path_factory: pytest.TempPathFactory, cgroup: str, mountinfo: str) -> None:
    machine = Machine(tmp_path_factory.mktemp("machine"))
    (machine.root / "proc/self").mkdir(parents=True)
    (machine.root / "proc/self/cgroup").write_bytes(f"0::/{cgroup}".encode("utf-8", "surrogatepass"))
    (machine.root / "proc/self/mountinfo").write_bytes(mountinfo.encode("utf-8", "surrogatepass"))
    assert look(machine.root).limit_bytes is None


# --- what it means ----------------------------------------------------------------------------------------------


def test_a_rank_that_was_killed_while_the_kernel_killed_for_memory_had_too_little() -> None:
    reason = oom_reason("SIGKILL", 1, 62 * GIB, None, rank=3)
    assert reason == "rank 3 was killed for memory: the job's limit is 62 GiB (raise resources.mem)"
    assert "the node had none left" in (oom_reason("SIGKILL", 1, None, None) or "")


def test_a_rank_whose_data_loader_was_killed_for_memory_had_too_little() -> None:
    said = "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed. "
    assert oom_reason(None, 1, GIB, said, rank=0) == (
        "a data loader's process of rank 0 was killed for memory: the job's limit is 1 GiB (raise resources.mem)"
    )
    assert oom_reason(None, 0, GIB, said) is None


@pytest.mark.parametrize(("signal", "kills"), [("SIGKILL", 0), ("SIGSEGV", 1), (None, 1), (None, 0)])
def test_other_ends_are_not_for_lack_of_memory(signal: str | None, kills: int) -> None:
    assert oom_reason(signal, kills, GIB, "ValueError: out of range") is None
    assert oom_reason(signal, kills, GIB, None) is None


@pytest.mark.parametrize(
    ("error", "what"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "GPU memory"),
        ("torch.cuda.OutOfMemoryError: HIP out of memory.", "GPU memory"),
        ("RuntimeError: CUDA error: out of memory", "GPU memory"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate", "GPU memory"),
        ("MemoryError", "resources.mem"),
        ("OSError: [Errno 12] Cannot allocate memory", "resources.mem"),
        (
            "RuntimeError: [enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory",
            "resources.mem",
        ),
    ],
)
def test_what_an_exception_says_of_memory_tells_which_was_short(error: str, what: str) -> None:
    assert what in (oom_reason(None, 0, None, error) or "")


# --- the kernel log ---------------------------------------------------------------------------------------------

LOG = (
    "6,100,1000000,-;usb 1-1: new device\n SUBSYSTEM=usb\n"
    "4,101,1000001,-;NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', GPU has fallen off the bus.\n"
)
LATER = "4,102,9,-;NVRM: Xid (PCI:0000:2b:00): 31, pid=77, name=python\n"


def test_errors_of_gpus_since_a_record_are_told(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text(LOG)
    before = last_record(log)
    assert before == 101
    assert xids(before, log) == []
    log.write_text(LOG + LATER)
    assert [(xid["bus"], xid["code"], xid["times"]) for xid in xids(before, log)] == [("0000:2b:00", 31, 1)]


def test_a_kernel_log_that_is_not_readable_tells_nothing(tmp_path: Path) -> None:
    assert last_record(tmp_path / "none") is None
    assert xids(None, tmp_path / "none") == []
    assert xids(5, tmp_path / "none") == []
    assert xids(5, tmp_path) == []
