"""What Slurm says of a waiting job, and what would start sooner. What it prints is from 22.05."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from slurmtrain.errors import SlurmDown
from slurmtrain.model.diagnosis.answers import QueueFacts
from slurmtrain.slurm import queue_place

NOW = 1_795_933_446
JOB = """\
JobId=63 ArrayJobId=63 ArrayTaskId=8 ArrayTaskThrottle=2 JobName=b2 ArrayTaskThrottle=9 Reason=x
   UserId=ada(1001) GroupId=ada(1001) MCS_label=N/A
   Priority=4294901705 Nice=0 Account=research QOS=normal
   JobState=PENDING Reason={reason} Dependency=(null)
   RunTime=00:00:00 TimeLimit=00:20:00 TimeMin=N/A
   Partition=spot AllocNode:Sid=localhost:31530
   ReqNodeList={nodelist} ExcNodeList=(null)
   NumNodes={nodes}-{nodes} NumCPUs=3 NumTasks=3 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
"""
PARTITIONS = "".join(
    f"PartitionName={name} Nodes=node[0-3] State={state} PriorityTier={tier} MaxNodes=UNLIMITED MaxTime=04:00:00 "
    "TotalCPUs=32 TotalNodes=4\n"
    for name, state, tier in (("spot", "UP", 1), ("spot-cancel", "UP", 1), ("ondemand", "UP", 100), ("off", "DOWN", 1))
)
SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=3
#SBATCH --dependency=singleton
#SBATCH --nodelist=node3
# a secret
export KEY=1
"""
LIMITS = """\
QOS=normal(1)
    GrpJobs=N(1) GrpSubmitJobs=N(6) GrpWall=N(0.00)
    GrpTRES=cpu=N(32),mem=N(4096),node=2(4),gres/gpu=N(8)
    MaxWallPJ=
    Account Limits
      research
        MaxJobsPA=9(1) MaxJobsAccruePA=N(5)
    User Limits
      1002
        MaxJobsPU=1(3) MaxSubmitJobsPU=N(6)
      1001
        MaxJobsPU=1(1) MaxSubmitJobsPU=N(6)
        MaxTRESPU=cpu=N(32),node=4(1),gres/gpu=N(8)
"""
ACCOUNTS = """\
ClusterName=c Account=research UserName= Partition= Priority=0 ID=3
    GrpTRES=cpu=64(32),node=N(4)
    MaxJobs= MaxSubmitJobs=
ClusterName=c Account=research UserName=bob(1002) Partition= Priority=0 ID=5
    GrpTRES=cpu=1(1)
ClusterName=c Account=research UserName=ada(1001) Partition= Priority=0 ID=4
    GrpTRES=cpu=4(4),node=N(4)
    MaxJobs=3(1) MaxSubmitJobs=
"""
# What sbatch --test-only says, by the option that is changed: seconds from now, with what it adds for waiting jobs.
STARTS = {
    "": 1200,
    "--nodes=2": 0,
    "--time=0:10:00": 1200,
    "--time=0:05:00": 0,
    "--partition=ondemand": 0,
    "--partition=spot-cancel": 0,
}


class Answers:
    """Slurm, by what a command begins with; ``calls``: those of sbatch, with its standard input."""

    def __init__(self, reason: str = "Resources", nodes: int = 3, nodelist: str = "(null)", waiting: str = "") -> None:
        own = "63|4294901705|3|3|20:00|spot|Resources\n"
        self.texts = {
            "scontrol show job": JOB.format(reason=reason, nodes=nodes, nodelist=nodelist),
            "scontrol --oneliner show partition": PARTITIONS,
            "scontrol --oneliner show node": "NodeName=node3 Arch=x86_64 State=IDLE+DRAIN Reason=bad disk [root@now]\n",
            "scontrol show assoc_mgr flags=qos": LIMITS,
            "squeue": own + waiting,
            "sinfo": "spot|2\nondemand|2\n",
        }
        # What slurmctld adds for this job: 3 whole nodes of 4 for 20 minutes, and for the others.
        self.added_s = 900
        self.calls: list[tuple[tuple[str, ...], str]] = []

    def __call__(self, *command: str, stdin: str = "", **_: object) -> str:
        if command[0] == "sbatch":
            self.calls.append((command, stdin))
            option = next((word for word in reversed(command) if word in STARTS), "")
            added = 0 if option == "--partition=ondemand" else self.added_s
            preempts = "\nsbatch:   Preempts: 62" if option == "--partition=ondemand" else ""
            at = NOW + STARTS[option] + added
            return f"sbatch: Job 4 to start at {at} using 32 processors on nodes node[0-3] in partition x{preempts}\n"
        for beginning, text in self.texts.items():
            if " ".join(command).startswith(beginning):
                return text
        raise SlurmDown(f"{command[0]}: unexpected")


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Callable[..., QueueFacts]:
    monkeypatch.setattr(time, "time", lambda: float(NOW))

    def ask_queue(slurm: Answers, code: str = "Resources", *, starts_at: float | None = None) -> QueueFacts:
        monkeypatch.setattr(queue_place, "run_command", slurm)
        return queue_place.ask_queue("63", code, SCRIPT, starts_at, 4.0)

    return ask_queue


def test_variants_are_asked_without_what_says_when_and_what_slurm_adds_is_taken_off(
    ask: Callable[..., QueueFacts],
) -> None:
    slurm = Answers()
    facts = ask(slurm)
    assert (facts.ahead, facts.record["NumNodes"]) == (0, "3-3")
    assert facts.unchanged_at == NOW + 1200
    starts = {each.override: (each.starts_at - NOW, list(each.preempts)) for each in facts.alternatives}
    assert starts == {
        "resources.nodes=2": (0, []), "resources.time=0:10:00": (1200, []), "slurm.partition=spot-cancel": (900, []),
    }  # fmt: skip
    assert len(slurm.calls) == 4
    for command, stdin in slurm.calls:
        assert command[:5] == ("sbatch", "--test-only", "--partition=spot", "--account=research", "--qos=normal")
        assert stdin == "#!/bin/bash\n#SBATCH --nodes=3\n#SBATCH --nodelist=node3\ntrue\n"
    estimated = ask(Answers(), starts_at=NOW + 600.0)
    assert [each.override for each in estimated.alternatives][-1] == "slurm.partition=ondemand"
    assert estimated.alternatives[-1].preempts == ["62"]


def test_jobs_before_it_are_those_that_could_start_and_come_first(ask: Callable[..., QueueFacts]) -> None:
    waiting = (
        "64|4294901706|1|1|20:00|spot-cancel|Priority\n"  # the same nodes, and a higher priority
        "65|4294901704|1|1|20:00|spot|Priority\n"
        "61|4294901705|1|1|20:00|spot|Priority\n"  # as high, and submitted before
        "66|4294901707|1|1|20:00|spot|Dependency\n"
        "67_[1-3%2]|4294901708|1|1|20:00|spot|JobArrayTaskLimit\n"
        "68|5|1|1|20:00|ondemand|Resources\n"  # a higher tier
        "69|4294901709|1\nbroken"
    )
    facts = ask(Answers(waiting=waiting))
    assert facts.ahead == 3
    assert (facts.waiting["ondemand"], facts.waiting["spot-cancel"]) == (0, 3)


def test_a_pinned_job_is_asked_about_without_its_nodes_and_their_state_is_named(ask: Callable[..., QueueFacts]) -> None:
    slurm = Answers("ReqNodeNotAvail,_UnavailableNodes:node3", 1, "node3")
    facts = ask(slurm, "ReqNodeNotAvail, UnavailableNodes:node3", starts_at=None)
    assert facts.notes == ["node3 is idle+drain: bad disk (by root)"]
    assert facts.alternatives[0].override == "slurm.nodelist=null"
    assert "nodelist" not in slurm.calls[0][1]
    # What it would get unchanged says nothing about a job that cannot start.
    assert facts.unchanged_at is None


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("PartitionNodeLimit", ["resources.nodes=2", "slurm.partition=spot-cancel", "slurm.partition=ondemand"]),
        ("PartitionTimeLimit", ["resources.time=0:05:00", "slurm.partition=spot-cancel", "slurm.partition=ondemand"]),
    ],
)
def test_what_a_partition_does_not_allow_is_changed_to_what_one_allows(
    ask: Callable[..., QueueFacts], reason: str, changes: list[str]
) -> None:
    slurm = Answers(reason)
    slurm.texts["scontrol --oneliner show partition"] = PARTITIONS.replace(
        "MaxNodes=UNLIMITED MaxTime=04:00:00", "MaxNodes=2 MaxTime=00:05:00", 1
    ) + PARTITIONS.splitlines()[0].replace("Name=spot", "Name=short").replace("04:00", "00:10")
    facts = ask(slurm, reason)
    assert [each.override for each in facts.alternatives] == changes
    assert any("partition spot allows" in note for note in facts.notes)


def test_what_no_other_request_helps_is_not_asked(ask: Callable[..., QueueFacts]) -> None:
    slurm = Answers()
    assert ask(slurm, "JobArrayTaskLimit").notes == ["of its array, at most 2 run at once (sweep.parallel)"]
    assert ask(slurm, "QOSMaxJobsPerUserLimit").notes[-2:] == [
        "QOS normal has the limit MaxJobsPU=1, and 1 of it is in use",
        "QOS normal has the limit MaxTRESPU node=4, and 1 of it is in use",
    ]
    assert slurm.calls == []


def test_limits_are_those_of_the_kind_the_reason_names_and_of_this_user() -> None:
    limits = queue_place.describe_limits
    assert limits(LIMITS, "QOSGrpNodeLimit", "ada(1001)") == [
        "QOS normal has the limit GrpTRES node=2, and 4 of it is in use"
    ]
    assert limits(ACCOUNTS, "AssocMaxJobsLimit", "ada(1001)") == [
        "account research, user ada has the limit MaxJobs=3, and 1 of it is in use"
    ]
    assert limits(ACCOUNTS, "AssocGrpCpuLimit", "ada(1001)") == [
        "account research has the limit GrpTRES cpu=64, and 32 of it is in use",
        "account research, user ada has the limit GrpTRES cpu=4, and 4 of it is in use",
    ]
    assert limits("", "QOSJobLimit", "") == []


def test_a_slurm_that_does_not_answer_is_an_answer(ask: Callable[..., QueueFacts]) -> None:
    slurm = Answers()
    del slurm.texts["squeue"]
    facts = ask(slurm)
    assert facts.unanswered == "squeue: unexpected"
    assert facts.alternatives == ()
