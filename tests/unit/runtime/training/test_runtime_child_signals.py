"""Children of a rank, while Slurm sends signals to every process there is."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import indent

import pytest
from helpers.program import Program, program
from helpers.rare import drawn, rare
from helpers.site import until

_IMPORTS = """
import gc, multiprocessing, os, signal, subprocess, sys
from slurmtrain.runtime.training.child_signals import ChildGuard
from slurmtrain.runtime.job.signals import StopFlag

def say(*words):
    print(*words, flush=True)

def told():
    return sys.stdin.readline()
"""
_GUARDED = """
flag = StopFlag()
flag.install()
guard = ChildGuard()
"""
# As in a script without a session, whose own handling of signals does not matter here.
_LOADERS_GUARDED = """
flag = StopFlag()
flag.install()
guard = ChildGuard(loaders_only=True)
"""
METHODS = ("fork", "forkserver", "spawn")
OTHERS = (("fork", False), ("forkserver", True))
SENT = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def rank(
    text: str, method: str = "fork", top: str = "", file: Path | None = None, guarded: str = _GUARDED
) -> Iterator[Program]:
    """A rank. ``top``: what its children import, where they do not share its memory; it needs a ``file`` then.

    ``guarded``: how it guards its children.
    """
    begin = f"{_IMPORTS}context = multiprocessing.get_context({method!r})\n{top}"
    if file is None:
        whole = begin + guarded + text
    else:
        whole = begin + "\nif __name__ == '__main__':\n" + indent(guarded + text, "    ")
    with program(whole, file) as process:
        yield process


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


_SERVE = """
def serve(pipe):
    signal.signal(signal.SIGUSR1, lambda *_: pipe.send("heard"))
    pipe.send(signal.set_wakeup_fd(-1))
    while pipe.recv():
        pipe.send("here")
"""


@pytest.mark.parametrize("method", METHODS)
def test_children_outlive_what_comes_from_outside_and_obey_their_parent(method: str, tmp_path: Path) -> None:
    with rank(
        """
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
""",
        method,
        _SERVE,
        tmp_path / "rank.py",
    ) as process:
        child = int(process.line())
        signal_from_outside(child)
        assert running(child)
        process.proceed()
        assert process.line() == "here"
        assert process.line() == "heard here"
        assert process.line() == str(-signal.SIGTERM)
        assert process.line() == "None"
        assert process.ended() == (0, "")


_REPORT = """
def report(pipe):
    pipe.send((len(signal.pthread_sigmask(signal.SIG_BLOCK, ())), os.getpid()))
    pipe.recv()
"""


@pytest.mark.parametrize("method", drawn(METHODS, 2))
def test_other_children_than_data_loaders_are_as_ever_if_only_those_are_guarded(method: str, tmp_path: Path) -> None:
    with rank(
        """
pipe, theirs = context.Pipe()
child = context.Process(target=report, args=(theirs,))
child.start()
say(*pipe.recv())
told()
child.join()
say(child.exitcode)
# A session guards all children from its beginning on.
session = ChildGuard()
pipe, theirs = context.Pipe()
child = context.Process(target=report, args=(theirs,))
child.start()
say(*pipe.recv())
child.terminate()
child.join()
say(child.exitcode)
""",
        method,
        _REPORT,
        tmp_path / "rank.py",
        _LOADERS_GUARDED.replace("flag.install()", ""),
    ) as process:
        blocked, child = map(int, process.line().split())
        assert blocked == 0
        os.kill(child, signal.SIGTERM)
        process.proceed()
        assert process.line() == str(-signal.SIGTERM)
        blocked, child = map(int, process.line().split())
        assert blocked == len(SENT)
        assert process.line() == str(-signal.SIGTERM)
        assert process.ended() == (0, "")


_WAIT = """
def wait_for_ever():
    signal.sigwait([signal.SIGALRM])
"""


@pytest.mark.parametrize(("method", "count"), [("fork", 20), ("forkserver", 5), ("spawn", 2)])
def test_a_child_is_ended_that_has_not_begun_yet(method: str, count: int, tmp_path: Path) -> None:
    with rank(
        f"""
children = [context.Process(target=wait_for_ever) for _ in range({count})]
for child in children:
    child.start()
    child.terminate()
for child in children:
    child.join()
say(*{{child.exitcode for child in children}}, len(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
""",
        method,
        _WAIT,
        tmp_path / "rank.py",
    ) as process:
        assert process.line() == f"{-signal.SIGTERM} 0"
        assert process.ended() == (0, "")


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
# Python 3.12 and later warn of a fork in a process with threads.
__import__("warnings").simplefilter("ignore", DeprecationWarning)
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
    ) as process:
        same, _, blocked, _, ignored = process.line().split()
        assert same == "True"
        of_concern = sum(1 << (each - 1) for each in SENT)
        assert (int(blocked, 16) & of_concern, int(ignored, 16) & of_concern) == (0, 0)
        assert process.line() == "0"
        assert process.line() == "[1, 2]"
        assert process.line() == "0"
        assert process.line() == "0"
        assert process.ended() == (0, "")


# --- torch's data loader --------------------------------------------------------------------------------------------

_LOADER = """
import warnings
warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than this machine has cores
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker
worker.MP_STATUS_CHECK_INTERVAL = 0.2

class Numbers:
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return index

def load(persistent):
    return DataLoader(Numbers(), num_workers=2, persistent_workers=persistent, multiprocessing_context=context)
"""


@pytest.mark.parametrize(
    "guarded", [pytest.param(_GUARDED, id="all", marks=rare), pytest.param(_LOADERS_GUARDED, id="loaders")]
)
@pytest.mark.parametrize(
    ("method", "persistent"), [("fork", True), *(pytest.param(*case, marks=rare) for case in OTHERS)]
)
def test_a_data_loader_goes_on_when_all_processes_are_signalled(
    method: str, persistent: bool, guarded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # At the end Python's tracker of semaphores may look between the deletion of one and the message about it.
    monkeypatch.setenv("PYTHONWARNINGS", "ignore::UserWarning:multiprocessing.resource_tracker")
    with rank(
        f"""
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
""",
        method,
        _LOADER,
        tmp_path / "rank.py",
        guarded,
    ) as process:
        workers = [int(pid) for pid in process.line().split()]
        for number in (signal.SIGCONT, signal.SIGTERM, signal.SIGUSR2):
            os.killpg(process.process.pid, number)
        for pid in workers:
            signal_from_outside(pid)
        assert all(running(pid) for pid in workers)
        process.proceed()
        assert process.line() == "780 2"
        assert process.line() == "780"
        assert process.line() == "0 0"
        assert process.ended() == (0, "")


@pytest.mark.parametrize(
    ("method", "module", "counts"),
    [
        pytest.param("fork", "torch.utils.data", (0, 0, 0, 10), marks=rare),
        ("fork", "torchdata.stateful_dataloader", (0, 0, 0, 10)),
        pytest.param("forkserver", "torch.utils.data", (0,), marks=rare),
    ],
)
def test_a_data_loaders_worker_ends_without_complaint_when_its_parent_says_so_however_early(
    method: str, module: str, counts: tuple[int, ...], tmp_path: Path
) -> None:
    with rank(
        f"""
import warnings
warnings.simplefilter("ignore")
import {module} as loaders
Loader = getattr(loaders, "StatefulDataLoader", DataLoader)
loader = Loader(Numbers(), num_workers=2, multiprocessing_context=context)
for count in {counts}:
    batches = iter(loader)
    for _ in range(count):
        next(batches)
    workers = list(batches._workers)
    for each in workers:
        each.terminate()
        each.join()
    say(*(each.exitcode for each in workers))
    del batches, workers, each
    gc.collect()
# These are still there at the end, where multiprocessing ends them.
batches = iter(loader)
next(batches), next(batches)
""",
        method,
        _LOADER,
        tmp_path / "rank.py",
    ) as process:
        assert [process.line() for _ in counts] == ["0 0"] * len(counts)
        assert process.ended() == (0, "")


def test_a_data_loaders_workers_end_with_their_parent() -> None:
    with rank(
        """
batches = iter(load(True))
# One from each: a worker that has not begun takes whoever is its parent then for the rank.
next(batches), next(batches)
say(*(each.pid for each in batches._workers))
told()
""",
        top=_LOADER,
    ) as process:
        workers = [int(pid) for pid in process.line().split()]
        process.process.kill()
        until(lambda: not any(running(pid) for pid in workers), "the end of the workers")
        assert len(workers) == 2
