"""Checkpoints that somebody forged: nothing in them runs."""

from __future__ import annotations

import contextlib
import io
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from helpers.ranks import Attempt, alone
from helpers.small_model import Evil, Value, model, restore_alone
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from slurmtrain.errors import CheckpointError
from slurmtrain.runtime.checkpoint import checkpoint_files
from slurmtrain.runtime.checkpoint.shard_plan import _info
from slurmtrain.runtime.checkpoint.torch_index import Index
from slurmtrain.system.files import write_json

MANIFEST = "MANIFEST.json"


def forge(directory: Path, name: str, content: bytes) -> None:
    """Put content into a checkpoint's file, and make its manifest say so."""
    manifest = checkpoint_files.read_manifest(directory)
    (directory / name).write_bytes(content)
    entries = {**manifest.files, name: (len(content), xxhash.xxh3_128(content).hexdigest())}
    write_json(directory / MANIFEST, replace(manifest, files=entries).to_json())


def index_of(directory: Path) -> Metadata:
    loaded: Metadata = pickle.loads((directory / ".metadata").read_bytes())
    return loaded


@pytest.fixture
def target(run: Path) -> Path:
    """A checkpoint, with no other to fall back to."""
    checkpoint_files.delete_checkpoint(run / "checkpoints" / "step-1")
    return run / "checkpoints" / "step-2"


def refused(run: Path, marker: Path, **objects: Any) -> str:
    """Restoring fails, and nothing of the forgery has run; the error."""
    objects = objects or {"model": model(), "own": Value(None)}
    with Attempt(run, alone(), objects, restart=1) as attempt, pytest.raises(CheckpointError) as error:
        attempt.restore()
    assert not marker.exists()
    return str(error.value)


def test_an_index_that_would_run_something_is_refused_and_does_not(run: Path, target: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    forge(target, ".metadata", pickle.dumps(Evil(marker)))
    assert "not an index of a checkpoint" in refused(run, marker)
    pickle.loads(pickle.dumps(Evil(marker)))
    assert marker.exists(), "the test is of no use"


def test_an_index_that_would_run_something_is_passed_over_for_the_checkpoint_before(run: Path, tmp_path: Path) -> None:
    forge(run / "checkpoints" / "step-2", ".metadata", pickle.dumps(Evil(tmp_path / "marker")))
    step, [rejected], _ = restore_alone(run)
    assert step == 1
    assert "not an index of a checkpoint" in rejected["reason"]
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("field", ["planner_data", "storage_data", "state_dict_metadata", "storage_meta", "version"])
def test_something_that_would_run_within_an_index_does_not(run: Path, target: Path, tmp_path: Path, field: str) -> None:
    marker = tmp_path / "marker"
    index = index_of(target)
    setattr(index, field, Evil(marker))
    forge(target, ".metadata", pickle.dumps(index))
    assert "is not allowed in it" in refused(run, marker)


@pytest.mark.parametrize(
    "content",
    [
        b"cbuiltins\neval\n(V1\ntR.",
        b"ctorch\nload\n(V/etc/passwd\ntR.",
        b"ctorch.serialization\nload\n.",
        b"ctorch\nSize\n(cbuiltins\nprint\ntR.",
        b"cbuiltins\ngetattr\n(ctorch\nSize\nVmro\ntR.",
        b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nVmro\ntR.",
        b"ctorch\n_C\n.",
        b"",
        b".",
        b"\x80\x04N.",
        b"\x80\x05" + b"(" * 10_000,
        b"\x80\x04\x95" + b"\xff" * 8 + b".",
    ],
)
def test_a_pickle_of_another_kind_is_no_index(run: Path, target: Path, tmp_path: Path, content: bytes) -> None:
    forge(target, ".metadata", content)
    assert "not an index of a checkpoint" in refused(run, tmp_path / "marker")


def test_an_enumeration_is_read_as_other_versions_of_python_pickle_it(run: Path, target: Path) -> None:
    class Pickler(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, metadata._MEM_FORMAT_ENCODING):
                return getattr, (metadata._MEM_FORMAT_ENCODING, obj.name)
            return NotImplemented

    content = io.BytesIO()
    Pickler(content).dump(index_of(target))
    assert b"getattr" in content.getvalue()
    forge(target, ".metadata", content.getvalue())
    assert restore_alone(run)[0] == 2


def test_an_index_that_leads_out_of_the_checkpoint_is_refused(run: Path, target: Path, tmp_path: Path) -> None:
    index = index_of(target)
    for key, info in index.storage_data.items():
        index.storage_data[key] = type(info)("../../../" + info.relative_path, info.offset, info.length)
    forge(target, ".metadata", pickle.dumps(index))
    assert "it points to" in refused(run, tmp_path / "marker")


def put(directory: Path, name: str, content: bytes) -> None:
    """Have the index say that something lies behind everything else in rank 0's file."""
    index, file = index_of(directory), directory / "__0_0.distcp"
    before = file.read_bytes()
    index.storage_data[MetadataIndex(name)] = _info(0, len(before), len(content))
    index.state_dict_metadata[name] = BytesStorageMetadata()
    forge(directory, "__0_0.distcp", before + content)
    forge(directory, ".metadata", pickle.dumps(index))


def saved(value: Any, tmp_path: Path) -> bytes:
    torch.save(value, tmp_path / "value")
    return (tmp_path / "value").read_bytes()


@pytest.mark.parametrize("name", ["shared", "ranks.0", "ranks.1"])
@pytest.mark.parametrize("form", ["torch", "pickle"])
def test_a_value_that_would_run_something_is_refused_and_does_not(
    run: Path, target: Path, tmp_path: Path, name: str, form: str
) -> None:
    marker = tmp_path / "marker"
    put(target, name, saved(Evil(marker), tmp_path) if form == "torch" else pickle.dumps(Evil(marker)))
    assert "weights_only" in refused(run, marker) or "Unpickling" in refused(run, marker)


@pytest.mark.parametrize("name", ["model.0.weight", "optimizer.state.model.0.weight.exp_avg"])
def test_a_tensor_that_the_index_calls_a_value_does_not_run(saved_by_two: Path, tmp_path: Path, name: str) -> None:
    """torch.distributed.checkpoint itself would unpickle it with nothing forbidden."""
    marker, run = tmp_path / "marker", tmp_path / "run"
    module = model(1)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 40)).sum().backward()
    optimizer.step()
    with Attempt(run, alone(), {"model": module, "optimizer": optimizer}) as attempt:
        assert attempt.save(1) == ""
    put(run / "checkpoints" / "step-1", name, saved(Evil(marker), tmp_path))
    other = model(2)
    objects = {"model": other, "optimizer": torch.optim.AdamW(other.parameters())}
    # A state of an optimizer may be missing, a parameter may not.
    refuses = contextlib.nullcontext() if name.startswith("optimizer") else pytest.raises(CheckpointError)
    with Attempt(run, alone(), objects, restart=1) as attempt, refuses:
        attempt.restore()
    assert not marker.exists()


def test_a_tensor_whose_bytes_would_run_something_does_not(run: Path, target: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    index, file = index_of(target), target / "__0_0.distcp"
    before, evil = file.read_bytes(), saved(Evil(marker), tmp_path)
    for key in index.storage_data:
        if key.fqn.startswith("model."):
            index.storage_data[key] = _info(0, len(before), len(evil))
    forge(target, "__0_0.distcp", before + evil)
    forge(target, ".metadata", pickle.dumps(index))
    assert "it cannot be read" in refused(run, marker)
    assert not marker.exists()


METADATA = "torch.distributed.checkpoint.metadata"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        # Sets attributes on classes that an index consists of.
        (f"c{METADATA}\nMetadata\n}}Vstorage_data\nNsb.".encode(), "attributes of a Global"),
        (f"c{METADATA}\n_MEM_FORMAT_ENCODING\n(N}}V_member_map_\nNstb.".encode(), "attributes of a Global"),
        (b"ctorch\nSize\n}Vx\nNsb.", "attributes of a Global"),
        # Calls classes that an index consists of, with arguments of its own choice.
        (f"c{METADATA}\nMetadata\n(NtR.".encode(), "something other than a Metadata"),
        # Sets attributes that are no fields.
        (f"c{METADATA}\nMetadata\n)R}}V__class__\nNsb.".encode(), "other attributes: \\['__class__'\\]"),
        (f"c{METADATA}\nMetadata\n)R(Va\nVb\ntb.".encode(), "other attributes"),
        (f"c{METADATA}\nMetadata\n)RVabc\nb.".encode(), "other attributes"),
        (f"c{METADATA}\nMetadata\n)R}}Vstate_dict_metadata\n]sVstorage_data\n}}sb.".encode(), "than a dictionary"),
        (f"c{METADATA}\nMetadata\n)R}}Vstate_dict_metadata\n}}sb.".encode(), "storage_data"),
        (
            f"c{METADATA}\nMetadata\n)R}}Vstate_dict_metadata\n}}Vw\nctorch\nSize\nssVstorage_data\n}}sb.".encode(),
            "something other than a value",
        ),
        (
            f"c{METADATA}\nMetadata\n)R}}Vstate_dict_metadata\n}}Vw\nNssVstorage_data\n}}sb.".encode(),
            "something other than a TensorStorageMetadata",
        ),
    ],
)
def test_an_index_of_other_objects_or_fields_is_refused(
    run: Path, target: Path, tmp_path: Path, content: bytes, why: str
) -> None:
    forge(target, ".metadata", content)
    message = refused(run, tmp_path / "marker")
    assert "not an index of a checkpoint" in message
    assert re.search(why, message)
    assert metadata._MEM_FORMAT_ENCODING["TORCH_CONTIGUOUS_FORMAT"].value == 0


def test_an_index_is_read_as_torch_wrote_it(run: Path, target: Path) -> None:
    written, index = index_of(target), Index(target).metadata
    assert index.state_dict_metadata == written.state_dict_metadata
    assert index.storage_data == written.storage_data
    properties = [each.properties for each in index.state_dict_metadata.values() if hasattr(each, "properties")]
    assert {each.memory_format for each in properties} == {torch.contiguous_format}
