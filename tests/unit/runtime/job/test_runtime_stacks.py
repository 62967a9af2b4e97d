"""Where ranks are, asked of real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.site import PATIENCE_S, until
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.diagnosis.hang import Beat, Phase
from slurmtrain.runtime.job import stacks
from slurmtrain.runtime.job.stacks import ThreadUse, cpu_shares, share

# Waits in C for ever, and without letting any other thread run Python.
WAITS_IN_C = """
import ctypes, sys, threading, time
from slurmtrain.runtime.job import stacks

threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()

def wait_in_c():
    print("ready", flush=True)
    while True:
        ctypes.PyDLL(None).sleep(1000)

stacks.answer()
wait_in_c()
"""
PY_SPY = [
    {"thread_name": "Thread-1", "os_thread_id": 8, "frames": [{"filename": "t.py", "line": 982, "name": "run"}]},
    {"thread_name": "", "os_thread_id": 7, "frames": [{"filename": "/a/x.py", "line": 4, "name": "main"}]},
]

Begin = Callable[..., int]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "rank-3.log"
    path.write_text("before\n")
    return path


@pytest.fixture
def begin(log: Path) -> Iterator[Begin]:
    """Start a process with this log that says when it is ready, and return its id."""
    started = []

    def start(*command: str) -> int:
        with log.open("ab") as output:
            started.append(subprocess.Popen(command, stdout=output, stderr=output))
        until(lambda: "ready" in log.read_text())
        return started[-1].pid

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def py_spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, str], None]:
    """Have a py-spy that ends with this code after it has printed this."""

    def install(code: int, printed: str) -> None:
        (tmp_path / "bin").mkdir()
        (tmp_path / "printed").write_text(printed)
        program = tmp_path / "bin" / "py-spy"
        program.write_text(f"#!/bin/sh\ncat '{tmp_path}/printed'\nexit {code}\n")
        program.chmod(0o700)
        for patience in ("_PY_SPY_S", "_PATIENCE_S"):
            monkeypatch.setattr(stacks, patience, PATIENCE_S)
        monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")

    return install


@pytest.fixture
def no_py_spy(py_spy: Callable[[int, str], None]) -> None:
    """As where it may not look into other processes."""
    py_spy(1, "Error: Permission Denied")


def beat(pid: int) -> Beat:
    return Beat(12, Phase.TRAINING, 0.0, pid=pid)


@pytest.mark.usefixtures("no_py_spy")
def test_a_rank_that_waits_in_c_tells_where_it_is(begin: Begin, log: Path) -> None:
    pid = begin(sys.executable, "-c", WAITS_IN_C)

    def whole_stack() -> list[str] | None:
        # One that gets no processor for a while has not said all yet.
        stack = stacks.collect_stacks({3: pid}, {3: log}, {3: beat(pid)})[3]
        return stack if stack and stack[-1].endswith(" <module>") else None

    stack = until(whole_stack, "the whole stack")
    assert stack[0].endswith(" wait_in_c")
    log_text = log.read_text()
    assert f"slurmtrain: the threads of rank 3 (process {pid}, state " in log_text
    assert "threading.py" in log_text, "the other thread is in the log too"


@pytest.mark.usefixtures("no_py_spy")
def test_a_stopped_rank_is_named_stopped_and_left_alone(begin: Begin, log: Path) -> None:
    pid = begin(sys.executable, "-c", WAITS_IN_C)
    os.kill(pid, signal.SIGSTOP)
    until(lambda: stacks.state_of(pid) == "T")
    state = stacks.rank_states(1, {3: beat(0)}, {3: pid}, {3: log})[0]
    assert (state.rank, state.node, state.step) == (3, 1, 12)
    assert (state.state, state.stack) == ("T", ())
    assert "state T" in log.read_text()
    assert not pending(pid) & 1 << (stacks.SIGNAL - 1)


@pytest.mark.usefixtures("no_py_spy")
def test_a_process_that_would_die_of_the_signal_is_not_sent_it(begin: Begin, log: Path) -> None:
    pid = begin("/bin/sh", "-c", "echo ready; exec sleep 1000")
    # Before that it may wait for a disk, which is told of.
    until(lambda: Path(f"/proc/{pid}/comm").read_text() == "sleep\n" and stacks.state_of(pid) == "S", "its sleep")
    assert stacks.collect_stacks({3: pid}, {3: log}, {}) == {3: []}
    assert stacks.state_of(pid) in ("S", "R")
    assert pending(pid) == 0


def test_what_py_spy_says_goes_to_the_log_and_is_believed(
    py_spy: Callable[[int, str], None], begin: Begin, log: Path
) -> None:
    pid = begin("/bin/sh", "-c", "echo ready; exec sleep 1000")
    main: dict[str, Any] = {**PY_SPY[1], "os_thread_id": pid}
    py_spy(0, json.dumps([PY_SPY[0], main]))
    assert stacks.collect_stacks({3: pid}, {3: log}, {3: beat(0)}) == {3: ["/a/x.py:4 main"]}
    log_text = log.read_text()
    assert f"Thread {pid}  (most recent call first):\n  /a/x.py:4 main\n" in log_text
    assert "t.py:982 run" in log_text


@pytest.mark.usefixtures("no_py_spy")
def test_ranks_without_a_process_or_a_log_are_nowhere(log: Path, tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    logs = {0: log, 1: tmp_path / "none" / "rank-1.log"}
    pids = dict.fromkeys(range(3), gone.pid)
    assert stacks.collect_stacks(pids, logs, {}) == {0: [], 1: [], 2: []}


def pending(pid: int) -> int:
    """The signals that a process has been sent and not taken."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("ShdPnd:"))


# --- reading ------------------------------------------------------------------------------------------------------


NAMES = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1)
FRAMES = st.lists(st.tuples(NAMES, st.integers(1, 10**6), st.sampled_from(["main", "<module>", "f.<locals>.g"])))


@given(st.lists(FRAMES, max_size=3), FRAMES, st.text())
def test_a_dump_is_read_whatever_surrounds_it(others: list[Any], own: list[Any], noise: str) -> None:
    dump = [f"Thread 0x{index:x} (most recent call first):\n{as_dumped(each)}\n" for index, each in enumerate(others)]
    text = f"{noise}\n{''.join(dump)}Current thread 0x1 [python] (most recent call first):\n{as_dumped(own)}"
    assert stacks.read_faulthandler(text) == [f"{file}:{line} {name}" for file, line, name in own]


def as_dumped(frames: list[Any]) -> str:
    return "".join(f'  File "{file}", line {line} in {name}\n' for file, line, name in frames)


def test_the_main_thread_is_that_with_the_id_of_the_process() -> None:
    threads = stacks.read_py_spy(json.dumps(PY_SPY))
    assert threads is not None
    assert stacks.main_thread(threads, 7) == ["/a/x.py:4 main"]
    assert stacks.main_thread(threads, 1) == ["t.py:982 run"]


# --- how much threads compute -----------------------------------------------------------------------------------------


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
    assert list(cpu_shares({0: own}, {0: long_ago})) == [0]
    assert slept == []
    measured = cpu_shares({0: own, 1: gone.pid, 2: own}, {0: long_ago, 2: replace(long_ago, pid=own + 1)})
    assert sorted(measured) == [0, 2]
    assert slept == [1.0]
