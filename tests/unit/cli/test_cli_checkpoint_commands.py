"""verify, prune, export and checkpoint on the command line: what they print, and with what they exit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from helpers.checkpoints import end_run, gone, make_checkpoints, make_run, write_rank_event

from slurmtrain.cli.checkpoint_commands import checkpoint_command, prune_command, verify_command
from slurmtrain.cli.tables import byte_progress
from slurmtrain.errors import RunBusy
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.run import Checkpoint
from slurmtrain.ops import request_checkpoint as checkpoint_verb
from slurmtrain.ops.request_checkpoint import RequestOutcome
from slurmtrain.plugins.export import export_command
from slurmtrain.runtime.checkpoint import checkpoint_files

ROOT = Path(__file__).resolve().parents[3]
STEPS = (10, 20, 30)
# Runs commands as their console script does, and says after each, on standard error, what is imported of these.
RUN_AND_TELL = """
import sys
from slurmtrain.cli import main
for words in (("verify", "@last"), ("prune", "@last", "--dry-run"), ("checkpoint", "@last", "--no-wait"),
              ("export", "@last", "--to", "x.bin"), ("export", "@last", "--to", "nowhere/x.pt")):
    try:
        main([*words, "--runs", sys.argv[1]])
    except SystemExit as end:
        heavy = {"torch", "numpy", "mlflow", "alembic", "safetensors"} & {*sys.modules}
        print("ended:", end.code, *sorted(heavy), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run that trains, has saved three times, and keeps the last two."""
    run = make_run(tmp_path_factory.mktemp("template") / "runs", keep=2)
    make_checkpoints(run, STEPS)
    return run


@pytest.fixture
def run(template: RunDir, tmp_path: Path) -> RunDir:
    """The run of the template, in this test's runs root."""
    shutil.copytree(template.path.parent, tmp_path / "runs")
    return RunDir(tmp_path / "runs" / template.id)


def call(command: click.Command, run: RunDir, *arguments: str) -> Result:
    """Run a command on the runs root of this run."""
    arguments = (run.id, *arguments, "--runs", str(run.path.parent))
    result = CliRunner().invoke(command, arguments, standalone_mode=False)
    assert result.exception is None, result.exception
    return result


def rows(result: Result) -> list[list[str]]:
    """Lines as cells, which two blanks part."""
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in result.stdout.splitlines()]


def cut(run: RunDir, step: int) -> Path:
    """Damage a checkpoint; returns the file that is too short now."""
    path = run.checkpoints / f"step-{step}" / ".metadata"
    path.write_bytes(path.read_bytes()[:-1])
    return path


# --- verify -----------------------------------------------------------------------------------------------------------


def test_good_checkpoints_are_a_table_and_a_zero(run: RunDir) -> None:
    result = call(verify_command, run)
    assert result.return_value == 0
    assert [(step, what, why) for step, _, what, why in rows(result)] == [
        ("STEP", "RESULT", "REASON"),
        *((str(step), "good", "-") for step in STEPS),
    ]
    assert result.stderr == ""


def test_a_bad_checkpoint_is_reported_with_the_step_that_a_run_continues_from(run: RunDir) -> None:
    path = cut(run, 30)
    result = call(verify_command, run)
    assert result.return_value == 1
    assert rows(result)[3][2] == "bad"
    assert str(path) in rows(result)[3][3]
    assert result.stderr == "when it starts again, the run continues from step 20; newer ones are skipped\n"
    end_run(run)
    expected = f"'slurmtrain resume {run.id}' continues from step 20; newer ones are skipped\n"
    assert call(verify_command, run).stderr == expected


def test_older_bad_checkpoints_and_bad_ones_alone_get_different_advice(run: RunDir) -> None:
    cut(run, 10)
    assert call(verify_command, run).stderr.endswith("continues from step 30; the bad ones are older\n")
    cut(run, 20), cut(run, 30)
    cure = f"'slurmtrain resume --from-start {run.id}' starts from the beginning"
    assert call(verify_command, run).stderr == f"none is good; {cure}\n"


def test_the_advice_on_one_checkpoint_says_nothing_of_others(run: RunDir) -> None:
    cut(run, 30)
    result = call(verify_command, run, "--step", "30", "--sizes")
    assert (result.return_value, len(rows(result))) == (1, 2)
    expected = f"'slurmtrain resume {run.id}' skips it; 'slurmtrain verify {run.id}' checks the others\n"
    assert result.stderr == expected


def test_verify_prints_json(run: RunDir) -> None:
    path = cut(run, 30)
    facts = json.loads(call(verify_command, run, "--json").stdout)
    assert {**facts, "checkpoints": len(facts["checkpoints"])} == {
        "schema": 1,
        "run_id": run.id,
        "hashes": True,
        "checkpoints": 3,
        "newest_good": 20,
    }
    good, _, bad = facts["checkpoints"]
    assert good == {
        "step": 10,
        "path": str(run.checkpoints / "step-10"),
        "bytes": checkpoint_files.bytes_of(run.checkpoints / "step-10"),
        "result": "good",
        "reason": None,
    }
    assert (bad["result"], str(path) in bad["reason"]) == ("bad", True)


def test_reading_is_shown_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with byte_progress() as show:
        show(1 << 32, 1 << 33)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with byte_progress() as show:
        show(1 << 32, 1 << 33)
    assert "GiB" in capsys.readouterr().err


# --- prune ------------------------------------------------------------------------------------------------------------


def test_prune_lists_what_it_has_deleted_and_a_dry_run_what_it_would_delete(run: RunDir) -> None:
    dry = call(prune_command, run, "--dry-run")
    assert (len(rows(dry)), "would be free" in dry.stderr) == (2, True)
    assert (run.checkpoints / "step-10").is_dir()
    result = call(prune_command, run)
    assert (result.return_value, result.stderr.count("are free now")) == (0, 1)
    [header, row] = rows(result)
    assert header == ["STEP", "SIZE", "WHY", "PATH"]
    assert [row[0], *row[2:]] == ["10", "the policy does not keep it", str(run.checkpoints / "step-10")]
    again = call(prune_command, run)
    assert (again.stdout, again.stderr) == ("", f"run {run.id}: nothing to delete\n")


def test_prune_prints_json(tmp_path: Path, template: RunDir) -> None:
    run = make_run(tmp_path / "runs", keep=2, process=gone())
    end_run(run)
    for step in STEPS:
        shutil.copytree(template.checkpoints / f"step-{step}", run.checkpoints / f"step-{step}")
    left = run.checkpoints / ".1.0-step-40"
    left.mkdir()
    (left / "__0_0.distcp").write_bytes(b"x" * 50)
    size = checkpoint_files.bytes_of(run.checkpoints / "step-10")
    facts = json.loads(call(prune_command, run, "--json").stdout)
    gone_now = {"step": 10, "path": str(run.checkpoints / "step-10"), "bytes": size}
    assert facts == {
        "schema": 1,
        "run_id": run.id,
        "dry_run": False,
        "pruned": [{**gone_now, "why": "the policy does not keep it", "forks": []}],
        "leftovers": [{"path": str(left), "bytes": 50, "complete": False}],
        "bytes": size + 50,
        "problems": [],
    }


def test_what_cannot_be_deleted_makes_a_one(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> None:
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(checkpoint_files, "delete_checkpoint", refuse)
    result = call(prune_command, run)
    assert result.return_value == 1
    assert f"warning: {run.checkpoints / 'step-10'} cannot be deleted: permission denied\n" in result.stderr


# --- export -----------------------------------------------------------------------------------------------------------


def test_export_prints_the_path_of_the_file(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = call(export_command, run, "--to", "model.safetensors")
    assert (result.return_value, result.stdout) == (0, f"{tmp_path / 'model.safetensors'}\n")
    assert result.stderr.startswith("'model' of step 30: 9 tensors, ")


def test_export_prints_json(run: RunDir, tmp_path: Path) -> None:
    to = tmp_path / "model.pt"
    facts = json.loads(call(export_command, run, "--to", str(to), "--step", "20", "--object", "model", "--json").stdout)
    assert facts == {
        "schema": 1,
        "run_id": run.id,
        "step": 20,
        "checkpoint": str(run.checkpoints / "step-20"),
        "object": "model",
        "to": str(to),
        "bytes": to.stat().st_size,
        "tensors": 9,
        "left_out": [],
    }


# --- checkpoint -------------------------------------------------------------------------------------------------------


@pytest.fixture
def trains(run: RunDir) -> RunDir:
    """A run that is at its steps."""
    write_rank_event(run, "session", step=0, world_size=1, device="cpu")
    write_rank_event(run, "total", total_steps=100)
    write_rank_event(run, "registered", objects=["model"])
    return run


def ask(run: RunDir, monkeypatch: pytest.MonkeyPatch, outcome: RequestOutcome, *arguments: str) -> Result:
    """Call ``checkpoint``, with this answer of the run's."""
    monkeypatch.setattr(checkpoint_verb, "wait_for_checkpoint", lambda *_: outcome)
    return call(checkpoint_command, run, *arguments)


def saved() -> Checkpoint:
    return Checkpoint(step=31, path="checkpoints/step-31", bytes=2048, saved_at=5.0, seconds=1.5, stall_s=0.25)


def test_a_checkpoint_that_was_asked_for_is_printed(trains: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    result = ask(trains, monkeypatch, RequestOutcome("saved", saved()))
    assert (result.return_value, result.stdout) == (0, f"{trains.checkpoints / 'step-31'}\n")
    assert result.stderr == "step 31, 2.0 KiB; training stalled for 0.25 s\n"
    result = ask(trains, monkeypatch, RequestOutcome("ended", saved(), "run X is cancelled"))
    assert result.return_value == 0
    assert result.stderr.startswith("run X is cancelled; it saved before it ended: step 31, ")


def test_checkpoint_prints_json(trains: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = json.loads(ask(trains, monkeypatch, RequestOutcome("saved", saved()), "--json").stdout)
    request_id = json.loads(trains.request.read_text())["request"]
    assert facts["checkpoint"]["path"] == str(trains.checkpoints / "step-31")
    assert {**facts, "checkpoint": facts["checkpoint"]["step"]} == {
        "schema": 1,
        "run_id": trains.id,
        "request": request_id,
        "outcome": "saved",
        "checkpoint": 31,
        "reason": None,
    }


@pytest.mark.parametrize(
    ("outcome", "code", "message"),
    [
        (RequestOutcome("failed", None, "no space left"), 1, "could not save: no space left; it keeps training"),
        (
            RequestOutcome("ended", None, "run X is failed: it broke"),
            1,
            "run X is failed: it broke without saving since",
        ),
        (RequestOutcome("late"), 1, "has not saved within 600 s; it will still do so at the end of a step"),
    ],
)
def test_what_keeps_a_run_from_saving_is_printed(
    trains: RunDir, monkeypatch: pytest.MonkeyPatch, outcome: RequestOutcome, code: int, message: str
) -> None:
    result = ask(trains, monkeypatch, outcome)
    assert (result.return_value, result.stdout) == (code, "")
    assert message in result.stderr


def test_checkpoint_need_not_wait(trains: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_verb, "wait_for_checkpoint", lambda *_: pytest.fail("it waits"))
    result = call(checkpoint_command, trains, "--no-wait")
    assert (result.return_value, result.stdout) == (0, "")
    assert f"run {trains.id} was asked" in result.stderr
    assert trains.request.exists()


def test_after_ctrl_c_the_command_says_that_the_run_still_saves(
    trains: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> RequestOutcome:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_verb, "wait_for_checkpoint", interrupt)
    arguments = (trains.id, "--runs", str(trains.path.parent))
    result = CliRunner().invoke(checkpoint_command, arguments, standalone_mode=False)
    assert isinstance(result.exception, click.Abort | KeyboardInterrupt | SystemExit)
    assert "stopped waiting; the run will still save" in result.stderr


def test_a_run_that_does_not_train_is_not_asked(run: RunDir) -> None:
    arguments = (run.id, "--runs", str(run.path.parent))
    result = CliRunner().invoke(checkpoint_command, arguments, standalone_mode=False)
    assert isinstance(result.exception, RunBusy)
    assert result.exception.exit_code == 2


# --- imports ----------------------------------------------------------------------------------------------------------


def test_commands_that_read_no_tensors_import_none_of_the_heavy_libraries(trains: RunDir) -> None:
    completed = subprocess.run(
        [sys.executable, "-c", RUN_AND_TELL, str(trains.path.parent)],
        cwd=trains.path.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    ends = [line for line in completed.stderr.splitlines() if line.startswith("ended: ")]
    assert ends == [f"ended: {code}" for code in (0, 0, 0, 2, 2)], completed.stderr
