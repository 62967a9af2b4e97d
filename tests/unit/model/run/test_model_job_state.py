"""The words of Slurm's pending reasons."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.run.job_state import describe_reason


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("(None)", "Slurm has not looked at it yet (None)"),
        ("", "Slurm has not looked at it yet"),
        ("(Resources)", "the nodes that it needs are busy (Resources)"),
        ("JobHeldUser", "it is held by its user; 'scontrol release 5_3' releases it (JobHeldUser)"),
        ("ReqNodeNotAvail, UnavailableNodes:n3", "a node that it needs is down, drained or reserved "
         "(ReqNodeNotAvail: n3)"),
        ("ReqNodeNotAvail, UnavailableNodes:node[101-103,7", "a node that it needs is down, drained or reserved "
         "(ReqNodeNotAvail)"),
        ("(Nodes required for job are DOWN, DRAINED or rese", "a node that it needs is down, drained or reserved "
         "(ReqNodeNotAvail)"),
        ("launch failed requeued held", "it could not be launched and is held; 'scontrol release 5_3' releases it "
         "(launch failed requeued held)"),
        ("QOSGrpNodeLimit", "a limit of its QOS is reached: nodes of all jobs together (QOSGrpNodeLimit)"),
        ("QOSMaxJobsPerUserLimit", "a limit of its QOS is reached: running jobs of each user (QOSMaxJobsPerUserLimit)"),
        ("QOSMaxCpuPerJobLimit", "it asks for more than its QOS allows: CPUs of one job; cancel it and ask for less "
         "(QOSMaxCpuPerJobLimit)"),
        ("AssocGrpCPURunMinutesLimit", "a limit of its account is reached: the minutes of CPUs of all jobs together "
         "(AssocGrpCPURunMinutesLimit)"),
        ("AssocMaxJobsLimit", "a limit of its account is reached: running jobs of each user (AssocMaxJobsLimit)"),
        ("SomethingNew", "Slurm says SomethingNew"),
    ],
)  # fmt: skip
def test_a_reason_is_described_with_its_code_and_what_a_person_can_do(code: str, words: str) -> None:
    assert describe_reason(code, "5_3") == words


@given(st.text(), st.text())
def test_any_reason_gives_words(code: str, job_id: str) -> None:
    assert describe_reason(code, job_id)
