"""Stop signals, as they come: in any order, many at once, and while the process is busy elsewhere."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import permutations

import pytest
from helpers.program import Program, program
from helpers.site import until

from slurmtrain.runtime.job.signals import FORCED

_BEGIN = """
import asyncio, ctypes, json, os, signal, sys, threading, time
from slurmtrain.runtime.job import signals
from slurmtrain.runtime.job.signals import StopFlag
libc = ctypes.CDLL(None, use_errno=True)
flag = StopFlag()

def say(*words):
    print(*words, flush=True)

def seen():
    say(flag.name, flag.count)

# What the forced exit goes by, in its place: it stands still.
class Clock:
    now = 1000.0
    time = staticmethod(time.time)
    def monotonic(self):
        return self.now

# A call of C code that begins again after a signal, as the handlers ask for; Python runs no handler meanwhile.
def block_in_c():
    ours, theirs = os.pipe()
    libc.read(ours, ctypes.create_string_buffer(1), 1)

def report_from_a_thread():
    def report():
        for line in sys.stdin:
            seen()
    threading.Thread(target=report, daemon=True).start()
"""


@contextmanager
def flagged(text: str) -> Iterator[Program]:
    """A program with a flag, which has begun."""
    with program(_BEGIN + text) as process:
        begun = process.line()
        assert begun == "ready", process.ended()
        yield process


IN_PYTHON = """
flag.install(signal.SIGUSR1)
report_from_a_thread()
say("ready")
while True:
    time.sleep(60)
"""
IN_C = IN_PYTHON.replace("    time.sleep(60)", "    block_in_c()")


# --- any order, any number ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [IN_PYTHON, IN_C], ids=["in Python", "in C"])
def test_signals_are_noticed_in_every_order_and_the_first_one_counts(where: str) -> None:
    orders = list(permutations((signal.SIGCONT, signal.SIGTERM, signal.SIGUSR2, signal.SIGUSR1), 4))
    for order in (orders[0], orders[9], orders[-1]):
        with flagged(where) as process:
            stops = [each for each in order if each != signal.SIGCONT]
            for sent, each in enumerate(order, 1):
                process.send(each)
                count = sum(other != signal.SIGCONT for other in order[:sent])
                expected = f"{stops[0].name} {count}" if count else "None 0"
                until(lambda expected=expected: process.reply() == expected, expected)


def test_a_call_in_c_is_not_interrupted() -> None:
    with flagged(
        """
flag.install()
def write_late():
    os.kill(os.getpid(), signal.SIGTERM)
    while flag.raised is None:
        time.sleep(0.01)
    os.write(theirs, b"x")
ours, theirs = os.pipe()
threading.Timer(0.2, write_late).start()
say("ready")
say(libc.read(ours, ctypes.create_string_buffer(1), 1), ctypes.get_errno())
"""
    ) as process:
        assert process.line() == "1 0"


# --- with others ----------------------------------------------------------------------------------------------------


def test_an_event_loop_leaves_the_watching_thread_its_signals() -> None:
    with flagged(
        """
flag.install()
async def nothing():
    await asyncio.sleep(0)
asyncio.run(nothing())
report_from_a_thread()
say("ready")
block_in_c()
"""
    ) as process:
        process.send(signal.SIGTERM)
        assert until(lambda: process.reply() == "SIGTERM 1", "the signal")


def test_somebody_elses_wakeup_fd_stays_and_the_handlers_still_work() -> None:
    with flagged(
        """
import socket
theirs, other = socket.socketpair()
other.setblocking(False)
signal.set_wakeup_fd(other.fileno())
flag.install()
say("ready")
os.kill(os.getpid(), signal.SIGUSR2)
say(flag.name, theirs.recv(10) == bytes([signal.SIGUSR2]))
forcing = StopFlag()
forcing.install(forced_exit_s=0.1)
os.kill(os.getpid(), signal.SIGUSR2)
time.sleep(60)
"""
    ) as process:
        assert process.line() == "SIGUSR2 True"
        assert process.ended()[0] == FORCED


def test_what_a_forked_child_gets_is_not_taken_for_the_parents() -> None:
    with flagged(
        """
flag.install()
report_from_a_thread()
child = os.fork()
if child == 0:
    os._exit(signal.set_wakeup_fd(-1) != -1)
say("ready")
say(os.waitpid(child, 0)[1])
child = os.fork()
if child == 0:
    signal.set_wakeup_fd(flag._watch._writer.fileno())  # As it is for a moment after fork().
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0 if flag.name == "SIGTERM" else 1)
say(os.waitpid(child, 0)[1])
os.kill(os.getpid(), signal.SIGUSR2)
seen()
time.sleep(60)
"""
    ) as process:
        assert [process.line(), process.line()] == ["0", "0"]
        assert process.line() == "SIGUSR2 1"
        assert process.reply() == "SIGUSR2 1"


def test_a_second_flag_takes_over_and_what_is_released_gives_back() -> None:
    with flagged(
        """
flag.install()
other = StopFlag()
other.install()
flag.release()
os.kill(os.getpid(), signal.SIGTERM)
say("ready")
say(flag.name, other.name, other.count, 0 <= time.time() - other.raised_at < 60)
other.release()
other.release()
say(signal.set_wakeup_fd(-1))
os.kill(os.getpid(), signal.SIGUSR2)
say(other.count)
"""
    ) as process:
        assert process.line() == "None SIGTERM 1 True"
        assert process.line() == "-1"
        assert process.line() == "2"
        assert process.ended() == (0, "")


# --- the forced exit ------------------------------------------------------------------------------------------------


def test_who_does_not_leave_is_made_to_and_says_where_it_was() -> None:
    with flagged(
        """
flag.install(forced_exit_s=0.2)
def stuck_here():
    say("ready")
    block_in_c()
stuck_here()
"""
    ) as process:
        process.send(signal.SIGTERM)
        code, errors = process.ended()
        assert code == FORCED
        assert "still running 0.2 s after SIGTERM" in errors
        assert "in stuck_here" in errors


def test_who_leaves_in_time_leaves_as_it_wants_to() -> None:
    with flagged(
        """
signals.time = clock = Clock()
flag.install(forced_exit_s=0.4)
say("ready")
os.kill(os.getpid(), signal.SIGTERM)
flag.release()
for _ in range(8):
    clock.now += 1
    time.sleep(0.1)
sys.exit(75)
"""
    ) as process:
        assert process.ended() == (75, "")


def test_who_makes_progress_has_more_time() -> None:
    with flagged(
        """
signals.time = clock = Clock()
flag.install(forced_exit_s=0.5)
say("ready")
os.kill(os.getpid(), signal.SIGTERM)
for _ in range(8):
    time.sleep(0.25)
    clock.now += 0.25
    flag.put_off_forced_exit()
say("done")
while True:
    time.sleep(0.25)
    clock.now += 0.25
"""
    ) as process:
        assert process.line() == "done"
        assert process.ended()[0] == FORCED


def test_a_signal_after_the_interpreters_end_does_not_change_the_exit_code() -> None:
    # The C library calls raise(15) when the interpreter is gone: it hands the exit code to what on_exit() was given.
    with flagged(
        """
flag.install()
flag.release()
libc.on_exit(getattr(libc, "raise"), None)
say("ready")
sys.exit(int(signal.SIGTERM))
"""
    ) as process:
        assert process.ended() == (signal.SIGTERM, "")
