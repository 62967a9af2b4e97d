"""What lines of logs say of a failure, and which of them is its root."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.diagnosis.patterns import (
    CASCADE,
    CONFIRMATION,
    NOTE,
    PATTERNS,
    ROOT,
    XIDS,
    Hit,
    diagnose,
    find,
    hit,
    is_advice,
    laggard,
    rank_of,
    time_of,
    xid,
)

WATCHDOG = (
    "[rank{0}]:[E1121 20:36:34.123456789 ProcessGroupNCCL.cpp:616] [Rank {0}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum={1}, OpType=ALLREDUCE, NumelIn=1024, NumelOut=1024, Timeout(ms)=600000) ran for 600029 "
    "milliseconds before timing out."
)
PROGRESS = (
    "[rank{0}]:[E1121 20:36:34.223456789 ProcessGroupNCCL.cpp:1785] [PG ID {3} PG GUID {3}(default_pg) Rank {0}] "
    "Exception (either an error or timeout) detected by watchdog at work: {1}, last enqueued NCCL work: {1}, last "
    "completed NCCL work: {2}."
)

# By pattern: lines as programs write them, and a part of the cause that must be told.
LINES: list[tuple[str, str, str]] = [
    ("nccl-watchdog", WATCHDOG.format(0, 812), "collective 812 (ALLREDUCE)"),
    ("nccl-progress", PROGRESS.format(0, 812, 811, 0), "completed collective 811 of 812"),
    ("store-timeout", "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying "
     "to connect to (10.1.2.3, 29500).", "nobody answers at 10.1.2.3, port 29500"),
    ("store-name", "[W socket.cpp:697] [c10d] The IPv4 network addresses of (gpu-17, 29500) cannot be retrieved (gai "
     "error: -2 - Name or service not known).", "the name gpu-17 cannot be looked up (gai error -2)"),
    ("no-route", "RuntimeError: [../gloo/transport/tcp/pair.cc:799] connect [172.17.0.1]:5121: No route to host",
     "another network"),
    ("no-route", "The server socket on [n3]:29500 is not reachable (errno: 113 - EHOSTUNREACH).", "another network"),
    ("port-taken", "RuntimeError: The server socket has failed to listen on any local network address. port: 29500",
     "port is in use"),
    ("port-taken", "error: bind failed (errno: 98 - Address already in use).", "port is in use"),
    ("nccl-connect", "n2:7:9 [0] NCCL WARN connect to 10.1.2.3<41001> returned Connection refused, exceeded error "
     "retry count (35)", "could not connect to 10.1.2.3<41001>: Connection refused"),
    ("nccl-socket", "n2:7:9 [0] misc/socket.cc:565 NCCL WARN socketPollConnect: connect returned Connection timed out",
     "could not connect to another rank"),
    ("nccl-socket", "n2:7:9 [0] os/linux.cc:99 NCCL WARN ncclOsSocketStartConnect: failed", "could not connect"),
    ("nccl-no-interface", "n2:7:9 [0] NCCL WARN Bootstrap : no socket interface found", "no interface of this node"),
    ("peer-closed", "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:534] Connection closed by peer "
     "[10.1.2.3]:3371", "another rank had gone"),
    ("peer-closed", "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
     "prematurely.", "another rank had gone"),
    ("gloo-connect", "RuntimeError: Gloo connectFullMesh failed with [../gloo/transport/tcp/pair.cc:144] no error",
     "loopback"),
    ("gloo-interface", "RuntimeError: Unable to find address for: ib9", "told to use ib9"),
    ("slow-reverse-dns", "[W socket.cpp:462] [c10d] The hostname of the client socket cannot be retrieved. err=-3",
     "ten seconds"),
    ("rendezvous", "torch.distributed.elastic.rendezvous.api.RendezvousClosedError", "fell silent"),
    ("rendezvous", "[W dynamic_rendezvous.py] Detected dead node 'gpu-17_71_0'", "fell silent"),
    ("nccl-versions", "n2:7:9 [0] NCCL WARN Mismatched NCCL version detected : rank 1 2.19.3 rank 0 2.21.5",
     "different versions"),
    ("nccl-duplicate-gpu", "NCCL WARN Duplicate GPU detected : rank 3 and rank 0 both on CUDA device c1000",
     "rank 3 is one of them"),
    ("ib-retry", "NCCL WARN NET/IB : Got completion from peer 10.1.2.3<41001> with status=12 opcode=129 len=0 vendor "
     "err 129", "gave up after its retries"),
    ("ib-connect", "NCCL WARN Call to ibv_modify_qp failed with error Network is unreachable", "unreachable"),
    ("ib-memlock", "NCCL WARN Call to ibv_create_cq failed with error Cannot allocate memory", "locked for RDMA"),
    ("ib-fatal", "n2:7:9 [0] NCCL WARN NET/IB : mlx5_0:1 async fatal event: local catastrophic error",
     "network card has failed"),
    ("nccl-sockets", "n2:7:9 [0] NCCL INFO Using network Socket", "over TCP sockets"),
    ("xid", "[ 9301.448] NVRM: Xid (PCI:0000:c1:00): 79, pid=3371, name=python, GPU has fallen off the bus.",
     "Xid 79 of GPU 0000:c1:00: the GPU has fallen off the bus"),
    ("gpu-ecc", "RuntimeError: CUDA error: uncorrectable ECC error encountered", "memory is faulty"),
    ("cuda-assert", "RuntimeError: CUDA error: device-side assert triggered", "index out of range"),
    ("cuda-oom", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity "
     "of 79.15 GiB. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF", "GPU memory"),
    ("host-oom", "slurmstepd: error: Detected 3 oom_kill events in StepId=77.0. Some of the step tasks have been OOM "
     "Killed.", "the kernel killed a process"),
    ("host-oom", "slurmstepd: error: Detected 1 oom-kill event(s) in step 77.batch cgroup.", "the kernel killed"),
    ("host-oom", "kernel: Out of memory: Killed process 3371 (python) total-vm:9000000kB", "the kernel killed"),
    ("shm-bus", "RuntimeError: DataLoader worker (pid 77) is killed by signal: Bus error. It is possible that "
     "dataloader's workers are out of shared memory.", "/dev/shm is full"),
    ("disk-full", "OSError: [Errno 28] No space left on device: '/tmp/cache/a.bin'", "file system of /tmp/cache/a.bin"),
    ("disk-full", "NCCL WARN Error: failed to extend /dev/shm/nccl-xy12 to 9637892 bytes: No space left on device",
     "/dev/shm is full"),
    ("disk-full", "tee: write error: No space left on device", "the file system is full"),
    ("efa-memory", "OSError: [Errno 12] Cannot allocate memory", "huge pages"),
    ("munge-clock", "slurmd: error: Munge decode failed: Rewound credential", "clock is wrong"),
    ("slurm-auth", "srun: error: Task launch for StepId=7.0 failed on node n3: Protocol authentication error", "munge"),
    ("slurm-auth", "slurm_receive_msg: Zero Bytes were transmitted or received", "munge"),
    ("stale-job", "srun: error: Unable to confirm allocation for job 71: Invalid job id specified", "another job"),
    ("no-such-nodes", "sbatch: error: Batch job submission failed: Requested node configuration is not available",
     "no node of the partition"),
    ("gres", "sbatch: error: Invalid generic resource (gres) specification", "no such GPUs"),
    ("slurm-names", "sbatch: error: Batch job submission failed: Invalid account or account/partition combination "
     "specified", "does not know this account"),
    ("slurm-names", "sbatch: error: Batch job submission failed: Invalid qos specification", "this qos"),
    ("step", "srun: error: Unable to create step for job 71: More processors requested than permitted", "no room"),
    ("slurm-busy", "slurmstepd: error: Job credential expired", "too busy"),
    ("slurm-busy", "srun: error: slurm_msg_sendto: Socket timed out on send/recv operation", "too busy"),
    ("slurm-reason", "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-21T20:36:34 DUE TO PREEMPTION ***",
     "PREEMPTION"),
    ("obsolete", "[W] Environment variable NCCL_BLOCKING_WAIT is deprecated; use TORCH_NCCL_BLOCKING_WAIT instead",
     "NCCL_BLOCKING_WAIT has no effect"),
    ("import", "ModuleNotFoundError: No module named 'flash_attn'", "not the one of the login node"),
    ("import", "ImportError: libcudnn.so.9: cannot open shared object file: No such file or directory",
     "not the one of the login node"),
]  # fmt: skip
BY_NAME = {pattern.name: pattern for pattern in PATTERNS}


def names(text: str) -> set[str]:
    return {pattern.name for _, pattern, _, _ in find(text)}


def hits_of(text: str, **about: Any) -> list[Hit]:
    """Hits of a log, with times by its lines."""
    return [
        hit(pattern, match, text=line, origin="log", rank=rank_of(line), line=place, **about)
        for place, pattern, match, line in find(text)
    ]


def one(name: str, *, at: float | None = None, exact: bool = True, origin: str = "a", **more: Any) -> Hit:
    """A hit of a pattern, without a log."""
    pattern = BY_NAME[name]
    about: dict[str, Any] = {"name": name, "role": pattern.role, "cause": pattern.cause, "fix": pattern.fix}
    return Hit(**{**about, "text": "", "origin": origin, "at": at, "exact": exact and at is not None, **more})


# --- patterns ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "line", "cause"), LINES)
def test_each_pattern_finds_its_lines_among_others(name: str, line: str, cause: str) -> None:
    text = f"step 1 loss 0.3\n{line}\nstep 2 loss 0.2\n"
    found = {one.name: one for one in hits_of(text)}
    assert name in found
    assert cause in found[name].cause
    assert found[name].text == line
    assert found[name].line == len("step 1 loss 0.3\n")
    assert "{" not in found[name].cause + found[name].fix


def test_every_pattern_has_a_line_here() -> None:
    assert {name for name, _, _ in LINES} == set(BY_NAME)
    assert len(BY_NAME) == len(PATTERNS)


def test_every_root_says_what_to_do() -> None:
    assert all(pattern.fix for pattern in PATTERNS if pattern.role in (ROOT, NOTE) and pattern.name != "xid")


def test_a_needle_alone_is_not_enough() -> None:
    text = "we paid the rent DUE TO the landlord\nImportError was caught\nGPU Xid\nCannot allocate memory twice\n"
    assert names(text) == set()


@pytest.mark.parametrize(
    "line",
    [
        "Hint: if you see CUDA out of memory, use smaller batches",
        "Consider a smaller batch if you get CUDA out of memory",
        "If you see No space left on device, clean the cache",
        "[rank0]: Please raise the limit when ibv_reg_mr_iova2 failed",
        "2026-11-21 20:36:34,123 WARNING Try NCCL_SOCKET_IFNAME after No route to host",
        "Setting NCCL_IB_DISABLE=1 may help with: ibv_modify_qp failed with error Connection timed out",
    ],
)
def test_lines_that_only_advise_are_passed_over(line: str) -> None:
    assert is_advice(line)
    assert names(f"{line}\n") == set()


@pytest.mark.parametrize(
    "line",
    [
        '[rank3]:     raise torch.OutOfMemoryError("CUDA out of memory")',
        "    except torch.OutOfMemoryError:",
        '    if "No space left on device" in str(error):',
        "# CUDA out of memory",
    ],
)
def test_lines_of_source_in_a_traceback_are_passed_over(line: str) -> None:
    assert names(f"Traceback\n{line}\n") == set()


def test_an_error_that_ends_with_advice_is_an_error() -> None:
    line = {name: line for name, line, _ in LINES}["cuda-oom"]
    assert not is_advice(line)


@pytest.mark.parametrize("number", sorted(XIDS))
def test_an_xid_says_whose_fault_it_is(number: int) -> None:
    role, cause, fix = xid(number, "0000:c1:00")
    assert cause.startswith(f"Xid {number} of GPU 0000:c1:00: ")
    gpu = {48, 63, 64, 74, 79, 92, 95, 119, 120}
    assert ("exclude the node" in fix) is (number in gpu)
    assert role == (CASCADE if number == 45 else ROOT)


def test_an_xid_that_is_not_known_is_named() -> None:
    assert xid(9999)[1] == "Xid 9999: see NVIDIA's catalogue of Xid errors"


def test_of_a_line_that_repeats_the_first_and_the_last_are_kept() -> None:
    text = "".join(f"{number} Broken pipe\n" for number in range(1000))
    lines = [line for _, _, _, line in find(text, limit=3)]
    assert lines == [f"{number} Broken pipe" for number in (0, 1, 2, 997, 998, 999)]


def test_a_line_of_megabytes_is_cut() -> None:
    text = "x" * 3_000_000 + " CUDA out of memory " + "y" * 3_000_000
    [(place, _, _, line)] = find(text)
    assert place == 0
    assert "CUDA out of memory" in line
    assert len(line) < 5000


@given(st.text())
def test_any_text_is_searched_without_an_error(text: str) -> None:
    assert diagnose(hits_of(text)) is not None


@given(st.lists(st.sampled_from([line for _, line, _ in LINES]) | st.text(max_size=20)))
def test_every_line_that_is_found_is_one_of_the_text(lines: list[str]) -> None:
    text = "\n".join(lines)
    for place, pattern, _, line in find(text):
        assert text.startswith(line, place)
        assert pattern.regex.search(line)


# --- times ------------------------------------------------------------------------------------------------------------

NEAR = datetime(2026, 11, 21, 20, 40, tzinfo=UTC).timestamp()
THEN = datetime(2026, 11, 21, 20, 36, 34, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("line", "at"),
    [
        ("2026-11-21T20:36:34Z x", THEN),
        ("2026-11-21T20:36:34.250+00:00 x", THEN + 0.25),
        ("2026-11-21T22:36:34+02:00 x", THEN),
        ("submitit ERROR (2026-11-21 20:36:34,500) - x", THEN + 0.5),
        ("[2026-11-21 20:36:34] n1:7:9 [0] NCCL WARN x", THEN),
        ("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-21T20:36:34 DUE TO TIME LIMIT ***", THEN),
        ("[rank3]:[E1121 20:36:34.125000000 ProcessGroupNCCL.cpp:616] x", THEN + 0.125),
        ("W1121 20:36:34.500000 3371 torch/distributed/elastic/agent.py:9] x", THEN + 0.5),
        ("[ 9301.448] NVRM: Xid (PCI:0000:c1:00): 79", None),
        ("2026-13-41T20:36:34 x", None),
        ("W9999 20:36:34.500000 x", None),
        ("loss 0.5", None),
    ],
)
def test_lines_say_when_they_were_written(line: str, at: float | None) -> None:
    assert time_of(line, NEAR) == (None if at is None else pytest.approx(at, abs=1e-6))


def test_lines_without_a_zone_are_of_the_given_one() -> None:
    zone = timezone(timedelta(hours=-8))
    assert time_of("2026-11-21 12:36:34 x", NEAR, zone) == THEN
    assert time_of("[E1121 12:36:34.0 x", NEAR, zone) == THEN


def test_the_month_of_a_line_of_torch_may_have_one_digit() -> None:
    march = datetime(2026, 3, 21, 2, 7, 8, tzinfo=UTC).timestamp()
    assert time_of("[rank0]:[E321 02:07:08.5 ProcessGroupNCCL.cpp:607] x", march) == march + 0.5


def test_a_line_from_before_new_year_is_of_the_old_year() -> None:
    near = datetime(2027, 1, 1, 0, 0, 5, tzinfo=UTC).timestamp()
    assert time_of("[E1231 23:59:59.0 x", near) == near - 6
    assert time_of("[E101 00:00:04.0 x", near) == near - 1


@given(st.text(), st.floats(0, 4e9))
def test_any_line_has_a_time_or_none(line: str, near: float) -> None:
    at = time_of(line, near)
    assert at is None or isinstance(at, float)


@pytest.mark.parametrize(("line", "rank"), [("[rank3]:[E1121 x", 3), ("[PG 1 Rank 12] x", 12), ("Rank 3 x", None)])
def test_torch_says_which_rank_writes(line: str, rank: int | None) -> None:
    assert rank_of(line) == rank


# --- the root ---------------------------------------------------------------------------------------------------------


def test_the_earliest_root_wins() -> None:
    found = diagnose([one("disk-full", at=20.0), one("cuda-oom", at=10.0, origin="b"), one("peer-closed", at=5.0)])
    assert found.root is not None
    assert found.root.first.name == "cuda-oom"
    assert [other.first.name for other in found.others] == ["peer-closed", "disk-full"]
    assert found.ordered


def test_what_only_follows_is_never_the_root() -> None:
    found = diagnose([one("peer-closed", at=1.0), one("nccl-watchdog", at=2.0, groups=("1", "X"))])
    assert found.root is None
    assert [other.first.name for other in found.others] == ["peer-closed", "nccl-watchdog"]


def test_what_is_only_worth_knowing_is_never_the_root() -> None:
    assert diagnose([one("slow-reverse-dns", at=1.0), one("obsolete", at=2.0)]).root is None


def test_slurms_last_word_stands_in_for_a_root() -> None:
    text = "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-21T20:36:34 DUE TO TIME LIMIT ***\n"
    found = diagnose([*hits_of(text), one("peer-closed")])
    assert found.root is not None
    assert found.root.first.role == CONFIRMATION
    assert "resources.time" in found.root.first.fix
    with_root = diagnose([*hits_of(text), one("cuda-oom", origin="b")])
    assert with_root.root is not None
    assert with_root.root.first.name == "cuda-oom"


def test_that_a_task_failed_explains_nothing() -> None:
    assert diagnose(hits_of("error: *** STEP 7.0 CANCELLED DUE TO TASK FAILURE ***\n")).root is None


def test_what_a_dead_peer_causes_yields_to_what_killed_it() -> None:
    refused, oom = one("nccl-connect", at=10.0), one("cuda-oom", at=12.0, exact=False, origin="b")
    found = diagnose([refused, oom])
    assert found.root is not None
    assert found.root.first is oom


def test_a_connection_that_failed_before_anything_else_is_a_root() -> None:
    refused, oom = one("nccl-connect", at=10.0), one("cuda-oom", at=12.0, origin="b")
    found = diagnose([refused, oom])
    assert found.root is not None
    assert found.root.first is refused
    alone = diagnose([refused])
    assert alone.root is not None
    assert alone.root.first is refused


def test_roots_of_several_logs_without_times_are_in_no_known_order() -> None:
    assert not diagnose([one("cuda-oom", origin="a"), one("disk-full", origin="b")]).ordered
    assert diagnose([one("cuda-oom", origin="a", line=1), one("disk-full", origin="a", line=0)]).ordered
    assert diagnose([one("cuda-oom", origin="a"), one("peer-closed", origin="b")]).ordered


def test_within_a_log_lines_without_times_are_in_their_order() -> None:
    found = diagnose([one("cuda-oom", line=9), one("disk-full", line=3)])
    assert found.root is not None
    assert found.root.first.name == "disk-full"


def test_a_line_with_a_time_comes_before_one_without() -> None:
    found = diagnose([one("cuda-oom"), one("disk-full", at=9.0, origin="b")])
    assert found.root is not None
    assert found.root.first.name == "disk-full"
    assert not found.ordered


def test_the_same_on_many_ranks_is_told_once() -> None:
    found = diagnose([one("cuda-oom", at=10.0 - rank, rank=rank) for rank in range(4)])
    assert found.root is not None
    assert (found.root.first.rank, found.root.count, found.root.ranks) == (3, 4, [0, 1, 2, 3])
    assert found.others == []


def test_different_gpus_are_told_apart() -> None:
    text = "NVRM: Xid (PCI:0000:c1:00): 79, gone\nNVRM: Xid (PCI:0000:c1:00): 43, gone\n"
    assert len(diagnose(hits_of(text)).others) == 1


# --- who is behind ----------------------------------------------------------------------------------------------------


def progress(*completed: int, group: int = 0) -> str:
    return "".join(PROGRESS.format(rank, 9, done, group) + "\n" for rank, done in enumerate(completed))


def test_the_rank_that_completed_least_is_behind() -> None:
    found = laggard(hits_of(progress(811, 811, 809, 811)), range(4))
    assert found is not None
    assert found.ranks == [2]
    assert found.why == "rank 2 had completed collective 809, others 811"


def test_the_rank_that_says_nothing_is_behind() -> None:
    found = laggard(hits_of(progress(811, 811, 811)), range(4))
    assert found is not None
    assert found.ranks == [3]
    assert found.why == "rank 3 said nothing while 3 others waited"


def test_collectives_are_compared_within_their_group() -> None:
    text = progress(5, 5, group=0) + progress(90, 90, group=1)
    assert laggard(hits_of(text), range(2)) is None


def test_sequence_numbers_tell_who_is_behind_where_nothing_else_does() -> None:
    text = "\n".join(WATCHDOG.format(rank, seq) for rank, seq in ((0, 12), (1, 11), (2, 12)))
    found = laggard(hits_of(text), range(3))
    assert found is not None
    assert found.ranks == [1]


@pytest.mark.parametrize("ranks", [range(3), range(100), ()])
def test_nobody_is_named_where_nothing_tells(ranks: Any) -> None:
    assert laggard(hits_of(progress(7, 7, 7)), ranks) is None
    assert laggard([], ranks) is None
