"""Registering an exported model in the model registry of a real MLflow store."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.checkpoints import make_checkpoints, make_run

from slurmtrain.errors import TrackingError, UserError
from slurmtrain.model.run.layout import RunDir
from slurmtrain.ops.export import ExportRequest
from slurmtrain.ops.register import export_registered
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.checkpoint.checkpoint_files import read_manifest
from slurmtrain.specfile import load_spec
from slurmtrain.system.files import write_json


@pytest.fixture
def run(workspace: Workspace) -> RunDir:
    """A run of a model that was saved twice."""
    run = make_run(workspace.config.runs)
    make_checkpoints(run, [10, 20])
    return run


def test_a_model_is_registered_once_with_its_run_step_and_hash(
    workspace: Workspace, run: RunDir, tmp_path: Path
) -> None:
    import mlflow

    request = ExportRequest(to=tmp_path / "model.safetensors", force=True)
    first = export_registered(workspace, run.id, request, "digits")
    again = export_registered(workspace, run.id, request, "digits")
    older = export_registered(workspace, run.id, ExportRequest(to=tmp_path / "old.pt", step=10), "digits")
    assert [each.uri for each in (first, again, older)] == ["models:/digits/1", "models:/digits/1", "models:/digits/2"]
    client = mlflow.MlflowClient(workspace.root.mlflow_uri)
    version = client.get_model_version("digits", "1")
    assert version.run_id
    assert client.get_run(version.run_id).data.tags["slurmtrain.run_id"] == run.id
    digest = read_manifest(run.checkpoints / "step-20").to_json()["xxh3_128"]
    assert (version.tags["slurmtrain.run_id"], version.tags["slurmtrain.step"]) == (run.id, "20")
    assert version.tags["slurmtrain.hash"] == f"xxh3_128:{digest}"
    mlflow.set_tracking_uri(workspace.root.mlflow_uri)
    downloaded = mlflow.artifacts.download_artifacts("models:/digits/2", dst_path=str(tmp_path / "from"))
    assert torch.load(Path(downloaded) / "old.pt", weights_only=True)
    with pytest.raises(TrackingError, match=r"does not take the model 'a/b': .*cannot contain"):
        export_registered(workspace, run.id, ExportRequest(to=tmp_path / "third.pt"), "a/b")
    assert not (tmp_path / "third.pt").exists()


def test_a_run_that_is_not_in_mlflow_cannot_be_registered(workspace: Workspace, run: RunDir, tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("name: digits\ncommand: python train.py\ntracking: {mlflow: {enabled: false}}\n")
    [planned] = load_spec(spec, cwd=tmp_path, python="python").runs
    write_json(run.plan, planned.plan.to_json())
    with pytest.raises(UserError, match=r"tracking.mlflow.enabled is false"):
        export_registered(workspace, run.id, ExportRequest(to=tmp_path / "model.pt"), "digits")
