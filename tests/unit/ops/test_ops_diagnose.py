"""Why a run failed, by its logs and journals."""

from __future__ import annotations

import os
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from helpers.simulated_run import SimulatedRun

from slurmtrain.errors import RunNotFound
from slurmtrain.model.diagnosis.hang import Phase, RankState
from slurmtrain.model.diagnosis.root_cause import PatternMatch
from slurmtrain.model.run.run import Live
from slurmtrain.ops import attempt_logs as log_reading
from slurmtrain.ops.diagnose import AttemptDiagnosis, diagnose
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.slurm.parse import Job

JOB = "77"
LASTED = 600.0


def iso(at: float) -> str:
    """A time as this machine's programs log it."""
    return datetime.fromtimestamp(at).isoformat()


class Logged:
    """A run of two nodes with two ranks each, whose attempt failed ten minutes after it began."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.run = workspace.root.run("0000000001")
        self.began = float(int(time.time())) - 3600
        self.failed = self.began + LASTED
        self.sim = SimulatedRun(self.run, job=JOB, now=self.began - 10).submitted()
        self.start(0)

    def start(self, restart: int) -> None:
        """Begin another start of the job, a thousand seconds after the previous one."""
        began = self.began + 1000 * restart
        self.restart = restart
        self.attempt = self.run.attempt(JOB, restart)
        self.attempt.logs.mkdir(parents=True)
        self.sim.later(began - self.sim.now - 1).started(restart, nodes=2)
        for node in range(2):
            process = {"host": f"n{node}", "boot": "b", "pid": 7, "start": 1}
            ranks = {str(rank): process for rank in (2 * node, 2 * node + 1)}
            self.sim.node("workers", node, restart, at=began + 1, processes=ranks, resume_from=None)

    def log(self, rank: int, *lines: str | bytes, name: str = "") -> Path:
        """Write the log of a rank."""
        path = self.attempt.logs / (name or f"rank-{rank}.log")
        path.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines))
        return path

    def job_log(self, task: int, *lines: str) -> None:
        """Write the log of a node's task; that of node 0 holds the batch script's lines too."""
        folder = self.run.submission(1).submitit
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{JOB}_{task}_log.out").write_text("".join(f"{line}\n" for line in lines))

    def ends(self, node: int, cause: str = "crash", *, after: float = LASTED, failures: Any = (), **more: Any) -> None:
        """Let the agent of a node journal its end."""
        at = self.began + after
        fields = {"reason": f"{cause} of node {node}", "failed_at": at, "cascade": False, "failures": list(failures)}
        self.sim.ended(cause, node, self.restart, at=at + 1, **{**fields, **more})

    def diagnose(self, number: int | None = None) -> AttemptDiagnosis:
        """Diagnose the attempt of this number, by default the newest."""
        return diagnose(self.workspace, self.run.id, number)


def failure(rank: int, at: float, *lines: str, **more: Any) -> dict[str, Any]:
    return {"rank": rank, "pid": 7, "exit_code": 1, "signal": None, "at": at, "error": None, "last_lines": list(lines),
            **more}  # fmt: skip


def matches(diagnosed: AttemptDiagnosis) -> list[PatternMatch]:
    """The root, if there is one, and all others."""
    return [match for match in (diagnosed.diagnosis.root, *diagnosed.diagnosis.others) if match is not None]


@pytest.fixture
def logged(workspace: Workspace) -> Logged:
    return Logged(workspace)


def test_the_root_is_found_among_its_consequences(logged: Logged) -> None:
    for rank in (0, 1, 2):
        logged.log(rank, "step 9", "RuntimeError: [pair.cc:534] Connection closed by peer [10.1.2.3]:3371")
    logged.log(3, "step 9", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.")
    at = logged.failed
    logged.ends(1, failures=[failure(3, at)])
    logged.ends(0, after=LASTED + 2, cascade=True, failures=[failure(0, at + 2), failure(1, at + 2)])
    diagnosed = logged.diagnose()
    root = diagnosed.diagnosis.root
    assert (root.first.name, root.first.rank, root.first.host) == ("cuda-oom", 3, "n1")
    assert (root.first.at, root.first.exact) == (at, False)
    assert [match.first.name for match in diagnosed.diagnosis.others] == ["peer-closed"]
    assert diagnosed.diagnosis.others[0].ranks == [0, 1, 2]
    document = diagnosed.to_dict()
    assert (document["root"]["at_by"], document["root"]["log"]) == ("exit", str(logged.attempt.rank_log(3)))
    assert (document["attempt"], document["cause"], document["logs"]["read"]) == (1, "crash", 4)


def test_without_a_known_pattern_the_rank_that_failed_first_is_shown(logged: Logged) -> None:
    logged.log(0, "RuntimeError: Connection reset by peer")
    logged.log(2, "ValueError: odd")
    logged.ends(0, cascade=True, after=LASTED - 5, failures=[failure(0, logged.failed - 5, "reset by peer")])
    logged.ends(1, failures=[failure(2, logged.failed, "step 9", "api_token=hunter2", error="ValueError: odd")])
    diagnosed = logged.diagnose()
    root = diagnosed.diagnosis.root
    assert (root.first.name, root.first.cause, root.ranks) == ("exception", "your script raised ValueError: odd", [2])
    assert diagnosed.headline == "your script raised ValueError: odd (rank 2 on n1)"
    assert (diagnosed.failing.rank, diagnosed.failing.host) == (2, "n1")
    assert diagnosed.failing.description == "exited with code 1: ValueError: odd"
    assert diagnosed.failing.last_lines == ["step 9", "api_token=<redacted>"]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"password=hunter2 \x1b[31mCUDA out of memory", "password=<redacted>  [31mCUDA out of memory"),
        (b"\xff\xfe\x00\x80 CUDA out of memory \xc3\x28", None),
    ],
)
def test_secrets_control_characters_and_bytes_that_are_no_text_are_not_shown(
    logged: Logged, content: bytes, text: str | None
) -> None:
    logged.log(0, content, bytes(range(256)))
    root = logged.diagnose().diagnosis.root
    assert root.first.name == "cuda-oom"
    assert text is None or root.first.text == text


def test_a_run_without_logs_is_diagnosed_by_its_journals(logged: Logged) -> None:
    diagnosed = logged.diagnose()
    assert (diagnosed.diagnosis.root, diagnosed.failing, diagnosed.read) == (None, None, 0)
    logged.ends(1, failures=[failure(3, logged.failed, "No space left on device: '/tmp/a'")])
    diagnosed = logged.diagnose()
    first = diagnosed.diagnosis.root.first
    assert (diagnosed.read, first.name, first.rank, first.origin) == (0, "disk-full", 3, "journal of rank 3")


def test_a_run_that_was_never_started_has_nothing_to_read(workspace: Workspace) -> None:
    run = workspace.root.run("0000000002")
    SimulatedRun(run).created()
    diagnosed = diagnose(workspace, run.id)
    assert diagnosed.attempt is None
    assert diagnosed.to_dict()["attempt"] is None


def test_a_log_that_cannot_be_read_is_named_and_the_others_are_read(logged: Logged) -> None:
    (logged.attempt.logs / "rank-0.log").mkdir()
    logged.log(1, "CUDA out of memory")
    diagnosed = logged.diagnose()
    assert diagnosed.read == 1
    assert [problem.startswith(str(logged.attempt.rank_log(0))) for problem in diagnosed.problems] == [True]
    assert diagnosed.diagnosis.root is not None


def test_only_the_beginning_and_the_end_of_a_long_log_are_read(logged: Logged, monkeypatch: pytest.MonkeyPatch) -> None:
    path = logged.log(0, "CUDA out of memory")
    os.truncate(path, 10 << 30)  # sparse
    diagnosed = logged.diagnose()
    assert diagnosed.partly == [str(path)]
    assert diagnosed.diagnosis.root is not None
    monkeypatch.setattr(log_reading, "HEAD_BYTES", 1000)
    monkeypatch.setattr(log_reading, "TAIL_BYTES", 3000)
    filler = "x" * 99
    last = "uncorrectable ECC error encountered"
    logged.log(0, "No route to host", *[filler] * 500, "CUDA out of memory", *[filler] * 500, last)
    diagnosed = logged.diagnose()
    assert diagnosed.partly == [str(path)]
    names = {match.first.name: match.first for match in matches(diagnosed)}
    assert set(names) == {"no-route", "gpu-ecc"}
    assert names["gpu-ecc"].line == path.stat().st_size - len(f"{last}\n")


def test_the_ranks_of_later_rounds_are_read_too(logged: Logged) -> None:
    logged.log(0, "Connection reset by peer")
    logged.log(0, "CUDA out of memory", name="rank-0.1.log")
    logged.log(0, "No space left on device", name="rank-0.error.json")
    diagnosed = logged.diagnose()
    assert (diagnosed.diagnosis.root.first.name, diagnosed.read) == ("cuda-oom", 2)


def test_the_log_of_the_job_shows_what_slurm_did(logged: Logged) -> None:
    at = logged.failed
    logged.job_log(0, "submitit INFO - Starting", f"slurmstepd: error: *** STEP 77.0 ON n0 CANCELLED AT {iso(at)} DUE "
                   "TO TIME LIMIT ***")  # fmt: skip
    logged.job_log(1, "slurmstepd: error: Detected 1 oom_kill event in StepId=77.0. Some of the step tasks have been "
                   "OOM Killed.")  # fmt: skip
    diagnosed = logged.diagnose()
    root = diagnosed.diagnosis.root
    assert (root.first.name, root.first.host) == ("host-oom", "n1")
    assert [(match.first.name, match.first.at) for match in diagnosed.diagnosis.others] == [("slurm-reason", at)]


def test_lines_of_other_starts_of_the_job_are_left_out(logged: Logged) -> None:
    logged.ends(0, "preempted")
    logged.ends(1, "preempted")
    logged.diagnose()
    first = f"submitit INFO ({iso(logged.began)}) - Starting"
    second = f"submitit INFO ({iso(logged.began + 1000)}) - Starting"
    logged.job_log(0, first, "CUDA out of memory", second, "No space left on device")
    logged.start(1)
    logged.ends(0, after=1100.0)
    logged.ends(1, after=1100.0)
    diagnosed = logged.diagnose(2)
    assert [match.first.name for match in matches(diagnosed)] == ["disk-full"]
    earlier = diagnose(logged.workspace, logged.run.id, 1).diagnosis
    assert earlier.root.first.name == "cuda-oom"


def test_how_slurm_ended_the_start_before_explains_no_later_end(logged: Logged) -> None:
    for node in range(2):
        logged.ends(node, "preempted", after=980)
    preempted, again = iso(logged.began + 985), iso(logged.began + 1000)
    logged.job_log(0, f"slurmstepd: error: *** STEP 77.0 ON n0 CANCELLED AT {preempted} DUE TO PREEMPTION ***",
                   f"submitit INFO ({again}) - Starting")  # fmt: skip
    logged.start(1)
    for node in range(2):
        logged.ends(node, after=1050)
    assert [match.first.cause for match in matches(logged.diagnose(2))] == ["crash of node 0"]
    [_, earlier] = matches(logged.diagnose(1))
    assert earlier.first.groups == ("PREEMPTION",)


def test_a_preempted_run_that_is_not_requeued_is_not_called_so(workspace: Workspace) -> None:
    run = workspace.root.run("0000000002")
    sim = SimulatedRun(run, job="78", spec={"requeue": {"enabled": False}}).submitted().started()
    sim.ended("preempted", reason="preempted by a job of higher priority", sure=True)
    root = diagnose(workspace, run.id).diagnosis.root
    assert "resume" in root.first.fix


def test_evidence_of_the_agents_counts(logged: Logged) -> None:
    error = {"bus": "0000:c1:00", "code": 79, "times": 1, "line": "NVRM: Xid (PCI:0000:c1:00): 79, fallen off"}
    logged.ends(1, evidence={"oom_kills": 2, "memory_limit": 4 << 30, "xids": [error], "slurm": {"state": "x"}})
    diagnosed = logged.diagnose()
    causes = [match.first.cause for match in matches(diagnosed)]
    assert "memory was full: the kernel killed 2 processes of the job, whose limit is 4.0 GiB" in causes
    assert "Xid 79 of GPU 0000:c1:00: the GPU has fallen off the bus" in causes
    assert diagnosed.diagnosis.root.first.host == "n1"


def test_the_culprit_of_a_hang_is_found_among_the_ranks_of_all_nodes(logged: Logged) -> None:
    for node in range(2):
        states = [
            RankState(rank, node, 9 if rank == 2 else 10, Phase.TRAINING, 90.0).to_dict()
            for rank in (2 * node, 2 * node + 1)
        ]
        logged.sim.node("hang", node, at=logged.failed + node, ranks=states)
    diagnosed = logged.diagnose()
    root = diagnosed.diagnosis.root
    assert (root.first.name, root.first.rank, root.first.host, root.count) == ("hang", 2, "n1", 1)
    assert "rank 2" in root.first.cause
    assert root.first.at == logged.failed
    # Ranks that were started again have gone on after it: whatever ended the attempt came later.
    logged.sim.node("restart", 0, at=logged.failed + 5, round=1, cause="hang", why="x")
    for node in range(2):
        logged.ends(node, "timeout", after=LASTED + 60, reason="the time limit was reached")
    diagnosed = logged.diagnose()
    assert [match.first.role for match in diagnosed.diagnosis.others] == ["note"]
    assert diagnosed.headline.startswith("the time limit was reached")


def test_a_hang_of_a_data_loader_is_told_with_the_ways_to_avoid_a_worker_that_hangs_in_its_fork(logged: Logged) -> None:
    stack = (
        "/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py:1291 _try_get_data",
        "/train.py:30 main",
    )
    states = [RankState(0, 0, 10, Phase.TRAINING, 61.0, "S", stack).to_dict()]
    logged.sim.node("hang", 0, at=logged.failed, ranks=states)
    root = logged.diagnose().diagnosis.root
    assert "waiting for a worker of its DataLoader, called from train.py:30 main" in root.first.cause
    assert "persistent_workers=True" in root.first.fix


def test_the_watchdogs_of_all_ranks_are_compared(logged: Logged) -> None:
    for rank, completed in enumerate((811, 811, 810, 811)):
        logged.log(rank, f"[PG ID 0 PG GUID 0(default_pg) Rank {rank}] Exception detected by watchdog at work: 812, "
                   f"last enqueued NCCL work: 812, last completed NCCL work: {completed}.")  # fmt: skip
    diagnosed = logged.diagnose()
    assert diagnosed.diagnosis.laggard is not None
    assert diagnosed.to_dict()["laggard"]["ranks"] == [2]


def test_the_state_that_slurm_gave_is_the_last_resort(logged: Logged) -> None:
    job = Job(id=JOB, name="", state="NODE_FAIL", nodes="n1", starts_at=logged.began, ends_at=logged.failed)
    logged.sim.observed(job, at=logged.failed + 1)
    diagnosed = logged.diagnose()
    root = diagnosed.diagnosis.root
    assert (root.first.name, root.first.cause) == ("outcome", "a node failed (n1)")
    assert "exclude it" in root.first.fix


def test_an_unknown_attempt_is_refused(logged: Logged) -> None:
    with pytest.raises(RunNotFound, match="has no attempt 5; it has 1"):
        logged.diagnose(5)


# --- commands that start the ranks themselves -------------------------------------------------------------------------


def test_the_log_of_a_node_is_read_where_its_command_starts_the_ranks(logged: Logged) -> None:
    line = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    logged.log(0, line, name="node-1.log")
    logged.ends(1, failures=[failure(3, logged.failed, line, node=1)])
    diagnosed = logged.diagnose()
    root = diagnosed.diagnosis.root
    assert (root.first.host, root.count) == ("n1", 1)


def test_a_command_that_fails_before_it_has_ranks_is_named_with_its_host(logged: Logged) -> None:
    logged.log(0, "torchrun: error: unrecognized arguments", name="node-1.log")
    lines = ["torchrun: error: unrecognized arguments"]
    logged.ends(1, failures=[{**failure(0, logged.failed, *lines, node=1), "rank": None}])
    failing = logged.diagnose().failing
    assert (failing.rank, failing.host, failing.description) == (None, "n1", "exited with code 1")


@pytest.mark.parametrize("number", [None, 2])
def test_of_a_suspended_job_it_says_since_when_and_how_it_goes_on(logged: Logged, number: int | None) -> None:
    logged.ends(0, failures=[failure(0, logged.failed, "ValueError: odd")])
    logged.start(1)
    live = Live(state="SUSPENDED", reason="Slurm has suspended it since 2026-11-28T02:00:00.000Z")
    diagnosed = diagnose(logged.workspace, logged.run.id, number, live)
    assert diagnosed.attempt.number == 2
    root = diagnosed.diagnosis.root
    assert root.first.cause.startswith("Slurm has suspended it since 2026-11-28T02:00:00.000Z: its processes are ")
    assert f"`scontrol resume {JOB}`" in root.first.fix


def test_that_a_later_attempt_is_suspended_explains_no_earlier_failure(logged: Logged) -> None:
    logged.ends(0, failures=[failure(0, logged.failed, "ValueError: odd")])
    logged.start(1)
    live = Live(state="SUSPENDED", reason="Slurm has suspended it")
    root = diagnose(logged.workspace, logged.run.id, 1, live).diagnosis.root
    assert root.first.name != "suspended"
