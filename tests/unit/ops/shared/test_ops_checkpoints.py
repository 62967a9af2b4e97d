"""Verifying and pruning checkpoints, and asking a run for one."""

from __future__ import annotations

import contextlib
import errno
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import ATTEMPT, end_run, gone, make_checkpoints, make_run, write_rank_event

from slurmtrain.errors import NoCheckpoint, NotAvailable, PlaceError, RunBusy
from slurmtrain.model.run.events.kinds import KINDS
from slurmtrain.model.run.layout import MANIFEST, RunDir, RunsRoot
from slurmtrain.ops import checkpoint as checkpoint_verb
from slurmtrain.ops.checkpoint import SaveRequest, request_checkpoint, wait_for_checkpoint
from slurmtrain.ops.prune import Pruned, prune
from slurmtrain.ops.shared.checkpoints import choose_checkpoints
from slurmtrain.ops.shared.observe import observe_run
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.verify import Verified, verify, verify_checkpoint
from slurmtrain.runtime.checkpoint import files
from slurmtrain.system.files import locked, read_json, write_json
from slurmtrain.system.journal import Journal

STEPS = (10, 20, 30, 40)
FILES = ("__0_0.distcp", ".metadata", MANIFEST)
Act = Callable[[], object]


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs roots, each with a run that has saved four times and whose policy keeps two; one trains, one is over."""
    place = tmp_path_factory.mktemp("templates")
    training = make_run(place / "training", keep=2)
    make_checkpoints(training, STEPS)
    over = make_run(place / "over", keep=2, process=gone())
    for name in ("checkpoints", f"attempts/{ATTEMPT}/rank-0.jsonl"):
        copy = shutil.copytree if (training.path / name).is_dir() else shutil.copy
        shutil.rmtree(over.path / name, ignore_errors=True)
        copy(training.path / name, over.path / name)
    end_run(over)
    return place


def of_template(templates: Path, name: str, workspace: Workspace) -> RunDir:
    shutil.copytree(templates / name, workspace.config.runs)
    [run_id] = workspace.run_ids()
    return RunsRoot(workspace.config.runs).run(run_id)


@pytest.fixture
def run(templates: Path, workspace: Workspace) -> RunDir:
    """A run that trains, on another machine."""
    return of_template(templates, "training", workspace)


@pytest.fixture
def over(templates: Path, workspace: Workspace) -> RunDir:
    """A run of this machine that has ended."""
    return of_template(templates, "over", workspace)


def on_disk(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def checkpoint_states(workspace: Workspace, run: RunDir) -> dict[int | None, tuple[bool, bool]]:
    """(complete, verified) of the checkpoints that are told to be on disk, by step."""
    return {
        checkpoint.step: (checkpoint.complete, checkpoint.verified)
        for checkpoint in observe_run(workspace, run.id, ask_slurm=False).on_disk
    }


# --- which checkpoints are chosen -------------------------------------------------------------------------------------


def test_checkpoints_are_chosen_by_their_step(workspace: Workspace, run: RunDir) -> None:
    observed = observe_run(workspace, run.id, ask_slurm=False)
    assert choose_checkpoints(workspace, observed, 20, to="verify") == [run.checkpoints / "step-20"]
    assert [path.name for path in choose_checkpoints(workspace, observed, None, to="verify")] == [
        f"step-{step}" for step in STEPS[::-1]
    ]


def test_a_step_that_is_not_there_is_told_with_those_that_are(workspace: Workspace, run: RunDir) -> None:
    files.set_aside(run.checkpoints / "step-20")
    with pytest.raises(NoCheckpoint, match=r"no checkpoint of step 25; there are those of step 10, 30, 40$"):
        verify(workspace, run.id, step=25)
    with pytest.raises(NoCheckpoint, match="step 20; it was damaged, and is put aside; there are"):
        verify(workspace, run.id, step=20)


def test_of_many_steps_the_newest_are_told(workspace: Workspace, run: RunDir) -> None:
    for step in range(100, 120):
        shutil.copytree(run.checkpoints / "step-10", run.checkpoints / f"step-{step}")
    with pytest.raises(NoCheckpoint, match=r"the newest are those of step 110, 111, .*, 119$"):
        verify(workspace, run.id, step=25)


def test_a_run_without_checkpoints_says_where_it_has_none(workspace: Workspace) -> None:
    run = make_run(workspace.config.runs)
    with pytest.raises(NoCheckpoint, match=f"run {run.id} has no checkpoint to verify in {run.checkpoints}$"):
        verify(workspace, run.id)
    (run.checkpoints / "damaged-step-5").mkdir()
    with pytest.raises(NoCheckpoint, match=r"1 that were damaged are put aside there$"):
        verify(workspace, run.id)


@pytest.mark.parametrize("command", [verify, prune, request_checkpoint])
def test_what_a_script_saves_itself_is_left_to_it(workspace: Workspace, command: Callable[..., object]) -> None:
    run = make_run(workspace.config.runs, glob="out/*.pt")
    with pytest.raises(NotAvailable, match=r"brings its own checkpoints \('checkpoint.glob: out/\*.pt'\): "):
        command(workspace, run.id)
    assert list(run.journals.iterdir()) == [run.journals / "submit.jsonl"]


# --- verifying --------------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def results(verified: Verified) -> dict[int, str]:
    return {checked.step: checked.result for checked in verified.checked}


def test_good_checkpoints_are_good_and_journaled_as_such(workspace: Workspace, run: RunDir) -> None:
    verified = verify(workspace, run.id)
    assert results(verified) == dict.fromkeys(STEPS, "good")
    assert (verified.all_good, verified.newest_good, verified.problems) == (True, 40, [])
    assert checkpoint_states(workspace, run) == dict.fromkeys(STEPS, (True, True))


@pytest.mark.parametrize("name", FILES[:2])
@pytest.mark.parametrize("damage", [flip, cut, Path.unlink], ids=["flipped", "cut", "missing"])
def test_any_damage_to_any_file_is_found_and_journaled(
    workspace: Workspace, run: RunDir, name: str, damage: Callable[[Path], object]
) -> None:
    damage(run.checkpoints / "step-40" / name)
    verified = verify(workspace, run.id)
    assert results(verified) == {10: "good", 20: "good", 30: "good", 40: "bad"}
    assert (verified.all_good, verified.newest_good) == (False, 30)
    assert str(run.checkpoints / "step-40" / name) in str(verified.bad[0].reason)
    assert checkpoint_states(workspace, run)[40] == (False, False)
    assert (run.checkpoints / "step-40").is_dir(), "verify renames nothing"


def test_all_files_that_are_bad_are_told(workspace: Workspace, run: RunDir) -> None:
    cut(run.checkpoints / "step-20" / FILES[0])
    (run.checkpoints / "step-20" / FILES[1]).unlink()
    [checked] = verify(workspace, run.id, step=20).checked
    assert checked.reason is not None
    assert "bytes, its manifest says" in checked.reason
    assert f"{FILES[1]} is missing" in checked.reason


@pytest.mark.parametrize("damage", [flip, cut], ids=["flipped", "cut"])
def test_a_manifest_that_cannot_be_read_makes_a_bad_checkpoint(
    workspace: Workspace, run: RunDir, damage: Callable[[Path], object]
) -> None:
    path = run.checkpoints / "step-20" / MANIFEST
    path.write_bytes(path.read_bytes().strip())
    path.write_text(path.read_text().replace('"schema": 2', '"schema": 9') if damage is flip else path.read_text()[:-1])
    verified = verify(workspace, run.id)
    assert results(verified) == {10: "good", 20: "bad", 30: "good", 40: "good"}
    assert checkpoint_states(workspace, run)[20] == (False, False)


def test_sizes_alone_are_looked_at_on_demand_and_do_not_make_a_checkpoint_verified(
    workspace: Workspace, run: RunDir
) -> None:
    flip(run.checkpoints / "step-30" / FILES[0])
    cut(run.checkpoints / "step-20" / FILES[0])
    verified = verify(workspace, run.id, hashes=False)
    assert results(verified) == {10: "good", 20: "bad", 30: "good", 40: "good"}
    assert checkpoint_states(workspace, run) == {
        10: (True, False),
        20: (False, False),
        30: (True, False),
        40: (True, False),
    }


def test_what_was_repaired_is_good_again(workspace: Workspace, run: RunDir) -> None:
    path = run.checkpoints / "step-40" / FILES[0]
    flip(path)
    assert not verify(workspace, run.id, step=40).all_good
    flip(path)
    assert verify(workspace, run.id, step=40).all_good
    assert checkpoint_states(workspace, run)[40] == (True, True)


def test_those_put_aside_are_listed_with_the_reason_and_do_not_count(workspace: Workspace, run: RunDir) -> None:
    name = files.relative_path(files.set_aside(run.checkpoints / "step-40"))
    write_rank_event(run, "rejected", step=40, path="checkpoints/step-40", reason="its hash differs", aside=name)
    (run.checkpoints / "damaged-step-15.2").mkdir()
    verified = verify(workspace, run.id)
    assert results(verified) == {10: "good", 15: "aside", 20: "good", 30: "good", 40: "aside"}
    aside = [(one.step, one.reason) for one in verified.checked if one.result == "aside"]
    assert aside == [(15, None), (40, "its hash differs")]
    assert verified.all_good


def test_one_that_the_run_deletes_meanwhile_is_not_bad(
    workspace: Workspace, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    before(monkeypatch, "verify", lambda: delete_first(run, 10))
    verified = verify(workspace, run.id)
    assert results(verified) == {10: "gone", 20: "good", 30: "good", 40: "good"}
    assert verified.all_good
    assert checkpoint_states(workspace, run)[10] == (True, False)


def test_one_that_the_run_saves_anew_meanwhile_is_not_bad(
    workspace: Workspace, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_anew() -> None:
        path = run.checkpoints / "step-10"
        write_json(path / MANIFEST, replace(files.read_manifest(path), saved_at=5.0).to_json())
        cut(path / FILES[0])

    before(monkeypatch, "verify", save_anew)
    verified = verify(workspace, run.id, step=10)
    assert results(verified) == {10: "gone"}
    assert not verified.all_good, "nothing that is there was found to be good"


def delete_first(run: RunDir, step: int) -> None:
    """Delete a checkpoint, as the run does that is faster."""
    with contextlib.suppress(FileNotFoundError):
        (run.checkpoints / f"step-{step}").rename(run.checkpoints / f".trash-step-{step}")


def before(monkeypatch: pytest.MonkeyPatch, name: str, act: Act) -> None:
    """Have something happen right before each call of a function of checkpointfiles, which several threads may make."""
    original, lock = getattr(files, name), threading.Lock()

    def acting(*arguments: Any, **more: Any) -> Any:
        with lock:
            act()
        return original(*arguments, **more)

    monkeypatch.setattr(files, name, acting)


def test_files_are_compared_in_parallel_and_bytes_are_reported(workspace: Workspace, run: RunDir) -> None:
    progress: list[tuple[int, int]] = []
    verify(workspace, run.id, show=lambda read, total: progress.append((read, total)))
    total = sum(files.bytes_of(run.checkpoints / f"step-{step}") for step in STEPS)
    assert len(progress) == len(STEPS) * 2
    assert progress[-1] == (total, total)
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)


def test_a_result_that_cannot_be_journaled_is_told_all_the_same(
    workspace: Workspace, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    full(monkeypatch)
    verified = verify(workspace, run.id)
    assert verified.all_good
    assert verified.problems == [f"the results cannot be journaled in {run.journals}: no space left on the device"]


def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no room for any journal's lines."""

    def write(self: Journal, kind: str, **data: Any) -> float:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Journal, "write", write)


def test_a_single_checkpoint_is_checked_without_a_run(run: RunDir) -> None:
    assert verify_checkpoint(run.checkpoints / "step-10", lambda *_: None).result == "good"
    flip(run.checkpoints / "step-10" / FILES[1])
    assert verify_checkpoint(run.checkpoints / "step-10", lambda *_: None).result == "bad"


# --- pruning ----------------------------------------------------------------------------------------------------------


def steps_of(pruned: Pruned) -> list[int]:
    return [one.step for one in pruned.checkpoints]


def test_what_the_policy_lets_go_is_deleted_while_the_run_trains(workspace: Workspace, run: RunDir) -> None:
    size = files.bytes_of(run.checkpoints / "step-10") + files.bytes_of(run.checkpoints / "step-20")
    pruned = prune(workspace, run.id)
    assert (steps_of(pruned), pruned.bytes, pruned.problems) == ([10, 20], size, [])
    assert on_disk(run) == ["step-30", "step-40"]
    assert sorted(checkpoint_states(workspace, run)) == [30, 40]
    assert steps_of(prune(workspace, run.id)) == []


def test_a_dry_run_changes_nothing(workspace: Workspace, over: RunDir) -> None:
    (over.checkpoints / ".1.0-step-50").mkdir()
    before = on_disk(over)
    pruned = prune(workspace, over.id, dry=True)
    assert steps_of(pruned) == [10, 20]
    assert [left.path.name for left in pruned.leftovers] == [".1.0-step-50"]
    assert on_disk(over) == before
    assert sorted(checkpoint_states(workspace, over)) == list(STEPS)
    assert not list(over.journals.glob("prune-*"))


def test_the_policy_is_that_of_the_newest_submission(workspace: Workspace, run: RunDir) -> None:
    plan = read_json(run.plan) or {}
    plan["spec"]["checkpoint"]["keep"] = {"last": 1, "every_steps": 20, "best": None}
    run.submission(1).path.mkdir(parents=True)
    write_json(run.submission(1).plan, plan)
    assert steps_of(prune(workspace, run.id)) == [10, 30]


def test_one_that_verify_has_found_bad_does_not_stand_for_a_good_one(workspace: Workspace, run: RunDir) -> None:
    for step in (30, 40):
        cut(run.checkpoints / f"step-{step}" / FILES[0])
    verify(workspace, run.id, hashes=False)
    assert steps_of(prune(workspace, run.id)) == []
    for step in (10, 20):
        cut(run.checkpoints / f"step-{step}" / FILES[0])
    verify(workspace, run.id, hashes=False)
    assert steps_of(prune(workspace, run.id)) == [], "without a good one, all stay"


def test_damaged_ones_go_when_there_is_a_newer_one(workspace: Workspace, run: RunDir) -> None:
    write_rank_event(
        run, "rejected", step=20, path="checkpoints/step-20", reason="hash", aside="checkpoints/damaged-step-20"
    )
    files.set_aside(run.checkpoints / "step-20")
    cut(run.checkpoints / "step-40" / FILES[0])
    verify(workspace, run.id, hashes=False)
    pruned = prune(workspace, run.id)
    assert [(one.path.name, one.why) for one in pruned.checkpoints] == [("damaged-step-20", "damaged")]
    assert on_disk(run) == ["step-10", "step-30", "step-40"]
    assert sorted(checkpoint_states(workspace, run)) == [10, 30, 40]


def test_one_that_the_run_deletes_first_is_left_to_it(
    workspace: Workspace, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    before(monkeypatch, "delete", lambda: delete_first(run, 10))
    pruned = prune(workspace, run.id)
    assert (steps_of(pruned), pruned.problems) == ([20], [])
    assert sorted(checkpoint_states(workspace, run)) == [10, 30, 40], "the run journals what it has deleted"


def test_what_cannot_be_deleted_is_told_and_stays_known(
    workspace: Workspace, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete = files.delete

    def refuse(path: Path) -> None:
        if path.name == "step-10":
            raise OSError(errno.EACCES, "Permission denied")
        delete(path)

    monkeypatch.setattr(files, "delete", refuse)
    pruned = prune(workspace, run.id)
    assert pruned.problems == [f"{run.checkpoints / 'step-10'} cannot be deleted: permission denied"]
    assert steps_of(pruned) == [20]
    assert sorted(checkpoint_states(workspace, run)) == [10, 30, 40]


def test_a_full_disk_keeps_nothing_from_being_deleted(
    workspace: Workspace, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    full(monkeypatch)
    pruned = prune(workspace, run.id)
    assert on_disk(run) == ["step-30", "step-40"]
    assert len(pruned.problems) == 2
    assert "no space left on the device" in pruned.problems[0]


class Killed(BaseException):
    """What ends a command at once."""


def test_the_next_prune_journals_what_a_killed_one_could_not(
    workspace: Workspace, over: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete = files.delete

    def deadly(path: Path) -> None:
        delete(path)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(files, "delete", deadly)
        with pytest.raises(Killed):
            prune(workspace, over.id)
    assert on_disk(over) == ["step-20", "step-30", "step-40"]
    assert sorted(checkpoint_states(workspace, over)) == list(STEPS)
    assert steps_of(prune(workspace, over.id)) == [20]
    assert sorted(checkpoint_states(workspace, over)) == [30, 40]


def test_of_a_run_that_trains_nothing_is_journaled_but_what_was_deleted(workspace: Workspace, run: RunDir) -> None:
    files.delete(run.checkpoints / "step-10")
    assert steps_of(prune(workspace, run.id)) == [20]
    assert sorted(checkpoint_states(workspace, run)) == [10, 30, 40]


def test_what_dead_attempts_left_goes_once_the_run_is_over(workspace: Workspace, over: RunDir) -> None:
    for name in (".1.0-step-50", ".trash-step-5"):
        (over.checkpoints / name).mkdir()
        (over.checkpoints / name / "__0_0.distcp").write_bytes(b"x" * 100)
    pruned = prune(workspace, over.id)
    assert [(left.path.name, left.bytes, left.complete) for left in pruned.leftovers] == [
        (".1.0-step-50", 100, False),
        (".trash-step-5", 100, False),
    ]
    assert pruned.bytes == 200 + sum(one.bytes for one in pruned.checkpoints)
    assert on_disk(over) == ["step-30", "step-40"]


def test_one_that_only_lacks_its_name_is_published_and_known_then(workspace: Workspace, over: RunDir) -> None:
    (over.checkpoints / "step-40").rename(over.checkpoints / ".1.0-step-40")
    journal = over.attempts / ATTEMPT / "rank-0.jsonl"
    journal.write_text("".join(line for line in journal.read_text().splitlines(True) if '"step":40' not in line))
    assert sorted(checkpoint_states(workspace, over)) == [10, 20, 30]
    pruned = prune(workspace, over.id)
    assert [left.complete for left in pruned.leftovers] == [True]
    assert on_disk(over) == ["step-30", "step-40"]
    assert checkpoint_states(workspace, over) == {30: (True, False), 40: (True, False)}


def test_what_a_run_that_trains_is_building_is_left_alone(workspace: Workspace, run: RunDir) -> None:
    (run.checkpoints / ".1.0-step-50").mkdir()
    (run.checkpoints / ".0.9-step-45").mkdir()
    assert prune(workspace, run.id).leftovers == []
    assert on_disk(run) == [".0.9-step-45", ".1.0-step-50", "step-30", "step-40"]


def test_what_is_left_is_left_alone_while_a_command_starts_the_next_attempt(workspace: Workspace, over: RunDir) -> None:
    (over.checkpoints / ".1.0-step-50").mkdir()
    with locked(over.lock):
        assert steps_of(prune(workspace, over.id)) == [10, 20]
    assert ".1.0-step-50" in on_disk(over)


# --- asking -----------------------------------------------------------------------------------------------------------


class Clock:
    """Stands for the module ``time`` while a command waits: at each look one thing happens to the run."""

    def __init__(self, acts: list[Act]) -> None:
        self.now = 1000.0
        self.acts = acts

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.acts:
            self.acts.pop(0)()


@pytest.fixture
def trains(workspace: Workspace) -> RunDir:
    """A run that is at its steps."""
    run = make_run(workspace.config.runs, every={"steps": 1000})
    write_rank_event(run, "session", step=0, world_size=1, device="cpu")
    write_rank_event(run, "registered", objects=["model"])
    write_rank_event(run, "total", total_steps=100_000)
    return run


def saved(run: RunDir, step: int, **more: Any) -> None:
    described = {"step": step, "path": f"checkpoints/step-{step}", "bytes": 7, "saved_at": 5.0 + step, "stall_s": 0.25}
    write_rank_event(run, "saved", **{**described, "why": "asked", "metrics": {}, "request": None, **more})


def answered(
    workspace: Workspace, request: SaveRequest, monkeypatch: pytest.MonkeyPatch, *acts: Act, timeout_s: float = 60.0
) -> tuple[str, int | None, str]:
    monkeypatch.setattr(checkpoint_verb, "time", Clock(list(acts)))
    outcome = wait_for_checkpoint(workspace, request, timeout_s)
    return outcome.outcome, outcome.checkpoint.step if outcome.checkpoint else None, outcome.reason


def test_a_run_is_asked_by_a_line_in_a_journal_and_a_file(workspace: Workspace, trains: RunDir) -> None:
    request = request_checkpoint(workspace, trains.id)
    [event] = events_of(workspace, trains, "asked")
    assert event["request"] == request.id
    assert "@" in event["by"]
    assert (read_json(trains.request) or {})["request"] == request.id
    assert request.id != request_checkpoint(workspace, trains.id).id


def events_of(workspace: Workspace, run: RunDir, kind: str) -> list[dict[str, Any]]:
    observe_run(workspace, run.id, ask_slurm=False)
    return [event.payload.to_json() for event in workspace.store.events(run.id, KINDS[kind])]


def test_the_save_that_names_the_request_fulfils_it(
    workspace: Workspace, trains: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(trains, 3, request="another")
    request = request_checkpoint(workspace, trains.id)
    answer = answered(
        workspace,
        request,
        monkeypatch,
        lambda: saved(trains, 4, why="interval"),
        lambda: saved(trains, 5, request=request.id),
    )
    assert answer == ("saved", 5, "")


def test_who_asked_later_stands_for_those_before(
    workspace: Workspace, trains: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = request_checkpoint(workspace, trains.id)
    later: list[SaveRequest] = []
    answer = answered(
        workspace,
        first,
        monkeypatch,
        lambda: later.append(request_checkpoint(workspace, trains.id)),
        lambda: saved(trains, 5, request=later[0].id),
    )
    assert answer == ("saved", 5, "")


def test_a_save_for_somebody_before_does_not_fulfil_a_wish(
    workspace: Workspace, trains: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = request_checkpoint(workspace, trains.id)
    request = request_checkpoint(workspace, trains.id)
    answer = answered(workspace, request, monkeypatch, lambda: saved(trains, 5, request=before.id), timeout_s=3)
    assert answer == ("late", None, "")


def test_a_save_that_fails_is_told_with_its_reason(
    workspace: Workspace, trains: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = "no space left on the device"
    write_rank_event(trains, "save_failed", step=2, why="asked", reason="an older one")
    request = request_checkpoint(workspace, trains.id)
    answer = answered(
        workspace,
        request,
        monkeypatch,
        lambda: write_rank_event(trains, "save_failed", step=4, why="interval", reason="of no concern", request=None),
        lambda: write_rank_event(trains, "save_failed", step=5, why="steps", reason=full, request=request.id),
    )
    assert answer == ("failed", None, full)


def test_a_run_that_ends_first_has_saved_in_leaving(
    workspace: Workspace, trains: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_checkpoint(workspace, trains.id)
    answer = answered(
        workspace, request, monkeypatch, lambda: (saved(trains, 9, why="stop"), end_run(trains, "cancelled"))
    )
    assert answer == ("ended", 9, f"run {trains.id} is cancelled")


def test_a_run_that_ends_without_a_save_says_so(
    workspace: Workspace, trains: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rank_event(trains, "restored", step=8, path="checkpoints/step-8", bytes=7, saved_at=1.0)
    saved(trains, 9)
    request = request_checkpoint(workspace, trains.id)
    answer = answered(
        workspace, request, monkeypatch, lambda: (saved(trains, 4), end_run(trains, "crash", reason="it broke"))
    )
    assert answer == ("ended", None, f"run {trains.id} is failed: it broke")


def test_the_next_attempt_knows_nothing_of_a_wish(
    workspace: Workspace, trains: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_checkpoint(workspace, trains.id)
    answer = answered(workspace, request, monkeypatch, lambda: (start_again(trains), saved(trains, 5, attempt="1.1")))
    assert answer == ("ended", None, f"the attempt of run {trains.id} that was asked has ended, and the run is running")


def start_again(run: RunDir) -> None:
    """Begin the next attempt of a run, whose script has come as far as opening its session."""
    shutil.copytree(run.attempts / ATTEMPT, run.attempts / "1.1", ignore=shutil.ignore_patterns("rank-*"))
    write_rank_event(run, "session", attempt="1.1", step=0)


def test_nobody_waits_for_longer_than_told(
    workspace: Workspace, trains: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_checkpoint(workspace, trains.id)
    clock = Clock([])
    monkeypatch.setattr(checkpoint_verb, "time", clock)
    assert wait_for_checkpoint(workspace, request, 7.2).outcome == "late"
    assert clock.now == 1007.2


def test_only_a_run_that_trains_is_asked(workspace: Workspace, over: RunDir) -> None:
    with pytest.raises(RunBusy, match=r"is failed, and only one that trains can save; its newest .* step 40$"):
        request_checkpoint(workspace, over.id)
    assert not over.request.exists()
    assert not list(over.journals.glob("checkpoint-*"))


def test_a_run_that_is_not_at_its_steps_yet_is_not_asked(workspace: Workspace) -> None:
    run = make_run(workspace.config.runs, every={"steps": 5})
    with pytest.raises(RunBusy, match="still starting, or its script does not use"):
        request_checkpoint(workspace, run.id)
    write_rank_event(run, "session", step=0)
    write_rank_event(run, "registered", objects=["model"])
    with pytest.raises(RunBusy, match="not come to its first step"):
        request_checkpoint(workspace, run.id)
    assert not run.request.exists()
    write_rank_event(run, "total", total_steps=5)
    request_checkpoint(workspace, run.id)


def test_what_an_earlier_attempt_said_does_not_count(workspace: Workspace, trains: RunDir) -> None:
    start_again(trains)
    with pytest.raises(RunBusy, match="not come to its first step"):
        request_checkpoint(workspace, trains.id)


def test_a_script_that_names_nothing_to_save_is_not_asked(workspace: Workspace) -> None:
    run = make_run(workspace.config.runs)
    write_rank_event(run, "session", step=0)
    write_rank_event(run, "total", total_steps=5)
    with pytest.raises(NotAvailable, match=r"has registered nothing to save so far: .* run.checkpoint\(\)$"):
        request_checkpoint(workspace, run.id)
    write_rank_event(run, "registered", objects=["model"])
    request_checkpoint(workspace, run.id)


def test_a_directory_that_cannot_be_written_is_told(
    workspace: Workspace, trains: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    observe_run(workspace, trains.id, ask_slurm=False)
    full(monkeypatch)
    with pytest.raises(PlaceError, match=f"cannot write to {trains.path}: no space left"):
        request_checkpoint(workspace, trains.id)
    assert not trains.request.exists()
