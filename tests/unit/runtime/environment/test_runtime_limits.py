"""Which limit a rank has met, by how it ended."""

from __future__ import annotations

import resource
import signal

import pytest

from slurmtrain.runtime.environment import process_limits as module
from slurmtrain.runtime.environment.process_limits import exceeded_limit

CASES = [
    (-signal.SIGXCPU, "started", resource.RLIMIT_CPU, "CPU time of a process is 60 s (ulimit -t"),
    (128 + signal.SIGXCPU, "", resource.RLIMIT_CPU, "CPU time of a process is 60 s (ulimit -t"),
    (-signal.SIGXFSZ, "", resource.RLIMIT_FSIZE, "the size of a file is 60 bytes (ulimit -f"),
    (1, "OSError: [Errno 27] File too large", resource.RLIMIT_FSIZE, "the size of a file is 60 bytes (ulimit -f"),
    (1, "BlockingIOError: [Errno 11] Resource temporarily unavailable", resource.RLIMIT_NPROC, "is 60 (ulimit -u"),
    (1, "RuntimeError: can't start new thread", resource.RLIMIT_NPROC, "is 60 (ulimit -u"),
    (1, "MemoryError", resource.RLIMIT_AS, "address space of a process is 60 bytes (ulimit -v"),
]


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[int, int]]:
    """The limits of this process, by number; those that are missing are unlimited."""
    own: dict[int, tuple[int, int]] = {}
    monkeypatch.setattr(module.resource, "getrlimit", lambda number: own.get(number, (-1, -1)))
    monkeypatch.setattr(module, "soft_limit_of_ranks", lambda: -1)
    monkeypatch.delenv("SLURMTRAIN_JOB_ID", raising=False)
    return own


@pytest.mark.parametrize(("code", "line", "number", "text"), CASES)
def test_a_limit_that_a_rank_met_is_named_with_where_it_comes_from(
    limits: dict[int, tuple[int, int]], code: int, line: str, number: int, text: str
) -> None:
    limits[number] = (60, 90)
    described = exceeded_limit(code, [line])
    assert text in described
    assert "slurm.propagate or setup" in described
    assert described.endswith(" hard' in setup raises it to 90")


def test_the_shell_of_a_local_run_is_named(limits: dict[int, tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    limits[resource.RLIMIT_CPU] = (60, -1)
    monkeypatch.setenv("SLURMTRAIN_JOB_ID", "local-1")
    described = exceeded_limit(-signal.SIGXCPU, [])
    assert "from the shell that submitted the run, or setup); 'ulimit -S -t unlimited' there" in described


def test_a_rank_that_failed_for_another_reason_has_met_no_limit(limits: dict[int, tuple[int, int]]) -> None:
    for number in range(16):
        limits[number] = (60, 90)
    assert exceeded_limit(1, ["ValueError: no"]) == ""
    assert exceeded_limit(0, ["RuntimeError: can't start new thread"]) == ""


def test_a_kill_at_the_hard_limit_of_cpu_time_is_told_from_others(
    limits: dict[int, tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits[resource.RLIMIT_CPU] = (60, 60)
    for spent, is_named in ((59.0, False), (60.0, True)):
        usage = resource.struct_rusage((spent - 1, 1.0, *[0] * 14))
        monkeypatch.setattr(resource, "getrusage", lambda _who, usage=usage: usage)
        assert ("CPU time" in exceeded_limit(-signal.SIGKILL, [])) is is_named
