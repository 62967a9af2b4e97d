"""What a drill sees of a run, from its files and processes; without a run that trains."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from helpers.checkpoints import end_run, make_checkpoints, make_run, small_objects

from slurmtrain.model.run.events.agent_events import LeftoversKilled, RanksExited, WorkersStarted
from slurmtrain.model.run.layout import AttemptDir, RunDir
from slurmtrain.model.run.run import Run
from slurmtrain.ops.shared.next_attempts import current_plan
from slurmtrain.ops.shared.observe import observe_run
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.plugins.drill.facts import InjectedFault
from slurmtrain.plugins.drill.faults import FaultTarget, OwnCheckpoints, SaveWatch
from slurmtrain.plugins.drill.observations import RunObserver, _differing_paths, compare_checkpoints
from slurmtrain.runtime.checkpoint.external import Search
from slurmtrain.system.journal import Journal
from slurmtrain.system.process import identify

KEY = "1.0"


@pytest.fixture
def run(workspace: Workspace) -> RunDir:
    directory = make_run(workspace.root.path, glob="{checkpoint_dir}/ckpt-*.pt")
    directory.checkpoints.mkdir(exist_ok=True)
    return directory


@pytest.fixture
def observer(workspace: Workspace, run: RunDir) -> RunObserver:
    return RunObserver(workspace, run.id, current_plan(run, observe_run(workspace, run.id, ask_slurm=False)))


def print_lines(run: RunDir, *lines: str) -> None:
    logs = AttemptDir(run.attempts / KEY).logs
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / "rank-0.log").open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def save(run: RunDir, step: int) -> Path:
    path = run.checkpoints / f"ckpt-{step}.pt"
    torch.save({"step": step}, path)
    return path


def strike(observer: RunObserver, name: str = "preempt") -> None:
    observer.injected = InjectedFault(fault=name, at=time.time(), attempt=KEY)


def start_ranks(run: RunDir, resume_from: Path | None = None) -> None:
    with Journal(AttemptDir(run.attempts / KEY).node_journal(0)) as journal:
        journal.write(WorkersStarted(resume_from=None if resume_from is None else str(resume_from)))


def test_checkpoints_and_lines_of_output_show_how_far_a_run_is(
    workspace: Workspace, run: RunDir, observer: RunObserver
) -> None:
    state = observe_run(workspace, run.id, ask_slurm=False)
    assert (observer.sighting(state).saves, observer.sighting(state).lines) == ([], 0)
    print_lines(run, "step 1", "step 2")
    save(run, 5)
    observer.look()
    sighting = observer.sighting(state)
    assert ([each.step for each in sighting.saves], sighting.lines) == ([5], 2)
    assert sighting.saved == "its checkpoint ckpt-5.pt"


def test_a_baseline_has_what_the_undisturbed_run_has_shown(
    workspace: Workspace, run: RunDir, observer: RunObserver
) -> None:
    print_lines(run, "done")
    for step in (5, 10):
        save(run, step)
    end_run(run, "completed")
    baseline = observer.baseline(observe_run(workspace, run.id, ask_slurm=False))
    assert [each.step for each in baseline.saves] == [5, 10]
    assert (baseline.lines, baseline.saves_early, baseline.save_interval, baseline.counts_steps) == (1, True, 5, False)
    assert (baseline.saves[-1].format, baseline.step_source) == ("torch", "which is inside it")
    assert baseline.seconds > 0


def test_after_a_fault_exit_codes_and_what_is_resumed_from_are_read_from_the_journals(
    workspace: Workspace, run: RunDir, observer: RunObserver
) -> None:
    start_ranks(run)
    strike(observer)
    with Journal(AttemptDir(run.attempts / KEY).node_journal(1)) as journal:
        journal.write(RanksExited(codes={"0": 0, "1": 75}))
        journal.write(LeftoversKilled(killed=["sleep 7"], remaining=["cp 8"]))
    handed = save(run, 5)
    start_ranks(run, handed)
    observe_run(workspace, run.id, ask_slurm=False)
    aftermath = observer.aftermath()
    assert aftermath.exit_codes == {"0": 0, "1": 75}
    assert (aftermath.leftovers, aftermath.survivors) == (["sleep 7"], ["cp 8"])
    assert aftermath.resume_from == str(handed)
    assert aftermath.resumed_at is not None
    assert [each.path for each in aftermath.saves] == [handed]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def test_a_process_that_is_alive_when_the_next_ranks_start_has_outlived_the_stop(
    workspace: Workspace, run: RunDir, observer: RunObserver, sleeper: subprocess.Popen[bytes]
) -> None:
    rank = identify(sleeper.pid)
    newest = observe_run(workspace, run.id, ask_slurm=False).newest
    assert newest is not None
    observer.note_processes(FaultTarget(newest, 1, {0: rank.host}, {}, {0: {0: rank}}))
    strike(observer)
    observer.look()
    start_ranks(run)
    observe_run(workspace, run.id, ask_slurm=False)
    observer.look()
    # Whatever happens later does not matter.
    sleeper.kill()
    sleeper.wait()
    assert observer.aftermath().survivors == [f"sleep 600 (pid {sleeper.pid})"]


def test_the_death_of_data_loader_workers_is_read_from_the_log(
    workspace: Workspace, run: RunDir, observer: RunObserver
) -> None:
    strike(observer)
    print_lines(run, "RuntimeError: DataLoader worker (pid(s) 71, 72) exited unexpectedly", "more")
    observe_run(workspace, run.id, ask_slurm=False)
    assert observer.aftermath().dead_workers == ["DataLoader worker (pid(s) 71, 72) exited unexpectedly"]


# --- what a script saves, and that a save is under way ----------------------------------------------------------------


def archive(path: Path) -> Path:
    """A file such as torch.save writes."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", b"x" * 100)
    return path


def tear(path: Path) -> Path:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    return path


def test_checkpoints_that_were_deleted_since_are_remembered(tmp_path: Path) -> None:
    own = OwnCheckpoints(Search(pattern=f"{tmp_path}/ckpt-*.pt"))
    for step in (5, 10):
        path = archive(tmp_path / f"ckpt-{step}.pt")
        os.utime(path, (step, step))
        own.look()
        path.unlink()
    own.look()
    assert [(save.path.name, save.step) for save in own.saves] == [("ckpt-5.pt", 5), ("ckpt-10.pt", 10)]


def test_a_file_that_was_written_again_counts_again(tmp_path: Path) -> None:
    own = OwnCheckpoints(Search(pattern=f"{tmp_path}/last.pt"))
    for second in (1, 2):
        os.utime(archive(tmp_path / "last.pt"), (second, second))
        own.look()
        own.look()
    assert [save.saved_at for save in own.saves] == [1.0, 2.0]


@pytest.fixture
def watch(tmp_path: Path) -> SaveWatch:
    archive(tmp_path / "ckpt-5.pt")
    return SaveWatch(Search(pattern=f"{tmp_path}/ckpt-*.pt"), tmp_path)


def test_what_was_there_before_is_no_save_under_way(tmp_path: Path) -> None:
    tear(archive(tmp_path / "ckpt-5.pt"))
    assert SaveWatch(Search(pattern=f"{tmp_path}/ckpt-*.pt"), tmp_path).half_written() == []
    [problem] = OwnCheckpoints(Search(pattern=f"{tmp_path}/ckpt-*.pt")).incomplete()
    assert problem.startswith("ckpt-5.pt is not complete: ")


def test_a_file_without_its_end_is_half_written_until_it_has_one(tmp_path: Path, watch: SaveWatch) -> None:
    path = tear(archive(tmp_path / "ckpt-10.pt"))
    assert watch.half_written() == [str(path)]
    assert watch.still_half_written([str(path)]) == [str(path)]
    archive(path)
    assert watch.half_written() == []
    assert watch.still_half_written([str(path)]) == []


def test_a_name_that_is_temporary_is_half_written_until_it_is_renamed(tmp_path: Path, watch: SaveWatch) -> None:
    path = archive(tmp_path / "ckpt-10.pt.tmp")
    assert watch.half_written() == [str(path)]
    assert watch.still_half_written([str(path)]) == [str(path)]
    path.rename(tmp_path / "ckpt-10.pt")
    assert watch.half_written() == []
    assert watch.still_half_written([str(path)]) == []


def test_a_file_that_no_checkpoint_has_is_no_save(tmp_path: Path) -> None:
    watch = SaveWatch(Search(pattern=f"{tmp_path}/ckpt-*.pt"), tmp_path)
    with (tmp_path / "metrics.csv").open("w") as file:
        file.write("1")
        file.flush()
        assert watch.half_written([os.getpid()]) == []


def test_a_checkpoint_of_a_session_is_half_written_until_it_is_published(tmp_path: Path) -> None:
    watch = SaveWatch(None, tmp_path)
    staged = tmp_path / ".7.0-step-20"
    staged.mkdir()
    (staged / "__0_0.distcp").write_bytes(b"x")
    assert watch.half_written() == [str(staged)]
    staged.rename(tmp_path / "step-20")
    assert watch.half_written() == []


def test_a_file_of_any_format_is_half_written_while_a_rank_writes_to_it(tmp_path: Path) -> None:
    watch = SaveWatch(Search(pattern=f"{tmp_path}/*.txt"), tmp_path)
    writer = "import sys; file = open(sys.argv[1], 'w'); print(file.write('5'), flush=True); file.flush(); input()"
    path = tmp_path / "ckpt-5.txt"
    with subprocess.Popen(
        [sys.executable, "-c", writer, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:  # fmt: skip
        process.stdout.readline()
        assert watch.half_written([process.pid]) == [str(path)]
        process.kill()
    # Nothing in the file says that there was more to come.
    assert watch.still_half_written([str(path)]) == [str(path)]


# --- how the last checkpoints of two runs differ ----------------------------------------------------------------------


def placed(workspace: Workspace, run: RunDir, number: int) -> RunDir:
    target = workspace.root.run(f"0123456{number}89")
    target.path.parent.mkdir(exist_ok=True)
    run.path.rename(target.path)
    return target


def two_runs(workspace: Workspace, tmp_path: Path, change: float = 0.0, step: int = 10) -> tuple[Run, Run]:
    """Two runs that have saved the same model; the second with one weight that differs by ``change``."""
    torch.manual_seed(5)
    objects = small_objects()
    runs = []
    for index in range(2):
        target = placed(workspace, make_run(tmp_path / f"made-{index}"), index)
        if index:
            with torch.no_grad():
                objects["model"][0].weight[1, 2] += change
        make_checkpoints(target, [step if index else 10], objects=objects, at_step=lambda *_: None)
        end_run(target, "completed")
        runs.append(observe_run(workspace, target.id, ask_slurm=False))
    return runs[0], runs[1]


def test_equal_checkpoints_are_identical_though_their_random_states_differ(
    workspace: Workspace, tmp_path: Path
) -> None:
    import random

    first, second = two_runs(workspace, tmp_path)
    random.seed()
    comparison = compare_checkpoints(workspace, first, second)
    assert (comparison.identical, comparison.difference) == (True, None)


def test_the_largest_difference_is_given_with_its_place(workspace: Workspace, tmp_path: Path) -> None:
    first, second = two_runs(workspace, tmp_path, change=1e-3)
    comparison = compare_checkpoints(workspace, first, second)
    assert (comparison.identical, comparison.method, comparison.where) == (False, "values", "model.0.weight")
    assert comparison.difference is not None
    assert 0 < comparison.difference < 0.1
    assert comparison.max_abs == pytest.approx(1e-3, rel=1e-3)
    assert [each.name for each in comparison.differing] == ["model.0.weight"]


def two_plain_runs(workspace: Workspace, tmp_path: Path, save: Callable[[Path, int], None]) -> tuple[Run, Run]:
    """Two runs whose script saves by itself: ``save`` gets the directory and the number of the run, 0 or 1."""
    runs = []
    for index in range(2):
        target = placed(workspace, make_run(tmp_path / f"made-{index}", glob="{checkpoint_dir}/ckpt-*"), index)
        target.checkpoints.mkdir(exist_ok=True)
        save(target.checkpoints, index)
        runs.append(observe_run(workspace, target.id, ask_slurm=False))
    return runs[0], runs[1]


@pytest.mark.parametrize(("text", "identical"), [("same", True), ("other", False)])
def test_checkpoints_of_an_unknown_format_are_compared_by_file(
    workspace: Workspace, tmp_path: Path, text: str, identical: bool
) -> None:
    def save(directory: Path, index: int) -> None:
        (directory / "ckpt-5").mkdir()
        (directory / "ckpt-5" / "weights").write_text(text if index else "same")

    comparison = compare_checkpoints(workspace, *two_plain_runs(workspace, tmp_path, save))
    assert (comparison.identical, comparison.method) == (identical, "files")


@pytest.mark.parametrize(("change", "identical"), [(0.0, True), (0.5, False)])
def test_files_of_torch_are_compared_by_tensor_without_the_paths_in_them(
    workspace: Workspace, tmp_path: Path, change: float, identical: bool
) -> None:
    def save(directory: Path, index: int) -> None:
        weights = torch.ones(4)
        weights[2] += index * change
        torch.save({"step": 5, "weights": weights, "path": str(directory)}, directory / "ckpt-5.pt")

    comparison = compare_checkpoints(workspace, *two_plain_runs(workspace, tmp_path, save))
    assert (comparison.identical, comparison.method) == (identical, "tensors")
    assert (comparison.where, comparison.max_abs) == (("", None) if identical else ("weights", 0.5))


def test_a_checkpoint_with_whole_objects_cannot_be_compared(workspace: Workspace, tmp_path: Path) -> None:
    def save(directory: Path, _: int) -> None:
        torch.save({"step": 5, "model": torch.nn.Linear(2, 2)}, directory / "ckpt-5.pt")

    comparison = compare_checkpoints(workspace, *two_plain_runs(workspace, tmp_path, save))
    assert comparison.identical is None
    assert comparison.why.startswith("no tensor in them can be read safely")


def test_a_difference_in_the_objects_of_a_rank_is_given_with_its_path() -> None:
    state = {"cursor": [1, float("nan")], "mean": torch.zeros(2)}
    assert list(_differing_paths(state, {"cursor": [1, float("nan")], "mean": torch.zeros(2)}, "x")) == []
    assert list(_differing_paths(state, {"cursor": [2, float("nan")], "mean": torch.ones(2)}, "x")) == [
        "x.cursor.0",
        "x.mean",
    ]
