"""Why a job waits, in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.slurm.parse import describe_reason


@pytest.mark.parametrize("code", ["", "None", "(None)"])
def test_a_job_that_slurm_has_not_considered_yet_is_described_so(code: str) -> None:
    assert describe_reason(code, "7").startswith("Slurm has not looked at it yet")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("Priority", "jobs of higher priority are before it (Priority)"),
        ("(Resources)", "the nodes that it needs are busy (Resources)"),
        (
            "BeginTime",
            "it may not start before a given time; after a requeue that is some seconds to minutes (BeginTime)",
        ),
        ("JobHeldUser", "it is held by its user; 'scontrol release 7' releases it (JobHeldUser)"),
        (
            "ReqNodeNotAvail, UnavailableNodes:node3",
            "a node that it needs is down, drained or reserved (ReqNodeNotAvail)",
        ),
        (
            "launch failed requeued held",
            "it could not be launched and is held; 'scontrol release 7' releases it (launch failed requeued held)",
        ),
    ],
)
def test_a_known_reason_is_described_with_its_code(code: str, words: str) -> None:
    assert describe_reason(code, "7") == words


@pytest.mark.parametrize(
    ("code", "whose"),
    [
        ("QOSMaxJobsPerUserLimit", "its QOS"),
        ("QOSGrpNodeLimit", "its QOS"),
        ("AssocGrpCpuLimit", "its account"),
        ("AssocMaxJobsLimit", "its account"),
    ],
)
def test_a_limit_is_described_with_its_owner(code: str, whose: str) -> None:
    assert describe_reason(code, "7") == f"a limit of {whose} is reached ({code})"


def test_what_a_person_can_do_names_the_element_of_the_array() -> None:
    assert "'scontrol release 5_3'" in describe_reason("JobHeldUser", "5_3")


def test_an_unknown_reason_is_quoted() -> None:
    assert describe_reason("SomethingNew", "7") == "Slurm says SomethingNew"


@given(st.text(), st.text())
def test_any_reason_gives_words(code: str, job_id: str) -> None:
    assert describe_reason(code, job_id)
