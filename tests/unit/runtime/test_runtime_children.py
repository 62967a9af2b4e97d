"""Children of a rank, while Slurm sends signals to every process there is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from helpers.site import until

_BEGIN = """
import gc, multiprocessing, os, signal, subprocess, sys
import torch
from slurmtrain.runtime.children import ChildGuard
from slurmtrain.runtime.signals import StopFlag
context = multiprocessing.get_context("fork")

def say(*words):
    print(*words, flush=True)

def told():
    return sys.stdin.readline()

flag = StopFlag()
flag.install()
guard = ChildGuard()
"""
SENT = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Rank:
    """A small program in a process group of its own, which is told when to go on."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def ended(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


@contextmanager
def rank(text: str) -> Iterator[Rank]:
    process = subprocess.Popen(
        [sys.executable, "-c", _BEGIN + text],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3]), "OMP_NUM_THREADS": "1"},
    )
    try:
        yield Rank(process)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def status(pid: int, field: str) -> int:
    """A set of signals, or other number in base 16, of proc(5)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1], 16)
    raise AssertionError(field)


def running(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    return False


def signal_from_outside(pid: int) -> None:
    """Send each of the signals, and wait until it has been taken."""
    for number in SENT:
        os.kill(pid, number)
        until(lambda: not running(pid) or status(pid, "ShdPnd") == 0, "the signal to be taken")


# --- children in general --------------------------------------------------------------------------------------------


def test_children_outlive_what_comes_from_outside_and_obey_their_parent() -> None:
    with rank(
        """
def serve(pipe):
    signal.signal(signal.SIGUSR1, lambda *_: pipe.send("heard"))
    pipe.send(signal.set_wakeup_fd(-1))
    while pipe.recv():
        pipe.send("here")

pipe, theirs = context.Pipe()
child = context.Process(target=serve, args=(theirs,))
child.start()
assert pipe.recv() == -1
say(child.pid)
told()
pipe.send(True)
say(pipe.recv())
os.kill(child.pid, signal.SIGUSR1)
pipe.send(True)
say(*sorted((pipe.recv(), pipe.recv())))
child.terminate()
child.join()
say(child.exitcode)
say(flag.name)
"""
    ) as one:
        child = int(one.line())
        signal_from_outside(child)
        assert running(child)
        one.go_on()
        assert one.line() == "here"
        assert one.line() == "heard here"
        assert one.line() == str(-signal.SIGTERM)
        assert one.line() == "None"
        assert one.ended() == (0, "")


def test_a_child_is_ended_that_has_not_begun_yet() -> None:
    with rank(
        """
def wait_for_ever():
    signal.sigwait([signal.SIGALRM])

children = [context.Process(target=wait_for_ever) for _ in range(20)]
for child in children:
    child.start()
    child.terminate()
for child in children:
    child.join()
say({child.exitcode for child in children}, signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""
    ) as one:
        assert one.line() == f"{{{-signal.SIGTERM}}} set()"
        assert one.ended() == (0, "")


def test_pools_end_and_subprocesses_are_as_ever() -> None:
    with rank(
        """
look = ["grep", "-E", "^Sig(Blk|Ign):", "/proc/self/status"]
plain = subprocess.run(look, capture_output=True, text=True).stdout
prepared = subprocess.run(look, capture_output=True, text=True, preexec_fn=lambda: None).stdout
say(plain == prepared, *plain.split())
say(len(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
pool = context.Pool(2)
say(pool.map(abs, [-1, -2]))
pool.terminate()
pool.join()
lone = os.fork()
if lone == 0:
    os._exit(len(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
say(os.waitpid(lone, 0)[1])
del guard
gc.collect()
child = context.Process(target=lambda: sys.exit(len(signal.pthread_sigmask(signal.SIG_BLOCK, ()))))
child.start()
child.join()
say(child.exitcode)
"""
    ) as one:
        same, _, blocked, _, ignored = one.line().split()
        assert same == "True"
        of_concern = sum(1 << (each - 1) for each in SENT)
        assert (int(blocked, 16) & of_concern, int(ignored, 16) & of_concern) == (0, 0)
        assert one.line() == "0"
        assert one.line() == "[1, 2]"
        assert one.line() == "0"
        assert one.line() == "0"
        assert one.ended() == (0, "")


# --- torch's data loader --------------------------------------------------------------------------------------------

_LOADER = """
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker
worker.MP_STATUS_CHECK_INTERVAL = 0.2

class Numbers:
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return index

def load(persistent):
    return DataLoader(Numbers(), num_workers=2, persistent_workers=persistent, multiprocessing_context="fork")
"""


@pytest.mark.parametrize("persistent", [True, False])
def test_a_data_loader_goes_on_when_all_processes_are_signalled(persistent: bool) -> None:
    with rank(
        _LOADER
        + f"""
loader = load({persistent})
batches = iter(loader)
first = next(batches).item()
workers = list(batches._workers)
say(*(each.pid for each in workers))
told()
say(first + sum(batch.item() for batch in batches), flag.count)
say(sum(batch.item() for batch in loader))
del batches, loader
gc.collect()
for each in workers:
    each.join()
say(*(each.exitcode for each in workers))
"""
    ) as one:
        workers = [int(pid) for pid in one.line().split()]
        for number in (signal.SIGCONT, signal.SIGTERM, signal.SIGUSR2):
            os.killpg(one.process.pid, number)
        for pid in workers:
            signal_from_outside(pid)
        assert all(running(pid) for pid in workers)
        one.go_on()
        assert one.line() == "780 2"
        assert one.line() == "780"
        assert one.line() == "0 0"
        assert one.ended() == (0, "")


def test_a_data_loaders_worker_ends_without_complaint_when_its_parent_says_so() -> None:
    with rank(
        _LOADER
        + """
batches = iter(load(True))
next(batches)
for each in batches._workers:
    each.terminate()
    each.join()
say(*(each.exitcode for each in batches._workers))
batches = iter(load(True))
next(batches)
"""
    ) as one:
        assert one.line() == "0 0"
        # The second loader is still there at the end, where multiprocessing ends its workers.
        assert one.ended() == (0, "")


def test_a_data_loaders_workers_end_with_their_parent() -> None:
    with rank(
        _LOADER
        + """
batches = iter(load(True))
next(batches)
say(*(each.pid for each in batches._workers))
told()
"""
    ) as one:
        workers = [int(pid) for pid in one.line().split()]
        one.process.kill()
        until(lambda: not any(running(pid) for pid in workers), "the end of the workers")
        assert len(workers) == 2
