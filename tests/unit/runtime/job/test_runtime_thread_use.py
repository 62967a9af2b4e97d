"""How much a process's main thread computes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.site import until

from slurmtrain.runtime.job import stacks
from slurmtrain.runtime.job.stacks import ThreadUse, share, shares

# The main thread computes, or another one does while the main thread waits for it.
PROGRAMS = {
    "main": "print(flush=True)\nwhile True: pass",
    "other": "import threading\ndef compute():\n while True: pass\n"
    "t = threading.Thread(target=compute)\nt.start()\nprint(flush=True)\nt.join()",
}


@pytest.fixture(params=PROGRAMS)
def process(request: pytest.FixtureRequest) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    process = subprocess.Popen([sys.executable, "-c", PROGRAMS[request.param]], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield request.param, process
    process.kill()
    process.wait()


def test_only_the_main_thread_counts(process: tuple[str, subprocess.Popen[bytes]]) -> None:
    computes, program = process
    if computes == "main":
        before, after = while_it_computes(program.pid)
        assert used_in(before, after) > 0.3
        assert share(before, after, on_gpu=False) > 0
    else:
        # Until it waits for the other one, it may queue for a processor.
        until(lambda: used_in(*while_it_computes(program.pid)) < 0.1)


def while_it_computes(pid: int) -> tuple[ThreadUse, ThreadUse]:
    """The use before and after a process has used half a second, however busy the machine is."""
    before, start = ThreadUse.now(pid), cpu_of(pid)
    until(lambda: cpu_of(pid) - start > 0.5)
    after = ThreadUse.now(pid)
    assert before is not None
    assert after is not None
    return before, after


def used_in(before: ThreadUse, after: ThreadUse) -> float:
    return after.cpu_s - before.cpu_s


def cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_thread_that_waits_for_a_processor_computes_as_well(tmp_path: Path) -> None:
    (tmp_path / "schedstat").write_text("1500000000 500000000 7\n")
    assert stacks._busy(tmp_path) == 2.0
    (tmp_path / "schedstat").write_text("\n")
    assert stacks._busy(tmp_path) is None
    assert stacks._busy(tmp_path / "gone") is None


def test_a_share_is_of_one_core() -> None:
    before = ThreadUse(pid=7, at=100.0, cpu_s=3.0, waits=10)
    after = ThreadUse(pid=7, at=110.0, cpu_s=8.0, waits=10)
    assert share(before, after, on_gpu=False) == 0.5


def test_a_thread_that_spins_without_the_kernel_waits_for_its_gpu() -> None:
    before = ThreadUse(pid=7, at=100.0, cpu_s=3.0, waits=10)
    after = ThreadUse(pid=7, at=110.0, cpu_s=13.0, waits=10)
    assert share(before, after, on_gpu=True) == 0.0
    assert share(before, replace(after, waits=11), on_gpu=True) == 1.0


def test_ranks_without_an_earlier_measurement_are_measured_twice_and_those_that_are_gone_never(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(stacks.time, "sleep", slept.append)
    own = os.getpid()
    gone = subprocess.Popen(["true"])
    gone.wait()
    earlier = ThreadUse.now(own)
    assert earlier is not None
    long_ago = replace(earlier, at=earlier.at - 60.0)
    assert list(shares({0: own}, {0: long_ago})) == [0]
    assert slept == []
    measured = shares({0: own, 1: gone.pid, 2: own}, {0: long_ago, 2: replace(long_ago, pid=own + 1)})
    assert sorted(measured) == [0, 2]
    assert slept == [1.0]
