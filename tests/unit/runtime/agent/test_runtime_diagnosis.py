"""Why ranks died, with what the kernel of their node noted meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from slurmtrain.model.interruption.exit_report import ExitReport
from slurmtrain.runtime.agent import diagnosis
from slurmtrain.runtime.agent.diagnosis import Before, explained, gpu_failed
from slurmtrain.runtime.agent.kernel_log import MemoryEvents

GIB = 2**30
BEFORE = Before(MemoryEvents(kills=3, limit_bytes=8 * GIB), 40)
KILLED = {"rank": 2, "signal": "SIGKILL", "exit_code": None, "error": None, "last_lines": ["step 7"]}
RAISED = {"rank": 0, "signal": None, "exit_code": 1, "error": "ValueError: 1", "last_lines": []}


class Kernel:
    """What it has noted by now."""

    def __init__(self) -> None:
        self.memory = MemoryEvents(kills=3, limit_bytes=8 * GIB)
        self.xids: list[dict[str, Any]] = []
        self.asked: list[int | None] = []

    def errors(self, after: int | None) -> list[dict[str, Any]]:
        self.asked.append(after)
        return self.xids


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    fake = Kernel()
    monkeypatch.setattr(diagnosis, "look", lambda: fake.memory)
    monkeypatch.setattr(diagnosis, "xids", fake.errors)
    monkeypatch.setattr(diagnosis, "last_record", lambda: 40)
    return fake


def crash(*failures: dict[str, Any], **more: Any) -> ExitReport:
    return ExitReport(cause="crash", reason="rank 2 was killed by SIGKILL", failed_at=1.0, failures=failures, **more)


def test_an_end_of_which_the_kernel_knows_nothing_stays_as_it_is(kernel: Kernel) -> None:
    for ending in (crash(KILLED), crash(RAISED), ExitReport(cause="completed", reason="")):
        assert explained(ending, BEFORE) is ending
    assert set(kernel.asked) == {40}


def test_a_rank_that_was_killed_for_memory_has_not_crashed(kernel: Kernel) -> None:
    kernel.memory = MemoryEvents(kills=5, limit_bytes=8 * GIB)
    ending = explained(crash(KILLED), BEFORE)
    assert ending.cause == "oom"
    said = "rank 2 was killed for memory: the job's limit is 8 GiB (raise resources.mem)"
    assert ending.reason == f"{said}; rank 2 was killed by SIGKILL"
    assert ending.evidence == {"oom_kills": 2, "memory_limit": 8 * GIB}
    assert (ending.failed_at, ending.failures) == (1.0, (KILLED,))


def test_a_rank_that_failed_by_itself_while_another_process_was_killed_has_crashed(kernel: Kernel) -> None:
    kernel.memory = MemoryEvents(kills=4)
    ending = explained(crash(RAISED, KILLED), BEFORE)
    assert ending.cause == "crash"
    assert ending.evidence == {"oom_kills": 1, "memory_limit": None}


@pytest.mark.parametrize("said", ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "MemoryError"])
def test_what_a_rank_said_of_memory_needs_no_kernel(said: str) -> None:
    assert explained(crash({**RAISED, "error": said}), BEFORE).cause == "oom"
    assert explained(crash({**RAISED, "error": None, "last_lines": [said, "bye"]}), BEFORE).cause == "oom"


def test_only_a_crash_is_explained_by_memory(kernel: Kernel) -> None:
    kernel.memory = MemoryEvents(kills=5)
    ending = explained(ExitReport(cause="preempted", reason="stopped", failures=[KILLED]), BEFORE)
    assert (ending.cause, ending.evidence["oom_kills"]) == ("preempted", 2)


def test_what_was_known_before_stays_known(kernel: Kernel) -> None:
    kernel.xids = [{"bus": "0000:3b:00", "code": 31, "times": 1}]
    ending = explained(crash(RAISED, evidence={"slurm": {}}), BEFORE)
    assert ending.evidence == {"slurm": {}, "xids": kernel.xids}


@pytest.mark.parametrize(("code", "blamed"), [(79, True), (48, True), (31, False), (13, False)])
def test_errors_of_a_gpu_itself_are_told_from_those_of_programs(kernel: Kernel, code: int, blamed: bool) -> None:
    kernel.xids = [{"bus": "0000:3b:00", "code": code, "times": 1}]
    assert gpu_failed(explained(crash(RAISED), BEFORE)) is blamed
    assert not gpu_failed(crash(RAISED))


def test_a_look_before_the_ranks_start_notes_both(kernel: Kernel) -> None:
    assert Before.now() == Before(kernel.memory, 40)
