"""Which checkpoints a command means."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
from helpers.checkpoints import make_run
from helpers.saved_runs import STEPS

from slurmtrain.errors import NoCheckpoint, NotAvailable
from slurmtrain.model.run.layout import RunDir
from slurmtrain.ops.prune import prune
from slurmtrain.ops.request_checkpoint import request_checkpoint
from slurmtrain.ops.shared.observe import observe_run
from slurmtrain.ops.shared.readable_checkpoints import choose_checkpoints
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.verify import verify
from slurmtrain.runtime.checkpoint import checkpoint_files

Act = Callable[[], object]


def test_checkpoints_are_chosen_by_their_step(workspace: Workspace, training: RunDir) -> None:
    observed = observe_run(workspace, training.id, ask_slurm=False)
    assert choose_checkpoints(workspace, observed, 20, to="verify") == [training.checkpoints / "step-20"]
    assert [path.name for path in choose_checkpoints(workspace, observed, None, to="verify")] == [
        f"step-{step}" for step in STEPS[::-1]
    ]


def test_a_step_that_is_not_there_is_told_with_those_that_are(workspace: Workspace, training: RunDir) -> None:
    checkpoint_files.set_aside(training.checkpoints / "step-20")
    with pytest.raises(NoCheckpoint, match=r"no checkpoint of step 25; its steps are 10, 30, 40$"):
        verify(workspace, training.id, step=25)
    with pytest.raises(NoCheckpoint, match="step 20; it was damaged and moved aside; its steps are"):
        verify(workspace, training.id, step=20)
    for step in range(100, 120):
        shutil.copytree(training.checkpoints / "step-10", training.checkpoints / f"step-{step}")
    with pytest.raises(NoCheckpoint, match=r"its newest steps are 110, 111, .*, 119$"):
        verify(workspace, training.id, step=25)


def test_a_run_without_checkpoints_says_where_it_has_none(workspace: Workspace) -> None:
    run = make_run(workspace.config.runs)
    with pytest.raises(NoCheckpoint, match=f"run {run.id} has no checkpoint to verify in {run.checkpoints}$"):
        verify(workspace, run.id)
    (run.checkpoints / "damaged-step-5").mkdir()
    with pytest.raises(NoCheckpoint, match=r"1 damaged, moved aside there$"):
        verify(workspace, run.id)


@pytest.mark.parametrize(
    ("command", "instead"), [(prune, ""), (request_checkpoint, r"only slurmtrain.session\(\) saves on request. ")]
)
def test_what_a_script_saves_itself_is_left_to_it(
    workspace: Workspace, command: Callable[..., object], instead: str
) -> None:
    run = make_run(workspace.config.runs, glob="out/*.pt")
    with pytest.raises(
        NotAvailable, match=rf"writes its own checkpoints \('checkpoint.glob: out/\*.pt'\): .*{instead}"
    ):
        command(workspace, run.id)
    assert list(run.journals.iterdir()) == [run.journals / "submit.jsonl"]
