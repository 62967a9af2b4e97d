"""``slurmtrain export`` writes a checkpoint's model to a single file, for programs that know nothing of slurmtrain."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from slurmtrain.cli import formatting, options, output, tables
from slurmtrain.errors import CheckpointError, PathError, UserError
from slurmtrain.model.run.run import Run
from slurmtrain.ops.shared.next_attempts import current_plan
from slurmtrain.ops.shared.observe import observe_run
from slurmtrain.ops.shared.readable_checkpoints import choose_checkpoints, choose_own, find_own
from slurmtrain.ops.shared.trackers import MLFLOW, targets_of
from slurmtrain.ops.shared.views import SCHEMA
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.verify import ShowProgress, verify_checkpoint
from slurmtrain.runtime.checkpoint.checkpoint_files import Manifest, new_hasher, read_manifest
from slurmtrain.runtime.checkpoint.external import ExternalCheckpoint, find_damage, find_modules, read_contents
from slurmtrain.runtime.checkpoint.untrusted_files import Contents, list_tree
from slurmtrain.system.files import FILE_MODE, describe_os_error, fsync_directory, space_left
from slurmtrain.system.locks import locked
from slurmtrain.version import __version__

# The most that a file needs in addition to its tensors: names, shapes and types.
_HEADER_BYTES = 1 << 20
# How many parts of a checkpoint an error lists.
_SHOWN = 10
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """What to export, and where to.

    ``to``: the file, whose suffix selects the format. ``step``: the checkpoint's; None for the newest. ``object``: the
    module, needed if the checkpoint has several. ``force``: replace an existing file.
    """

    to: Path
    step: int | None = None
    object: str | None = None
    force: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A file that was written. ``left_out``: names of values that its format cannot hold."""

    run: Run
    step: int | None
    checkpoint: Path
    object: str
    to: Path
    bytes: int
    tensors: int
    left_out: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """What ``export --json`` prints."""
        return {
            "schema": SCHEMA,
            "run_id": self.run.id,
            "step": self.step,
            "checkpoint": str(self.checkpoint),
            "object": self.object,
            "to": str(self.to),
            "bytes": self.bytes,
            "tensors": self.tensors,
            "left_out": list(self.left_out),
        }


@dataclass(frozen=True, slots=True)
class _Source:
    """A module's state in a checkpoint, by the module's own names. ``others``: what is not a dense tensor."""

    checkpoint: Path
    step: int | None
    module: str
    tensors: Mapping[str, Any]
    others: Mapping[str, Any]


def export(workspace: Workspace, run_id: str, request: ExportRequest, show: ShowProgress = lambda *_: None) -> Exported:
    """Write a module of a run's checkpoint to a single file. The checkpoint is verified first.

    Args:
        workspace: where the run is.
        run_id: the run.
        request: what to export, and where to.
        show: called with the progress of verifying.

    Raises:
        UserError: the request cannot be met.
        NoCheckpoint: there is none.
        CheckpointError: the checkpoint is damaged, or the file cannot be written; then there is no file, or the
            previous one.
    """
    to = request.to.absolute()
    if to.suffix not in (".safetensors", ".pt"):
        raise UserError(f"{to.name!r} is neither a .safetensors nor a .pt file; the suffix of --to selects the format")
    _check_target(to, force=request.force)
    run = observe_run(workspace, run_id, ask_slurm=False)
    own = find_own(workspace.root.run(run_id), run)
    source = _read_published(workspace, run, request, show) if own is None else _read_own(run, own, request)
    left_out = () if to.suffix == ".pt" else tuple(source.others)
    _write_durably(to, source, run_id, force=request.force)
    return Exported(
        run=run,
        step=source.step,
        checkpoint=source.checkpoint,
        object=source.module,
        to=to,
        bytes=to.stat().st_size,
        tensors=len(source.tensors),
        left_out=left_out,
    )


def _read_published(workspace: Workspace, run: Run, request: ExportRequest, show: ShowProgress) -> _Source:
    """The module of a checkpoint that slurmtrain saved."""
    directory = choose_checkpoints(workspace, run, request.step, to="export")[0]
    manifest = read_manifest(directory)
    modules = [each for each, kind in manifest.objects.items() if kind.get("kind") == "module"]
    name = _choose_module(directory, modules, manifest.objects, request.object)
    checked = verify_checkpoint(directory, show)
    if checked.result != "good":
        raise CheckpointError(
            f"the checkpoint of step {manifest.step} is not exported: {checked.reason}; 'slurmtrain verify {run.id}' "
            "shows which are good, and --step selects one"
        )
    return _Source(directory, manifest.step, name, *_read_module(directory, manifest, name, request.to.absolute()))


def _read_own(run: Run, own: Sequence[ExternalCheckpoint], request: ExportRequest) -> _Source:
    """The weights of a model in a checkpoint that the run's script saved. Raises UserError, CheckpointError."""
    chosen = choose_own(run, own, request.step, to="export")
    checkpoint = next((each for each in chosen if each.complete), None)
    if checkpoint is None:
        raise CheckpointError(f"{chosen[0].path} cannot be exported, because it is incomplete: {chosen[0].problem}")
    try:
        if damage := "; ".join(find_damage(list_tree(checkpoint.path))):
            raise CheckpointError(f"{checkpoint.path} is not exported: {damage}")
        contents = read_contents(checkpoint.path, checkpoint.format)
        module = _choose_own(checkpoint, contents, request.object)
        start = f"{module}." if module else ""
        values = {name.removeprefix(start): read() for name, read in contents.items() if name.startswith(start)}
    except OSError as error:
        raise CheckpointError(f"{checkpoint.path} cannot be read: {describe_os_error(error)}") from error
    tensors = {name: value for name, value in values.items() if hasattr(value, "nbytes")}
    _check_room(request.to.absolute(), sum(tensor.nbytes for tensor in tensors.values()))
    others = {name: value for name, value in values.items() if name not in tensors}
    return _Source(checkpoint.path, checkpoint.step, module or "model", tensors, others)


def _choose_own(checkpoint: ExternalCheckpoint, contents: Contents, name: str | None) -> str:
    """The prefix of the weights to export; empty if a file holds nothing else. Raises UserError if it is not clear."""
    modules = find_modules(checkpoint.format, contents)
    objects = sorted({each.partition(".")[0] for each in contents})
    if name is not None and name in objects:
        return name
    if not modules and checkpoint.format == "deepspeed":
        directory = checkpoint.path.parent
        raise UserError(
            f"the weights in {checkpoint.path} are divided among the ranks; DeepSpeed makes one file of them: "
            f"'python {directory}/zero_to_fp32.py {directory} OUT --tag {checkpoint.path.name}'"
        )
    if not modules and checkpoint.format == "other":
        raise UserError(f"the format of {checkpoint.path} is unknown, so it cannot be exported")
    if not modules and all(hasattr(read(), "nbytes") for read in contents.values()):
        return ""
    if not modules:
        parts = ", ".join(objects[:_SHOWN])
        raise UserError(f"none of {parts} in {checkpoint.path} is known to be a model; choose one with --object")
    return _choose_module(checkpoint.path, modules, objects, name)


# --- checks before anything is read -----------------------------------------------------------------------------------


def _check_target(to: Path, *, force: bool) -> None:
    if not to.parent.is_dir():
        raise PathError(f"there is no directory {to.parent} to write {to.name} to")
    if to.is_dir():
        raise PathError(f"{to} is a directory; --to names a file")
    if not force and (to.exists() or to.is_symlink()):
        raise UserError(f"{to} exists already; --force replaces it")


def _choose_module(path: Path, modules: Sequence[str], objects: Collection[str], name: str | None) -> str:
    """The name of the module to export. Raises UserError if the choice is not clear.

    Args:
        path: The checkpoint.
        modules: The names of its modules.
        objects: The names of everything in it.
        name: The name that was asked for, if any.
    """
    if name is None and len(modules) == 1:
        return modules[0]
    if name is not None and name in modules:
        return name
    if not modules:
        raise UserError(f"{path} has no module (run.checkpoint(model=...)), and only modules can be exported")
    among = f"its modules are {', '.join(modules)}" if len(modules) > 1 else f"its module is {modules[0]}"
    if name is None:
        raise UserError(f"{path} has {len(modules)} modules; choose one with --object: {among}")
    problem = f"{name!r} is not a module" if name in objects else f"there is no object {name!r}"
    raise UserError(f"{problem} in {path}; {among}")


# --- reading and writing ----------------------------------------------------------------------------------------------


def _read_module(directory: Path, manifest: Manifest, name: str, to: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A module's tensors and other values, all in memory. Raises CheckpointError, also for lack of space at ``to``."""
    # Imported here: torch takes a second to import, and a wrong command should fail faster than that.
    from torch.distributed.checkpoint.api import CheckpointException

    from slurmtrain.runtime.checkpoint.shard_plan import read_shared
    from slurmtrain.runtime.checkpoint.torch_index import Index

    start = f"{name}."
    try:
        index = Index(directory)
        tensors = index.empty([each for each in index.shapes() if each.startswith(start)])
        _check_room(to, sum(tensor.nbytes for tensor in tensors.values()))
        index.read(tensors)
        others = read_shared(index, manifest).get(name, {}).get("others", {})
    except CheckpointError:
        raise
    except CheckpointException as error:
        [problem, *_] = [problem for problem, _ in error.failures.values()]
        raise CheckpointError(f"{directory} cannot be read: {problem}") from error
    except Exception as error:  # torch.load may raise anything
        raise CheckpointError(f"{directory} cannot be read: {' '.join(str(error).split())[:500]}") from error
    return _renamed(tensors, start), _renamed(others, start)


def _renamed(values: Mapping[str, Any], start: str) -> dict[str, Any]:
    return {name.removeprefix(start): value for name, value in values.items()}


def _check_room(to: Path, size: int) -> None:
    free = space_left(to.parent).bytes
    if size + _HEADER_BYTES > free:
        raise CheckpointError(f"{to} needs {size} bytes, but only {free} are free in {to.parent}; choose another place")


def _write_durably(to: Path, source: _Source, run_id: str, *, force: bool) -> None:
    """Write a file next to ``to``, and rename it once it is durable. Only its owner can read it.

    Raises CheckpointError if that fails, UserError if ``to`` was created meanwhile.
    """
    temporary = to.with_name(f".{to.name}.{os.urandom(4).hex()}.tmp")
    try:
        # A new one: in a directory that others can write to, a file or link with this name may be theirs.
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))
        if to.suffix == ".pt":
            import torch

            # torch.load(weights_only=True) accepts it: the saver refuses any other state.
            with temporary.open("wb") as file:
                torch.save({**source.tensors, **source.others}, file)
        else:
            _write_safetensors(temporary, source, run_id)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        # Again: writing may take minutes, and a rename would replace what has appeared meanwhile.
        _check_target(to, force=force)
        temporary.replace(to)
        fsync_directory(to.parent)
    except OSError as error:
        raise CheckpointError(f"{to} cannot be written: {describe_os_error(error)}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _write_safetensors(path: Path, source: _Source, run_id: str) -> None:
    """Its metadata says where it comes from. Raises CheckpointError for number types that the format lacks."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        about = {"run": run_id, "step": str(source.step), "object": source.module}
        save_file(dict(source.tensors), path, {"format": "pt", "slurmtrain": __version__, **about})
    except KeyError as error:
        raise CheckpointError(f"safetensors cannot store numbers of type {error}; export to a .pt file") from error
    except SafetensorError as error:
        # It wraps errors of writing, such as a full disk, which the caller puts into words.
        raise OSError(str(error)) from error


# --- a model in the registry of MLflow --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Registered:
    """A version of a model in the registry of an MLflow ``store``, with the file that was ``exported``."""

    exported: Exported
    name: str
    version: str
    store: str

    @property
    def uri(self) -> str:
        """Its URI for MLflow's tools."""
        return f"models:/{self.name}/{self.version}"

    def to_dict(self) -> dict[str, Any]:
        """What ``export --register --json`` prints."""
        registered = {"name": self.name, "version": self.version, "uri": self.uri, "store": self.store}
        return {**self.exported.to_dict(), "registered": registered}


def export_registered(
    workspace: Workspace, run_id: str, request: ExportRequest, name: str, show: ShowProgress = lambda *_: None
) -> Registered:
    """Export a model, and register the file in the MLflow store of its run.

    Args:
        workspace: Where the run is.
        run_id: The run.
        request: What to export, and where to.
        name: The name of the model in the registry.
        show: Called with the progress of verifying.

    Raises:
        UserError: The run is not shown in MLflow, or the request cannot be met.
        CheckpointError: As :func:`export` does.
        TrackingError: The store cannot be reached, or takes no models.
        LockHeld: Another command sends for too long.
    """
    from slurmtrain.ops.shared.mirroring import RunSender, Trackers
    from slurmtrain.tracking.to_mlflow.mlflow_tracker import MlflowTracker

    run = observe_run(workspace, run_id, ask_slurm=False)
    plan = current_plan(workspace.root.run(run_id), run)
    target = next((target for target in targets_of(workspace, plan) if target.name == MLFLOW), None)
    if target is None:
        raise UserError(f"run {run_id} is not shown in MLflow (tracking.mlflow.enabled is false in its spec)")
    tracker = Trackers(workspace).open(target)
    assert isinstance(tracker, MlflowTracker)
    # Before a model is exported, which may take long.
    with locked(workspace.root.tracking_lock):
        mlflow_id = RunSender(workspace, run_id, plan).begin(tracker, target.name)
    tracker.ensure_model(name)
    exported = export(workspace, run_id, request, show)
    try:
        digest = str(read_manifest(exported.checkpoint).to_json()["xxh3_128"])
    except CheckpointError:
        # A checkpoint of the script itself has no manifest: the file stands for it.
        hasher = new_hasher()
        with exported.to.open("rb") as file:
            while chunk := file.read(_CHUNK):
                hasher.update(chunk)
        digest = hasher.hexdigest()
    tags = {
        "slurmtrain.run_id": run_id,
        "slurmtrain.step": str(exported.step),
        "slurmtrain.object": exported.object,
        "slurmtrain.checkpoint": str(exported.checkpoint),
        "slurmtrain.format": exported.to.suffix,
        "slurmtrain.hash": f"xxh3_128:{digest}",
    }
    return Registered(exported, name, tracker.register(mlflow_id, exported.to, name, tags), tracker.uri)


# --- the command -----------------------------------------------------------------------------------------------------


@options.command("export digits --to model.safetensors")
@options.run_argument
@click.option(
    "--to", metavar="FILE", type=click.Path(path_type=Path), required=True,
    help="The file; its suffix, .safetensors or .pt, selects the format.",
)  # fmt: skip
@click.option("--step", metavar="N", type=click.IntRange(min=0), help="The checkpoint; by default the newest.")
@click.option(
    "--object", "name", metavar="NAME",
    help="The module, by its name in run.checkpoint(); required if there are several.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@click.option(
    "--register", "model", metavar="MODEL",
    help="Register the file in MLflow as a new version of MODEL, with the run's id, step and hash.",
)  # fmt: skip
@options.json_option
def export_command(
    workspace: Workspace, run: str, to: Path, step: int | None, name: str | None, force: bool, model: str | None,
    as_json: bool,
) -> int:  # fmt: skip
    """Write a module of a checkpoint of RUN to one file, which loads without slurmtrain, on any number of processes.

    Names are as in the module's own state_dict. The export needs as much memory as the module.
    """
    from slurmtrain.ops.shared.find import find

    [run_id], _ = find(workspace, [run], ask_slurm=False)
    with tables.byte_progress() as show_bytes:
        request = ExportRequest(to=to, step=step, object=name, force=force)
        registered = export_registered(workspace, run_id, request, model, show_bytes) if model else None
        exported = registered.exported if registered else export(workspace, run_id, request, show_bytes)
    if exported.left_out:
        output.warn(
            [f"left out, because a .safetensors file can only hold dense tensors: {', '.join(exported.left_out)}"]
        )
    if as_json:
        output.print_json((registered or exported).to_dict())
    else:
        output.verbatim(str(exported.to))
        amount = f"{exported.tensors} tensors, {formatting.size(exported.bytes)}"
        output.echo(f"{exported.object!r} of step {exported.step}: {amount}", err=True)
        if registered:
            output.echo(f"registered in MLflow as {registered.uri}", err=True)
    return 0
