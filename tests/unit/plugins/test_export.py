"""Exporting a module of a checkpoint to a file that needs nothing of ours."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from helpers.checkpoints import (
    make_checkpoints,
    make_checkpoints_by_ranks,
    make_run,
    seeded_model,
    small_objects,
    train_alike,
)
from helpers.rare import drawn
from torch import nn

import slurmtrain
from slurmtrain.errors import CheckpointError, NoCheckpoint, PathError, TrackingError, UserError
from slurmtrain.model.run.layout import RunDir, RunsRoot
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.plugins import export as export_verb
from slurmtrain.plugins.export import Exported, ExportRequest, export_registered
from slurmtrain.runtime.checkpoint import checkpoint_files
from slurmtrain.runtime.checkpoint.checkpoint_files import read_manifest
from slurmtrain.specfile import load_spec
from slurmtrain.system.files import write_json

STEPS = (10, 20)
FORMATS = (".pt", ".safetensors")
Save = Callable[..., RunDir]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runs root with a run of a model and an optimizer, saved twice."""
    runs = tmp_path_factory.mktemp("template") / "runs"
    make_checkpoints(make_run(runs), STEPS)
    return runs


@pytest.fixture
def run(template: Path, workspace: Workspace) -> RunDir:
    """The run of the template, in this test's runs root."""
    shutil.copytree(template, workspace.config.runs)
    [run_id] = workspace.run_ids()
    return RunsRoot(workspace.config.runs).run(run_id)


@pytest.fixture
def save(workspace: Workspace) -> Save:
    """A run with one checkpoint of these objects, as they are."""

    def saving(**objects: Any) -> RunDir:
        run = make_run(workspace.config.runs)
        make_checkpoints(run, [5], objects=objects, at_step=lambda *_: None)
        return run

    return saving


def export(workspace: Workspace, run_id: str, to: Path, **options: Any) -> Exported:
    return export_verb.export(workspace, run_id, ExportRequest(to=to, **options))


def load(path: Path) -> dict[str, Any]:
    """As somebody would who has never heard of slurmtrain: neither way imports a module that a file names."""
    if path.suffix == ".safetensors":
        return dict(safetensors.torch.load_file(path))
    return dict(torch.load(path, weights_only=True))


def same(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether two states are the same, bit for bit, types and shapes included."""
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]) for name in first
    )


# --- what is in the file ----------------------------------------------------------------------------------------------


def test_the_file_has_what_the_module_had(workspace: Workspace, save: Save, tmp_path: Path) -> None:
    objects = small_objects()
    run = save(**objects)
    exported = export(workspace, run.id, tmp_path / "model.pt")
    assert same(load(exported.to), objects["model"].state_dict())
    assert (exported.step, exported.object, exported.tensors, exported.left_out) == (5, "model", 9, ())
    assert exported.bytes == exported.to.stat().st_size
    fresh = small_objects()["model"]
    fresh.load_state_dict(load(exported.to))


@pytest.mark.parametrize("suffix", FORMATS)
def test_all_types_of_numbers_and_shapes_survive_and_tied_weights_are_there_under_both_names(
    workspace: Workspace, save: Save, tmp_path: Path, suffix: str
) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    for number, dtype in enumerate((torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)):
        module.register_buffer(f"b{number}", torch.arange(6).reshape(2, 3).to(dtype))
    module.register_buffer("scalar", torch.tensor(1.5))
    module.register_buffer("empty", torch.empty(0, 3))
    module.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())
    run = save(net=module)
    exported = export(workspace, run.id, tmp_path / f"x{suffix}")
    assert same(load(exported.to), module.state_dict())


def test_a_safetensors_file_says_where_it_comes_from(workspace: Workspace, run: RunDir, tmp_path: Path) -> None:
    exported = export(workspace, run.id, tmp_path / "x.safetensors")
    with safetensors.safe_open(exported.to, framework="pt") as file:
        assert file.metadata() == {
            "format": "pt",
            "slurmtrain": slurmtrain.__version__,
            "run": run.id,
            "step": "20",
            "object": "model",
        }


class WithMore(nn.Module):
    """A module with what is no dense tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        self.extra: Any = {"words": ["a", "b"], "n": 3}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_what_is_no_dense_tensor_is_in_a_pt_file_alone(workspace: Workspace, save: Save, tmp_path: Path) -> None:
    module = WithMore()
    run = save(model=module)
    exported = export(workspace, run.id, tmp_path / "x.pt")
    assert exported.left_out == ()
    fresh = WithMore()
    fresh.extra = None
    fresh.load_state_dict(load(exported.to))
    assert fresh.extra == module.extra
    assert torch.equal(fresh.sparse.to_dense(), torch.eye(3))
    left = export(workspace, run.id, tmp_path / "x.safetensors")
    assert sorted(left.left_out) == ["_extra_state", "sparse"]
    assert sorted(load(left.to)) == ["linear.bias", "linear.weight"]


def test_a_type_that_safetensors_lacks_is_an_error(workspace: Workspace, save: Save, tmp_path: Path) -> None:
    module = nn.Module()
    module.register_buffer("b", torch.zeros(2, dtype=torch.complex128))
    run = save(model=module)
    with pytest.raises(CheckpointError, match=r"cannot store numbers of type torch.complex128; export to a .pt file"):
        export(workspace, run.id, tmp_path / "x.safetensors")
    assert same(load(export(workspace, run.id, tmp_path / "x.pt").to), module.state_dict())
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["x.pt"]


@pytest.mark.parametrize("suffix", drawn(FORMATS, 1))
def test_what_several_ranks_saved_is_one_file(workspace: Workspace, tmp_path: Path, suffix: str) -> None:
    run = make_run(workspace.config.runs)
    make_checkpoints_by_ranks(run, {20: "ddp", 30: "fsdp2"})
    trained = seeded_model()
    train_alike(trained)
    for step in (20, 30):
        state = load(export(workspace, run.id, tmp_path / f"{step}{suffix}", step=step).to)
        assert state.keys() == trained.state_dict().keys()
        for name, value in trained.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


# --- which module and checkpoint -----------------------------------------------------------------------------


def test_the_newest_is_exported_or_the_one_of_a_step(workspace: Workspace, run: RunDir, tmp_path: Path) -> None:
    newest = export(workspace, run.id, tmp_path / "newest.pt")
    older = export(workspace, run.id, tmp_path / "older.pt", step=10)
    assert [load(one.to)["0.bias"][0].item() for one in (newest, older)] == [20.0, 10.0]
    assert older.checkpoint == run.checkpoints / "step-10"
    with pytest.raises(NoCheckpoint, match="no checkpoint of step 15; its steps are 10, 20"):
        export(workspace, run.id, tmp_path / "x.pt", step=15)


def test_of_several_modules_one_must_be_chosen(workspace: Workspace, save: Save, tmp_path: Path) -> None:
    models = {name: nn.Linear(2, size) for size, name in enumerate(("model", "ema"), 1)}
    optimizer = torch.optim.SGD(models["model"].parameters())
    run = save(**models, optimizer=optimizer)
    with pytest.raises(UserError, match=r"has 2 modules; choose one with --object: its modules are model, ema$"):
        export(workspace, run.id, tmp_path / "x.pt")
    for name, model in models.items():
        exported = export(workspace, run.id, tmp_path / f"{name}.pt", object=name)
        assert same(load(exported.to), model.state_dict())
    with pytest.raises(UserError, match=r"'optimizer' is not a module in .*; its modules are model, ema"):
        export(workspace, run.id, tmp_path / "x.pt", object="optimizer")
    with pytest.raises(UserError, match="there is no object 'emma' in"):
        export(workspace, run.id, tmp_path / "x.pt", object="emma")


def test_a_module_whose_name_begins_another_is_itself_alone_and_without_any_nothing_is_exported(
    workspace: Workspace, save: Save, tmp_path: Path
) -> None:
    run = save(model=nn.Linear(2, 1), model2=nn.Linear(2, 5))
    assert load(export(workspace, run.id, tmp_path / "x.pt", object="model").to)["weight"].shape == (1, 2)
    shutil.rmtree(run.path)
    run = save(counter=Counter())
    with pytest.raises(UserError, match="has no module"):
        export(workspace, run.id, tmp_path / "y.pt")


class Counter:
    """Something that is no module."""

    def state_dict(self) -> Any:
        return {"n": 1}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError(state)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model", "model.pth", "model.safetensors.gz"])
def test_a_suffix_that_means_no_format_is_refused(workspace: Workspace, run: RunDir, tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=f"'{name}' is neither a .safetensors nor a .pt file"):
        export(workspace, run.id, tmp_path / name)


def test_a_file_that_is_there_is_replaced_only_on_demand(workspace: Workspace, run: RunDir, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_text("precious")
    with pytest.raises(UserError, match=f"{path} exists already; --force replaces it"):
        export(workspace, run.id, path)
    assert path.read_text() == "precious"
    export(workspace, run.id, path, force=True)
    assert "0.weight" in load(path)


def test_a_file_that_comes_up_meanwhile_is_not_replaced(
    workspace: Workspace, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.safetensors"
    original = export_verb._write_safetensors

    def writing(*arguments: Any) -> None:
        path.write_text("precious")
        original(*arguments)

    monkeypatch.setattr(export_verb, "_write_safetensors", writing)
    with pytest.raises(UserError, match="exists already"):
        export(workspace, run.id, path)
    assert path.read_text() == "precious"
    assert litter(tmp_path) == []


def litter(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_places_that_cannot_be_written_to_are_errors(workspace: Workspace, run: RunDir, tmp_path: Path) -> None:
    with pytest.raises(PathError, match=f"there is no directory {tmp_path / 'nowhere'}"):
        export(workspace, run.id, tmp_path / "nowhere" / "x.pt")
    (tmp_path / "folder.pt").mkdir()
    with pytest.raises(PathError, match="is a directory; --to names a file"):
        export(workspace, run.id, tmp_path / "folder.pt", force=True)


@pytest.mark.parametrize("suffix", FORMATS)
def test_the_file_is_private_whatever_the_umask(workspace: Workspace, run: RunDir, tmp_path: Path, suffix: str) -> None:
    before = os.umask(0)
    try:
        exported = export(workspace, run.id, tmp_path / f"x{suffix}")
    finally:
        os.umask(before)
    assert exported.to.stat().st_mode & 0o777 == 0o600


def test_too_little_room_is_an_error_before_anything_is_written(
    workspace: Workspace, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=10, f_frsize=512, f_files=0))
    with pytest.raises(CheckpointError, match=f"x.pt needs .* bytes, but only 5120 are free in {tmp_path}"):
        export(workspace, run.id, tmp_path / "x.pt")
    assert not (tmp_path / "x.pt").exists()


def export_limited(workspace: Workspace, run_id: str, to: Path) -> str:
    """What an export says, in a process whose files the system limits once it has read the checkpoint."""
    read = export_verb._read_module

    def limited(*arguments: Any) -> Any:
        state = read(*arguments)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        return state

    output, say = os.pipe()
    child = os.fork()
    if not child:
        export_verb._read_module = limited
        try:
            export(Workspace(workspace.config), run_id, to, force=True)
        except CheckpointError as error:
            os.write(say, str(error).encode())
        finally:
            os._exit(0)
    os.close(say)
    os.waitpid(child, 0)
    with os.fdopen(output) as text:
        return text.read()


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_write_that_fails_leaves_what_was_there(
    workspace: Workspace, run: RunDir, tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_text("precious")
    problem = export_limited(workspace, run.id, path)
    assert f"{path} cannot be written: " in problem
    assert "too large" in problem.lower()
    assert path.read_text() == "precious"
    assert litter(tmp_path) == []


# --- damage -----------------------------------------------------------------------------------------------------------


def test_a_damaged_checkpoint_is_not_exported(workspace: Workspace, run: RunDir, tmp_path: Path) -> None:
    path = run.checkpoints / "step-20" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        CheckpointError, match=rf"step 20 is not exported: {path} has changed since it was written.*'slurmtrain ver"
    ):
        export(workspace, run.id, tmp_path / "x.pt")
    assert not (tmp_path / "x.pt").exists()
    export(workspace, run.id, tmp_path / "x.pt", step=10)


def test_an_index_that_would_run_code_is_refused(workspace: Workspace, run: RunDir, tmp_path: Path) -> None:
    path = run.checkpoints / "step-20"
    content = b"cposix\nsystem\n(S'touch %s'\ntR." % str(tmp_path / "touched").encode()
    (path / ".metadata").write_bytes(content)
    hasher = checkpoint_files.new_hasher()
    hasher.update(content)
    manifest = checkpoint_files.read_manifest(path)
    entries = {**manifest.files, ".metadata": (len(content), hasher.hexdigest())}
    checkpoint_files.write_json(path / checkpoint_files.MANIFEST, replace(manifest, files=entries).to_json())
    with pytest.raises(CheckpointError, match=r"is not an index of a checkpoint: .*posix.system is not allowed in it"):
        export(workspace, run.id, tmp_path / "x.pt")
    assert not (tmp_path / "touched").exists()


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_an_error(
    workspace: Workspace, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = export_verb._read_module

    def reading(directory: Path, *more: Any) -> Any:
        (directory / "__0_0.distcp").unlink()
        return original(directory, *more)

    monkeypatch.setattr(export_verb, "_read_module", reading)
    with pytest.raises(CheckpointError, match=f"{run.checkpoints / 'step-20'} cannot be read: .*No such file"):
        export(workspace, run.id, tmp_path / "x.pt")


# --- the registry of MLflow -------------------------------------------------------------------------------------------


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
