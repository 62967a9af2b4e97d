"""Slots of sweeps on one machine: as many runs at once as there may be, in order, whoever of them is killed."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.simulated_run import SimulatedRun
from helpers.site import until

from slurmtrain.errors import LaunchError
from slurmtrain.model.run.layout import AttemptDir, RunsRoot, run_id
from slurmtrain.runtime.agent import local_slots as module
from slurmtrain.runtime.agent.local_slots import (
    Share,
    SlotRequest,
    Slots,
    gpus_of_account,
    is_to_come,
    take_slot,
    used_by_ranks,
)
from slurmtrain.runtime.job import run_reader
from slurmtrain.system.process import identify, this_process

RUNS = [run_id(1_700_000_000_000 + number, 0) for number in range(12)]
TAKES_A_SLOT = """
import contextlib, sys
from pathlib import Path
from slurmtrain.runtime.agent.local_slots import SlotRequest, Slots, take_slot
slots = Slots(Path(sys.argv[1]), "sweep", 1)
held, waits = contextlib.ExitStack(), lambda: print("waits", flush=True)
take_slot(slots, SlotRequest(sys.argv[2]), held, give_up=lambda: False, note=waits)
print("has it", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _poll_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POLL_S", 0.005)


class Runner:
    """A run that takes a slot in a thread, and keeps it until it is to end."""

    def __init__(self, slots: Slots, request: SlotRequest, begun: queue.Queue[Runner]) -> None:
        self.run = request.run
        self.ticket = slots.line / request.run
        self.share: Share | None = None
        self.waits = threading.Event()
        self._end, self._cancelled = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._live, args=(slots, request, begun), daemon=True)
        self._thread.start()

    def _live(self, slots: Slots, request: SlotRequest, begun: queue.Queue[Runner]) -> None:
        with contextlib.ExitStack() as held:
            self.share = take_slot(slots, request, held, give_up=self._cancelled.is_set, note=self.waits.set)
            if self.share is not None:
                begun.put(self)
                self._end.wait()

    @property
    def gpus(self) -> list[str] | None:
        return None if self.share is None else self.share.gpus

    def end(self) -> None:
        self._end.set()
        self._thread.join()

    def cancel(self) -> None:
        self._cancelled.set()
        self._thread.join()


@pytest.fixture
def begun() -> queue.Queue[Runner]:
    return queue.Queue()


@pytest.fixture
def start(tmp_path: Path, begun: queue.Queue[Runner]) -> Iterator[Callable[..., Runner]]:
    started = []

    def start_run(number: int, count: int | None = 1, sweep: str = "sweep", **request: object) -> Runner:
        slots = Slots(tmp_path, sweep, count)
        runner = Runner(slots, SlotRequest(RUNS[number], **request), begun)  # type: ignore[arg-type]
        started.append(runner)
        return runner

    yield start_run
    for runner in started:
        runner._cancelled.set()
        runner._end.set()
    for runner in started:
        runner._thread.join()


def in_line(start: Callable[..., Runner], number: int, **more: object) -> Runner:
    """A run that waits in its place."""
    runner = start(number, **more)
    assert runner.waits.wait(30)
    until(lambda: module._is_waiting(runner.ticket), "its place in line")
    return runner


def test_runs_begin_in_the_order_of_the_sweep_and_as_many_as_may(
    start: Callable[..., Runner], begun: queue.Queue[Runner]
) -> None:
    first = [start(number, count=2) for number in (0, 1)]
    running = [begun.get(timeout=30) for _ in first]
    assert sorted(each.run for each in running) == RUNS[:2]
    for number in (4, 2, 3):
        in_line(start, number, count=2)
    order = []
    for _ in range(3):
        running.pop(0).end()
        following = begun.get(timeout=30)
        order.append(following.run)
        running.append(following)
    assert order == RUNS[2:5]
    assert begun.empty()


def test_a_cancelled_run_leaves_the_line_and_others_keep_their_order(
    start: Callable[..., Runner], begun: queue.Queue[Runner], tmp_path: Path
) -> None:
    start(0)
    first = begun.get(timeout=30)
    waiting = [in_line(start, number) for number in (1, 2, 3)]
    waiting[1].cancel()
    line = Slots(tmp_path, "sweep", 1).line
    assert sorted(path.name for path in line.iterdir()) == [RUNS[1], RUNS[3]]
    first.end()
    second = begun.get(timeout=30)
    assert second.run == RUNS[1]
    second.end()
    assert begun.get(timeout=30).run == RUNS[3]
    assert list(line.iterdir()) == []


def test_a_run_that_comes_later_than_those_behind_it_is_waited_for(
    start: Callable[..., Runner], begun: queue.Queue[Runner]
) -> None:
    to_come = threading.Event()
    to_come.set()
    second = in_line(start, 1, is_early=to_come.is_set)
    start(0)
    assert begun.get(timeout=30).run == RUNS[0]
    to_come.clear()
    assert second.gpus is None


def test_a_killed_run_loses_neither_its_slot_nor_its_place(tmp_path: Path) -> None:
    def process(number: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", TAKES_A_SLOT, str(tmp_path), RUNS[number]]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    with contextlib.ExitStack() as stack:
        runs = []
        for number, line in enumerate(("has it\n", "waits\n", "waits\n")):
            runs.append(stack.enter_context(process(number)))
            output = runs[-1].stdout
            assert output is not None
            assert output.readline() == line
        runs[1].kill()
        runs[1].wait()
        runs[0].kill()
        last = runs[2].stdout
        assert last is not None
        assert last.readline() == "has it\n"
        runs[2].kill()
    assert list(Slots(tmp_path, "sweep", 1).line.iterdir()) == []


def test_runs_share_no_gpu_and_one_that_needs_more_than_are_free_holds_nothing(
    start: Callable[..., Runner], begun: queue.Queue[Runner], tmp_path: Path
) -> None:
    gpus = {"gpus": ["0", "1", "2"]}
    start(0, count=3, needed=1, **gpus)
    start(1, count=1, sweep="another", needed=1, **gpus)
    running = [begun.get(timeout=30) for _ in range(2)]
    assert sorted(name for each in running for name in each.gpus or ()) == ["0", "1"]
    wide = in_line(start, 2, count=3, needed=2, **gpus)
    narrow = in_line(start, 3, count=3, needed=1, **gpus)
    assert narrow.gpus is None
    running[0].end()
    assert begun.get(timeout=30) is wide
    assert len({*(wide.gpus or ()), *(running[1].gpus or ())}) == 3
    wide.end()
    assert begun.get(timeout=30) is narrow


def test_what_the_ranks_of_a_killed_agent_use_is_not_free(
    start: Callable[..., Runner], begun: queue.Queue[Runner], tmp_path: Path
) -> None:
    gpus = {"gpus": ["0", "1"], "needed": 1}
    slots = Slots(tmp_path, "sweep", 2)
    used = {slots.slot(0), slots.gpu("0")}
    start(0, count=2, in_use=lambda: used, **gpus)
    share = begun.get(timeout=30).share
    assert share == Share(slots.slot(1), ["1"])
    later = in_line(start, 1, count=2, in_use=lambda: used, **gpus)
    used.clear()
    assert begun.get(timeout=30) is later
    assert later.share == Share(slots.slot(0), ["0"])


def test_never_more_run_at_once_than_may_and_all_of_them_do(
    start: Callable[..., Runner], begun: queue.Queue[Runner]
) -> None:
    runners = [start(number, count=3, needed=1, gpus=["0", "1", "2", "3"]) for number in range(len(RUNS))]
    running = [begun.get(timeout=30) for _ in range(3)]
    for _ in range(len(runners) - 3):
        with pytest.raises(queue.Empty):
            begun.get(timeout=0.02)
        assert len({gpu for each in running for gpu in each.gpus or ()}) == 3
        running.pop(0).end()
        running.append(begun.get(timeout=30))
    assert sorted(each.run for each in runners if each.gpus) == RUNS


# --- which slots and GPUs are in use ----------------------------------------------------------------------------------


BEFORE, WAITING = "0000000001", "0000000002"


@pytest.fixture
def root(tmp_path: Path) -> RunsRoot:
    return RunsRoot(tmp_path)


def is_waited_for(root: RunsRoot) -> bool:
    return is_to_come(root.run(WAITING), BEFORE)()


@pytest.mark.parametrize("until", ["it has had its turn", "it waits for a run elsewhere", "its processes are dead"])
def test_a_run_that_has_just_been_started_is_waited_for_until_its_turn_has_come_or_cannot(
    root: RunsRoot, until: str
) -> None:
    assert not is_waited_for(root)
    sim = SimulatedRun(root.run(BEFORE), spec={"name": "n"}, executor="local", job="local-a").created(sweep="sweep")
    process = this_process().to_dict()
    if until == "its processes are dead":
        sim.submitted(process={**process, "start": 1})
    else:
        sim.submitted(process=process)
        assert is_waited_for(root)
        sim.started()
        assert is_waited_for(root)
        if until == "it has had its turn":
            root.run(BEFORE).attempt("local-a", 0).turn.write_text("{}")
        else:
            sim.node("waiting", run="0000000009")
    assert not is_waited_for(root)
    assert not is_to_come(root.run(WAITING), None)()


def test_what_ranks_whose_agent_is_dead_have_is_in_use_until_they_end(root: RunsRoot) -> None:
    slots = Slots(root.slots("here"), "sweep", 2)
    attempt = root.run(BEFORE).attempt("local-a", 0)
    attempt.path.mkdir(parents=True)
    attempt.turn.write_text('{"gpus": ["3", "MIG-a/b"], "slot": "sweep/1"}')
    environ = {**os.environ, "SLURMTRAIN_ATTEMPT_DIR": str(attempt.path)}
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, env=environ) as rank:
        used = used_by_ranks(root.run(WAITING), slots)
        assert used == {slots.slot(1), slots.gpu("3"), slots.gpu("MIG-a/b")}
        # What its own last attempt has left is killed once it has its turn.
        assert used_by_ranks(root.run(BEFORE), slots) == set()
        # From another runs root, its GPUs alone are in use.
        elsewhere = RunsRoot(root.path / "elsewhere")
        others = Slots(elsewhere.slots("here"), "sweep", 2, gpus_of_account("here"))
        assert used_by_ranks(elsewhere.run(WAITING), others) == {others.gpu("3"), others.gpu("MIG-a/b")}
        rank.communicate()
    assert used_by_ranks(root.run(WAITING), slots) == set()


def wait(attempt: AttemptDir, give_up: Callable[[], bool] = lambda: False) -> object:
    read = lambda: module._read_turn(attempt)  # noqa: E731
    return run_reader.wait_for_node_0(attempt, read, give_up, "it was this run's turn")


def test_an_agent_gives_up_once_the_one_of_node_0_has_ended_or_never_begins(
    root: RunsRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = SimulatedRun(root.run(BEFORE), spec={"name": "n"}, executor="local", job="local-a").created()
    attempt = root.run(BEFORE).attempt("local-a", 0)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as agent:
        process = identify(agent.pid)
        assert process is not None
        sim.submitted().started(nodes=2, process=process.to_dict())
        looks: list[int] = []

        def kill_it_at_the_second_look() -> bool:
            looks.append(1)
            if len(looks) == 2:
                agent.kill()
                agent.wait()
            return False

        with pytest.raises(LaunchError, match="node 0 ended before"):
            wait(attempt, kill_it_at_the_second_look)
    assert len(looks) == 2
    # What it wrote before it ended counts.
    attempt.turn.write_text('{"gpus": ["1"]}')
    assert wait(attempt) == {"gpus": ["1"]}
    monkeypatch.setattr(run_reader, "_BEGIN_S", 0.0)
    with pytest.raises(LaunchError, match="node 0 ended before"):
        wait(root.run(BEFORE).attempt("another", 0))


def test_a_gpu_is_used_by_one_run_of_the_account_whatever_its_runs_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = gpus_of_account("here")
    own, other = (Slots(RunsRoot(tmp_path / name).slots("here"), "single", None, gpus) for name in ("a", "b"))
    request = SlotRequest(run=WAITING, gpus=["0", "1"], needed=1)
    with contextlib.ExitStack() as held, contextlib.ExitStack() as others:
        first = take_slot(own, request, held, give_up=lambda: False)
        second = take_slot(other, request, others, give_up=lambda: False)
        assert [share and share.gpus for share in (first, second)] == [["0"], ["1"]]
        waits = iter([False, True])
        assert take_slot(other, request, others, give_up=lambda: next(waits)) is None
    assert gpus_of_account("elsewhere") != gpus
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert gpus_of_account("here") is None
