"""Checkpoints that transformers, accelerate, Lightning and torch wrote themselves, on two processes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.rare import THOROUGH

from slurmtrain.runtime.checkpoint.external import ExternalCheckpoint, Search, find_all
from slurmtrain.runtime.checkpoint.formats.lookup import read_contents

Saved = Callable[..., Path]


@dataclass(frozen=True)
class Kind:
    """A kind of checkpoint: the script and its arguments, the pattern of its names, its format, its newest step."""

    trainer: str
    arguments: tuple[str, ...]
    pattern: str
    format: str
    step: int | None


KINDS = {
    "hf": Kind("hf", (), "checkpoint-*", "hf", 9),
    # Without its arguments nothing says that the Trainer saves the model alone.
    "hf-only-model": Kind("hf", ("only",), "checkpoint-*", "hf", 9),
    "accelerate": Kind("accelerate", (), "checkpoints/*", "accelerate", None),
    "lightning": Kind("lightning", ("ddp",), "*.ckpt", "lightning", 9),
    "lightning-sharded": Kind("lightning", ("sharded",), "*.ckpt", "lightning", 9),
}


# These two are the smallest, and other tests of this file need them too.
@pytest.fixture(params=KINDS if THOROUGH else ("hf", "accelerate"))
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def found_in(directory: Path, kind: Kind, ranks: int = 2) -> list[ExternalCheckpoint]:
    return find_all(Search(pattern=str(directory / kind.pattern), ranks=ranks if kind.arguments != ("only",) else 1))


def files_of(path: Path) -> list[Path]:
    return [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]


def test_what_a_trainer_saved_is_complete_and_its_format_and_step_are_recognized(saved: Saved, kind: Kind) -> None:
    checkpoints = found_in(saved(kind.trainer, *kind.arguments), kind)
    assert {(each.format, each.problem) for each in checkpoints} == {(kind.format, None)}
    assert checkpoints[0].step == kind.step
    assert len({each.fingerprint() for each in checkpoints}) == len(checkpoints)


def damaged(path: Path) -> Iterator[tuple[str, Path]]:
    """The checkpoint at ``path`` with each of its files gone, emptied, cut to one byte, cut in half, cut by a byte."""
    for file in files_of(path):
        content, name = file.read_bytes(), file.relative_to(path).as_posix() if path.is_dir() else path.name
        # The line break after JSON does not matter.
        last = len(content.rstrip()) - 1 if name.endswith(".json") else len(content) - 1
        if path.is_dir():
            file.unlink()
            yield f"without {name}", path
        for length in sorted({0, 1, len(content) // 2, last}):
            file.write_bytes(content[:length])
            yield f"{name} cut to {length} of {len(content)} bytes", path
        file.write_bytes(content)


def test_a_checkpoint_with_any_file_missing_or_cut_off_is_never_handed_over(
    saved: Saved, kind: Kind, tmp_path: Path
) -> None:
    made = found_in(saved(kind.trainer, *kind.arguments), kind)
    # With one other to compare it with, as after a second save.
    newest, before = made[0].path, made[-1].path
    copies = tmp_path / made[0].path.relative_to(saved(kind.trainer, *kind.arguments)).parent
    for path in (newest, before):
        shutil.copytree(path, copies / path.name) if path.is_dir() else shutil.copy2(path, copies / path.name)
    wrong = [
        what
        for what, path in damaged(copies / newest.name)
        for each in found_in(tmp_path, kind)
        if each.path == path and each.complete
    ]
    assert wrong == []
    assert all(each.complete for each in found_in(tmp_path, kind))


def test_a_copy_has_the_same_fingerprint_and_a_changed_byte_another(saved: Saved, kind: Kind, tmp_path: Path) -> None:
    original = found_in(saved(kind.trainer, *kind.arguments), kind)[0].path
    copy = tmp_path / original.name
    shutil.copytree(original, copy) if original.is_dir() else shutil.copyfile(original, copy)
    search = Search(pattern=str(tmp_path / "*"), ranks=1)
    [before] = find_all(search)
    [source] = find_all(Search(pattern=str(original).replace("[", "[[]"), ranks=1))
    assert before.fingerprint() == source.fingerprint()
    file = max(files_of(copy), key=lambda each: each.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert before.fingerprint() != source.fingerprint()


def test_contents_have_weights_and_optimizer_but_no_paths_or_times(saved: Saved, kind: Kind) -> None:
    directory = saved(kind.trainer, *kind.arguments)
    contents = read_contents(found_in(directory, kind)[0].path)
    values = {name: read() for name, read in contents.items()}
    assert sum(isinstance(value, torch.Tensor) for value in values.values()) >= 2
    assert any("exp_avg" in name for name in values) == (kind.arguments != ("only",))
    assert not [name for name, value in values.items() if isinstance(value, str) and str(directory) in value]
    assert list(contents) == sorted(contents)


def test_a_registered_object_that_only_the_newest_lacks_was_cut_off(saved: Saved, tmp_path: Path) -> None:
    made = found_in(saved("accelerate"), KINDS["accelerate"])
    for each in made:
        shutil.copytree(each.path, tmp_path / "checkpoints" / each.path.name)
    (tmp_path / "checkpoints" / made[0].path.name / "custom_checkpoint_0.pkl").unlink()
    newest, before = found_in(tmp_path, KINDS["accelerate"])
    assert newest.problem == "custom_checkpoint_0.pkl is missing, which the others have"
    assert before.complete
    # The script has stopped saving it.
    (before.path / "custom_checkpoint_0.pkl").unlink()
    assert all(each.complete for each in found_in(tmp_path, KINDS["accelerate"]))


def test_the_sentinel_of_a_jit_checkpoint_means_that_it_is_being_written(saved: Saved, tmp_path: Path) -> None:
    shutil.copytree(saved("hf") / "checkpoint-9", tmp_path / "checkpoint-9")
    (tmp_path / "checkpoint-9" / "checkpoint-is-incomplete.txt").write_text("")
    [checkpoint] = found_in(tmp_path, KINDS["hf"])
    assert checkpoint.problem == "it has checkpoint-is-incomplete.txt"


def test_a_directory_whose_save_has_only_begun_is_judged_as_its_neighbours(saved: Saved, tmp_path: Path) -> None:
    for trainer, pattern in (("hf", "checkpoint-*"), ("accelerate", "checkpoints/*")):
        source = saved(trainer)
        names = sorted(path.relative_to(source) for path in source.glob(pattern))
        place = tmp_path / trainer
        shutil.copytree(source / names[0], place / "saved-1")
        (place / "saved-2").mkdir()
        shutil.copy2(source / names[1] / "model.safetensors", place / "saved-2" / "model.safetensors")
        checkpoints = {each.path.name: each for each in find_all(Search(pattern=str(place / "*")))}
        assert (checkpoints["saved-1"].complete, checkpoints["saved-2"].complete) == (True, False)
        assert checkpoints["saved-1"].format == checkpoints["saved-2"].format


def test_a_nested_directory_of_fsdp_without_its_index_is_incomplete(saved: Saved, tmp_path: Path) -> None:
    place = tmp_path / "checkpoint-9"
    shutil.copytree(saved("hf") / "checkpoint-9", place)
    (place / "model.safetensors").unlink()
    dcp.save({"model": {"w": torch.arange(6.0)}}, checkpoint_id=place / "pytorch_model_fsdp_0", no_dist=True)
    [checkpoint] = found_in(tmp_path, KINDS["hf"])
    assert checkpoint.complete
    (place / "pytorch_model_fsdp_0" / ".metadata").unlink()
    [checkpoint] = found_in(tmp_path, KINDS["hf"])
    assert checkpoint.problem == "in pytorch_model_fsdp_0, it has no .metadata"
