"""Files of torch.save and of safetensors, and directories of torch.distributed.checkpoint."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from slurmtrain.errors import CheckpointError
from slurmtrain.runtime.checkpoint.external import ExternalCheckpoint, Search, find_checkpoints, read_contents
from slurmtrain.runtime.checkpoint.untrusted_files import read_plain

WEIGHTS = {"w": torch.arange(6.0), "b": torch.ones(2, 3)}


def look_at(path: Path, **search: Any) -> ExternalCheckpoint:
    [checkpoint] = find_checkpoints(Search(pattern=str(path), **search))
    return checkpoint


def cut(path: Path, length: int) -> Path:
    path.write_bytes(path.read_bytes()[:length])
    return path


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("archive") / "a.pt"
    torch.save({"model": WEIGHTS, "step": 7}, path)
    return path.read_bytes()


@given(st.data())
@settings(max_examples=60)
def test_an_archive_is_complete_only_to_its_last_byte(
    archive: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("cut") / "a.pt"
    path.write_bytes(archive[: data.draw(st.integers(0, len(archive) - 1))])
    assert not look_at(path).complete
    # Bytes from its middle are missing: the end is there, and says where they should be.
    begin = data.draw(st.integers(2, len(archive) - 200))
    path.write_bytes(archive[:begin] + archive[begin + data.draw(st.integers(1, 150)) :])
    assert not look_at(path).complete
    path.write_bytes(archive)
    assert (look_at(path).complete, look_at(path).step) == (True, 7)


def test_a_file_of_zeros_as_a_crashed_machine_leaves_it_is_not_complete(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(bytes(5000))
    assert look_at(tmp_path / "a.pt").problem == "a.pt is incomplete: it begins with zeros"


def test_a_file_of_before_archives_is_complete(tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "step-3.pt", _use_new_zipfile_serialization=False)
    checkpoint = look_at(tmp_path / "step-3.pt")
    assert (checkpoint.format, checkpoint.step, checkpoint.complete) == ("torch", 3, True)
    assert sorted(read_contents(checkpoint.path)) == ["b", "w"]


def test_a_pattern_of_the_spec_decides_about_the_step(tmp_path: Path) -> None:
    torch.save({"step": 7}, tmp_path / "part-12-of-30.pt")
    assert look_at(tmp_path / "part-12-of-30.pt").step == 7
    assert look_at(tmp_path / "part-12-of-30.pt", step=r"part-(\d+)-of").step == 12
    assert look_at(tmp_path / "part-12-of-30.pt", step=r"epoch-(\d+)").step is None


def test_a_safetensors_file_is_complete_only_to_its_last_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file(WEIGHTS, path, {"global_step": "9"})
    assert (look_at(path).complete, look_at(path).step, look_at(path).format) == (True, 9, "safetensors")
    content = path.read_bytes()
    for length in (0, 4, 8, 50, len(content) - 1):
        path.write_bytes(content[:length])
        assert not look_at(path).complete
    path.write_bytes(content + b"x")
    assert not look_at(path).complete


@pytest.mark.parametrize(
    "header", [b"[1]", b"{", b'{"w": 1}', b'{"w": {"data_offsets": []}}', b'{"w": {"data_offsets": [4, 8]}}']
)
def test_a_safetensors_file_with_a_damaged_header_is_not_complete(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    assert not look_at(tmp_path / "a.safetensors").complete


def test_sharded_weights_need_every_shard_and_their_index(tmp_path: Path) -> None:
    place = tmp_path / "step-5"
    place.mkdir()
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name, (key, tensor) in zip(names, WEIGHTS.items(), strict=True):
        save_file({key: tensor}, place / name)
    assert look_at(place).problem == "model.safetensors.index.json is missing"
    index = place / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict(zip(WEIGHTS, names, strict=True))}))
    assert look_at(place).complete
    (place / names[1]).unlink()
    assert look_at(place).problem == f"{names[1]} is missing"
    index.write_text("{")
    assert look_at(place).problem == "model.safetensors.index.json is incomplete"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_needs_all_that_its_index_names(tmp_path: Path) -> None:
    place = tmp_path / "epoch-2"
    dcp.save({"model": WEIGHTS, "step": 40}, checkpoint_id=place)
    assert (look_at(place).format, look_at(place).step, look_at(place).complete) == ("dcp", 40, True)
    assert {name: read() for name, read in read_contents(place).items() if name == "step"} == {"step": 40}
    for name in sorted(each.name for each in place.iterdir()):
        content = (place / name).read_bytes()
        for length in (0, 1, len(content) // 2, len(content) - 1):
            cut(place / name, length)
            assert not look_at(place).complete, (name, length)
            (place / name).write_bytes(content)
        (place / name).unlink()
        assert not look_at(place).complete, name
        (place / name).write_bytes(content)
    assert look_at(place).complete


def test_a_temporary_file_of_a_save_that_was_repeated_since_does_not_matter(tmp_path: Path) -> None:
    place = tmp_path / "step-5"
    place.mkdir()
    (place / ".tmpAbC123").write_bytes(b"x")
    os.utime(place / ".tmpAbC123", (1000, 1000))
    torch.save(WEIGHTS, place / "model.pt")
    assert look_at(place).complete
    os.utime(place / ".tmpAbC123")
    os.utime(place / "model.pt", (1000, 1000))
    assert look_at(place).problem == ".tmpAbC123 is still being written"


# --- identity ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_a_small_part_that_trains_changes_the_fingerprint_of_a_large_frozen_model(tmp_path: Path, ending: str) -> None:
    """The change is far from both ends, and too small for samples of the file to hit it."""
    path = tmp_path / f"a.{ending}"
    model = {f"frozen{number}": torch.zeros(200_000) for number in range(4)}
    model = {**model, "adapter": torch.zeros(8), "last": torch.zeros(200_000)}
    fingerprints = set()
    for value in (1.0, 2.0):
        model["adapter"][3] = value
        torch.save(model, path) if ending == "pt" else save_file(model, path)
        fingerprints.add(look_at(path).fingerprint())
    assert len(fingerprints) == 2


def test_what_was_saved_again_with_the_same_content_has_the_same_fingerprint(tmp_path: Path) -> None:
    fingerprints = set()
    for _ in range(2):
        torch.save({"model": WEIGHTS, "step": 7}, tmp_path / "last.pt")
        fingerprints.add(look_at(tmp_path / "last.pt").fingerprint())
    assert len(fingerprints) == 1


# --- what may be planted in a checkpoint ------------------------------------------------------------------------------


class Planted:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def test_nothing_that_a_pickle_names_is_executed(tmp_path: Path) -> None:
    planted = Planted(f"touch {tmp_path / 'executed'}")
    torch.save({"step": 7, "x": planted}, tmp_path / "a.pt")
    assert (look_at(tmp_path / "a.pt").step, look_at(tmp_path / "a.pt").complete) == (7, True)
    assert read_plain(pickle.dumps({"x": planted, "step": 7}), "x")["step"] == 7
    with pytest.raises(CheckpointError):
        read_contents(tmp_path / "a.pt")
    assert not (tmp_path / "executed").exists()


def test_objects_of_classes_that_are_not_allowed_are_left_out_of_the_contents(tmp_path: Path) -> None:
    torch.save({"model": WEIGHTS, "place": tmp_path, "rng": torch.ones(3), "train_runtime": 3.5}, tmp_path / "a.pt")
    assert sorted(read_contents(tmp_path / "a.pt")) == ["model.b", "model.w"]
