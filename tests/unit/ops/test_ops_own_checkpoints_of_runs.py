"""Commands on the checkpoints that a run's script saves by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import end_run, make_run
from safetensors.torch import load_file, save_file

from slurmtrain.errors import CheckpointError, NoCheckpoint, UserError
from slurmtrain.model.run.events.agent_events import WorkersStarted
from slurmtrain.model.run.events.checkpoint_events import CheckpointFound, CheckpointPassedOver
from slurmtrain.model.run.layout import AttemptDir, RunDir
from slurmtrain.ops.diagnose import diagnose
from slurmtrain.ops.resume import resume
from slurmtrain.ops.shared.observe import observe, observe_run
from slurmtrain.ops.shared.run_details import attempt_json, checkpoints_json
from slurmtrain.ops.shared.views import run_json
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.verify import verify
from slurmtrain.plugins.export import ExportRequest, export
from slurmtrain.system.journal import Journal

WEIGHTS = {"layer.weight": torch.arange(12.0).reshape(3, 4), "layer.bias": torch.ones(3)}


def save(path: Path, step: int, **more: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": WEIGHTS, "optimizer": {"lr": 0.1}, "step": step, **more}, path)
    return path


def flip(path: Path) -> None:
    """Change a byte of the first tensor, which no header shows."""
    content = bytearray(path.read_bytes())
    at = content.index(WEIGHTS["layer.weight"].numpy().tobytes())
    content[at + 5] ^= 1
    path.write_bytes(content)


@pytest.fixture
def run(workspace: Workspace) -> RunDir:
    return make_run(workspace.config.runs, glob="out/*.pt")


@pytest.fixture
def out(workspace: Workspace) -> Path:
    """Where the run's script saves."""
    return workspace.config.runs / "out"


def listed(workspace: Workspace, run: RunDir, *, deleted_too: bool = False) -> list[Mapping[str, Any]]:
    facts = checkpoints_json(workspace, observe_run(workspace, run.id, ask_slurm=False), deleted_too=deleted_too)
    checkpoints: list[Mapping[str, Any]] = facts["checkpoints"]
    return checkpoints


def test_they_are_listed_as_they_are_on_disk_with_format_step_and_what_is_wrong(
    workspace: Workspace, run: RunDir, out: Path
) -> None:
    save(out / "a.pt", 10)
    save(out / "b.pt", 20).write_bytes(b"PK")
    rows = [(each["path"], each["format"], each["step"], each["complete"]) for each in listed(workspace, run)]
    assert sorted(rows) == [(f"{out}/a.pt", "torch", 10, True), (f"{out}/b.pt", "torch", None, False)]
    [problem] = [each["problem"] for each in listed(workspace, run) if not each["complete"]]
    assert problem == "b.pt is incomplete: it is cut off: the archive has no directory at its end"


def test_one_that_was_found_once_and_is_gone_is_listed_with_the_deleted_ones(
    workspace: Workspace, run: RunDir, out: Path
) -> None:
    with Journal(AttemptDir(run.attempts / "1.0").node_journal(0)) as journal:
        journal.write(CheckpointFound(path=f"{out}/old.pt", step=5, bytes=1, saved_at=5.0, format="torch"))
    save(out / "new.pt", 10)
    assert [each["step"] for each in listed(workspace, run)] == [10]
    assert [each["step"] for each in listed(workspace, run, deleted_too=True)] == [5, 10]


def test_verify_reads_archives_and_finds_a_changed_byte(workspace: Workspace, run: RunDir, out: Path) -> None:
    save(out / "a.pt", 10)
    flip(save(out / "b.pt", 20))
    by_size = verify(workspace, run.id, hashes=False)
    assert by_size.all_good
    verified = verify(workspace, run.id)
    assert [(each.step, each.result) for each in verified.checked] == [(10, "good"), (20, "bad")]
    assert "checksum differs" in str(verified.bad[0].reason)
    assert verified.newest_good == 10


def test_verify_names_what_an_incomplete_one_lacks(workspace: Workspace, run: RunDir, out: Path) -> None:
    path = save(out / "ckpt-20.pt", 20)
    path.write_bytes(path.read_bytes()[:-40])
    [checked] = verify(workspace, run.id, step=20).checked
    assert (checked.result, checked.reason) == (
        "bad",
        "ckpt-20.pt is incomplete: it is cut off: the archive has no directory at its end",
    )
    with pytest.raises(NoCheckpoint, match="no checkpoint of step 7; its newest steps are 20"):
        verify(workspace, run.id, step=7)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_export_writes_the_weights_of_the_newest_complete_one(
    workspace: Workspace, run: RunDir, out: Path, tmp_path: Path, suffix: str
) -> None:
    save(out / "a.pt", 10)
    save(out / "b.pt", 20).write_bytes(b"PK")
    to = tmp_path / f"model{suffix}"
    exported = export(workspace, run.id, ExportRequest(to=to))
    assert (exported.step, exported.object, exported.tensors) == (10, "model", 2)
    state = load_file(to) if suffix == ".safetensors" else torch.load(to, weights_only=True)
    assert {name: value.tolist() for name, value in state.items()} == {
        name: value.tolist() for name, value in WEIGHTS.items()
    }


def test_export_says_what_it_cannot_choose_and_takes_any_part_by_name(
    workspace: Workspace, run: RunDir, out: Path, tmp_path: Path
) -> None:
    torch.save({"ema": WEIGHTS, "epoch": 3}, _made(out / "a.pt"))
    with pytest.raises(UserError, match=r"none of ema, epoch in .*a.pt is known to be a model; choose one with --obj"):
        export(workspace, run.id, ExportRequest(to=tmp_path / "x.pt"))
    assert export(workspace, run.id, ExportRequest(to=tmp_path / "x.pt", object="ema")).tensors == 2
    torch.save(WEIGHTS, out / "a.pt")
    assert export(workspace, run.id, ExportRequest(to=tmp_path / "y.pt")).tensors == 2


def test_a_damaged_or_unknown_one_is_not_exported(workspace: Workspace, run: RunDir, out: Path, tmp_path: Path) -> None:
    flip(save(out / "a.pt", 10))
    with pytest.raises(CheckpointError, match=r"is not exported: a.pt: .*checksum differs"):
        export(workspace, run.id, ExportRequest(to=tmp_path / "x.pt"))
    (out / "a.pt").write_bytes(b"text")
    with pytest.raises(CheckpointError, match="cannot be read"):
        export(workspace, run.id, ExportRequest(to=tmp_path / "x.pt"))
    assert list(tmp_path.glob("x*")) == []


def test_show_and_doctor_have_what_was_passed_over_and_why(workspace: Workspace, run: RunDir) -> None:
    with Journal(AttemptDir(run.attempts / "1.0").node_journal(0)) as journal:
        journal.write(CheckpointPassedOver(path="/out/b.pt", step=20, fingerprint="f", why="its ranks crashed"))
        journal.write(WorkersStarted())
    [attempt] = observe_run(workspace, run.id, ask_slurm=False).attempts
    [passed_over] = attempt_json(attempt)["passed_over"]
    assert {name: passed_over[name] for name in ("path", "step", "why")} == {
        "path": "/out/b.pt", "step": 20, "why": "its ranks crashed",
    }  # fmt: skip
    [note] = diagnose(workspace, run.id).diagnosis.others
    assert note.first.cause == "its ranks did not continue from /out/b.pt, since its ranks crashed"


# --- scripts that find their checkpoints themselves -------------------------------------------------------------------


def test_a_fresh_start_of_a_script_that_looks_itself_is_refused_while_it_would_find_some(
    workspace: Workspace, out: Path
) -> None:
    run = make_run(workspace.config.runs, glob="out/*.pt", format="own")
    end_run(run)
    path = save(out / "a.pt", 10)
    with pytest.raises(UserError, match=f"and would continue from {path}; move the files that match 'out/\\*.pt' away"):
        resume(workspace, run.id, from_start=True)
    assert path.exists()


def test_a_resume_without_a_complete_one_says_what_the_newest_lacks(workspace: Workspace, out: Path) -> None:
    run = make_run(workspace.config.runs, glob="out/*.pt")
    end_run(run)
    save(out / "a.pt", 10).write_bytes(b"")
    with pytest.raises(NoCheckpoint, match=r"\(of a.pt, a.pt is empty\); 'slurmtrain resume --from-start"):
        resume(workspace, run.id)


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def test_safetensors_have_no_checksums_but_a_header_that_is_checked(
    workspace: Workspace, out: Path, tmp_path: Path
) -> None:
    run = make_run(workspace.config.runs, glob="out/*.safetensors")
    save_file(WEIGHTS, _made(out / "step-5.safetensors"), {"step": "7"})
    [checked] = verify(workspace, run.id).checked
    assert (checked.step, checked.result) == (7, "good")
    assert export(workspace, run.id, ExportRequest(to=tmp_path / "x.safetensors")).tensors == 2


def test_status_and_checkpoints_agree_on_a_file_that_is_written_anew(
    workspace: Workspace, run: RunDir, out: Path
) -> None:
    for step in (10, 20):
        save(out / "last.pt", step)
        fetched = observe(workspace, [run.id], ask_slurm=False).runs.fetch([run.id])[run.id]
        in_status = run_json(workspace, replace(fetched, row={**fetched.row, "state": "running"}))["checkpoint"]
        in_list = listed(workspace, run)[-1]
        assert in_status == {name: in_list[name] for name in in_status}
        assert in_status["step"] == step
