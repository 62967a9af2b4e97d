"""The processes of ranks: who hears a stop signal, and that none is left."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.program import Program, program
from helpers.site import until

from slurmtrain.runtime.agent.nsys import is_nsys
from slurmtrain.runtime.agent.workers import RankProcesses, listeners
from slurmtrain.system.process import Entry

# An agent that starts one rank, the shell command of its first argument, and then does what it is asked to.
_AGENT = """
import os, signal, subprocess, sys
from slurmtrain.runtime.agent.workers import RankProcesses, describe_process as name, is_publishing
from slurmtrain.system.process import become_subreaper

become_subreaper()
ranks = RankProcesses()
helper = subprocess.Popen(["sleep", "1000"])
rank = subprocess.Popen({command!r}, start_new_session=True, stdin=subprocess.DEVNULL)
ranks.started([rank.pid])
for line in sys.stdin:
    print(eval(line), flush=True)
helper.kill()
"""


@contextmanager
def agent(*command: str) -> Iterator[Program]:
    with program(_AGENT.format(command=command)) as process:
        try:
            yield process
        finally:
            ask(process, "ranks.kill()")


def ask(process: Program, expression: str) -> str:
    """What an expression is in the agent."""
    assert process.process.stdin is not None
    process.process.stdin.write(expression + "\n")
    process.process.stdin.flush()
    return process.line()


def wait_for(process: Program, expression: str) -> None:
    until(lambda: ask(process, expression) == "True", expression)


# --- who hears it ---------------------------------------------------------------------------------------------------


def tree(*parents: tuple[int, int]) -> list[Entry]:
    return [Entry(pid, parent, session=pid, start=0, ended=False) for pid, parent in parents]


def heard(entries: list[Entry], shells: tuple[int, ...] = (), profilers: tuple[int, ...] = ()) -> list[int]:
    return [entry.pid for entry in listeners(entries, 1, shells.__contains__, profilers.__contains__)]


def test_ranks_hear_a_stop_and_the_children_of_their_shells_but_no_others() -> None:
    assert heard(tree((10, 1), (11, 1), (20, 10), (30, 20))) == [10, 11]
    assert heard(tree((10, 1), (20, 10), (21, 10), (30, 20), (31, 21)), shells=(10, 21)) == [10, 20, 21, 31]
    assert heard(tree((10, 1), (20, 10), (30, 20)), shells=(20,)) == [10]
    # A profiler would end its recording, and then the command: only what it has started hears the stop.
    assert heard(tree((10, 1), (20, 10), (21, 10), (30, 20)), profilers=(10, 20)) == [21, 30]
    assert [name for name in ("nsys", "nsys-launcher", "nsysx", "python") if is_nsys(name)] == ["nsys", "nsys-launcher"]


# --- real processes -------------------------------------------------------------------------------------------------


def test_the_processes_of_a_rank_are_found_in_whatever_session_and_the_agents_helpers_are_not() -> None:
    with agent("bash", "-c", "(setsid env -i sleep 1000 &); sleep 1000; true") as process:
        wait_for(process, "sorted(name(each).split()[0] for each in ranks.running()) == ['bash', 'sleep', 'sleep']")
        killed = ask(process, "sorted(each.split()[0] for each in ranks.kill()[0])")
        assert killed == "['bash', 'sleep', 'sleep']"
        assert ask(process, "(ranks.running(), helper.poll(), rank.wait())") == f"([], None, {-signal.SIGKILL})"


def test_the_exit_code_of_a_rank_is_left_for_who_waits_for_it() -> None:
    with agent("bash", "-c", "(sleep 0 &); exit 7") as process:
        wait_for(process, "ranks.wait(timeout_s=0)")
        ask(process, "ranks.reap()")
        assert ask(process, "rank.wait()") == "7"


def test_orphans_that_have_ended_are_reaped() -> None:
    with agent("bash", "-c", "(setsid sleep 0 &); sleep 1000; true") as process:
        zombies = "[each for each in ranks._entries() if each.ended]"
        wait_for(process, "len(ranks.running()) == 2")
        until(lambda: ask(process, f"(ranks.reap(), {zombies})[1]") == "[]", "no zombie")
        assert ask(process, "rank.poll()") == "None"


def test_the_reader_of_a_pipe_is_not_asked_before_its_writer_has_ended(tmp_path: Path) -> None:
    writer = "trap 'sleep 0.2; echo saved; exit 3' TERM; while :; do sleep 0.01; done"
    kept = tmp_path / "kept"
    with agent("bash", "-c", f'true && bash -c "{writer}" | cat > {kept}') as process:
        wait_for(process, "any(name(each).startswith('cat') for each in ranks.running())")
        until(lambda: ask(process, "ranks.ask(signal.SIGTERM)") == "False", "the end of all that were asked")
        assert kept.read_text() == "saved\n"


def test_processes_that_wait_for_each_other_are_all_asked() -> None:
    both = "coproc cat; exec cat <&${COPROC[0]} >&${COPROC[1]}"
    with agent("bash", "-c", both) as process:
        wait_for(process, "[name(each).split()[0] for each in ranks.running()] == ['cat', 'cat']")
        until(lambda: ask(process, "ranks.ask(signal.SIGTERM)") == "False", "the end of both")
        assert ask(process, "rank.wait()") == str(-signal.SIGTERM)


def test_what_a_rank_leaves_behind_is_asked_once_in_its_turn(tmp_path: Path) -> None:
    count = tmp_path / "count"
    patient = f"trap 'echo asked >> {count}' TERM; while :; do sleep 0.01; done"
    with agent("python3", "-c", f'import subprocess; subprocess.run([\'bash\', \'-c\', """{patient}"""])') as process:
        wait_for(process, "any(name(each).startswith('bash') for each in ranks.running())")
        ask(process, "ranks.ask(signal.SIGTERM)")
        assert ask(process, "rank.wait()") == str(-signal.SIGTERM)
        until(lambda: ask(process, "ranks.ask(signal.SIGTERM)") and count.exists(), "the orphan to hear it")
        for _ in range(5):
            assert ask(process, "ranks.ask(signal.SIGTERM)") == "True"
        assert count.read_text() == "asked\n"


def test_a_process_that_starts_others_while_it_is_killed_leaves_nothing() -> None:
    with agent("bash", "-c", "while :; do (setsid sleep 1000 &); done") as process:
        wait_for(process, "len(ranks.running()) > 2")
        assert ask(process, "ranks.kill()[1]") == "[]"
        assert ask(process, "ranks.running()") == "[]"


def test_a_process_that_cannot_be_killed_is_reported_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = tree((10, 1))
    monkeypatch.setattr(RankProcesses, "running", lambda _self: stuck)
    monkeypatch.setattr("slurmtrain.runtime.agent.workers._KILL_S", 0.05)
    killed, remaining = RankProcesses().kill()
    assert (len(killed), len(remaining)) == (1, 1)
    assert "(pid 10)" in remaining[0]


def test_a_checkpoint_that_is_being_published_is_waited_for(tmp_path: Path) -> None:
    release = tmp_path / "release"
    writer = f"echo ckpt-publish > /proc/$BASHPID/comm; until [ -e {release} ]; do sleep 0.01; done"
    with agent("bash", "-c", f"({writer}) & sleep 1000; true") as process:
        wait_for(process, "any(map(is_publishing, ranks.running()))")
        ask(process, "ranks.kill(spare=lambda each: is_publishing(each) or name(each).startswith('sleep 0'))")
        assert ask(process, "(ranks.wait(timeout_s=0, only=is_publishing), rank.wait())") == "(False, -9)"
        release.touch()
        assert ask(process, "ranks.wait(timeout_s=60, only=is_publishing)") == "True"
