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

from slurmtrain.runtime.checkpoint.external import (
    ExternalCheckpoint,
    Search,
    find_checkpoints,
    find_modules,
    read_contents,
)

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
    return find_checkpoints(
        Search(pattern=str(directory / kind.pattern), ranks=ranks if kind.arguments != ("only",) else 1)
    )


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
    assert newest.problem == "custom_checkpoint_0.pkl is missing, but the other checkpoints have it"
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
        checkpoints = {each.path.name: each for each in find_checkpoints(Search(pattern=str(place / "*")))}
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


STAGES = (0, 1, 3)


def save(directory: Path, step: int, stage: int, ranks: int = 2) -> Path:
    """A tag as ``ranks`` ranks save it; stage 3 also divides the weights."""
    tag = directory / f"global_step{step}"
    tag.mkdir(parents=True)
    state = {
        "module": {"0.weight": torch.ones(4)},
        "optimizer": None if stage else {"state": {0: torch.ones(4)}},
        "global_steps": step,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": stage}, "path": str(directory)},
        "ds_version": "0.19.8",
    }
    for rank in range(ranks):
        start = f"zero_pp_rank_{rank}_" if stage == 3 else ""
        if stage == 3 or rank == 0:
            torch.save(state, tag / f"{start}mp_rank_00_model_states.pt")
        if stage:
            torch.save(
                {"optimizer_state_dict": {0: torch.ones(2)}}, tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            )
    (directory / "latest").write_text(tag.name)
    return tag


def find(directory: Path, pattern: str = "global_step*") -> list[ExternalCheckpoint]:
    return find_checkpoints(Search(pattern=str(directory / pattern) if pattern else str(directory), ranks=2))


def damage_files_of(tag: Path) -> Iterator[str]:
    for file in sorted(tag.iterdir()):
        content = file.read_bytes()
        file.unlink()
        yield f"without {file.name}"
        for length in (0, 1, len(content) // 2, len(content) - 1):
            file.write_bytes(content[:length])
            yield f"{file.name} cut to {length}"
        file.write_bytes(content)


@pytest.mark.parametrize("stage", STAGES)
def test_a_tag_with_any_file_missing_or_cut_off_gives_way_to_the_one_before(tmp_path: Path, stage: int) -> None:
    save(tmp_path, 3, stage)
    tag = save(tmp_path, 6, stage)
    assert [(each.format, each.step, each.complete) for each in find(tmp_path)] == [
        ("deepspeed", 6, True), ("deepspeed", 3, True),
    ]  # fmt: skip
    wrong = [what for what in damage_files_of(tag) if [each.step for each in find(tmp_path) if each.complete] != [3]]
    assert wrong == []


@pytest.mark.parametrize("latest", ["", "global_step6", "global_step9", None])
def test_the_directory_of_tags_is_searched_whatever_its_file_latest_says(tmp_path: Path, latest: str | None) -> None:
    """Rank 0 writes ``latest`` before the other ranks have finished."""
    save(tmp_path, 3, 1)
    (save(tmp_path, 6, 1) / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    (tmp_path / "latest").unlink() if latest is None else (tmp_path / "latest").write_text(latest)
    checkpoints = find(tmp_path, "")
    assert {each.path.name: each.complete for each in checkpoints} == {"global_step6": False, "global_step3": True}
    problem = next(each.problem for each in checkpoints if not each.complete)
    assert problem == "zero_pp_rank_1_mp_rank_00_optim_states.pt is missing"


def test_a_directory_that_another_trainer_has_filled_by_deepspeed_is_judged_as_a_whole(tmp_path: Path) -> None:
    place = tmp_path / "checkpoint-6"
    save(place, 6, 3)
    for rank in range(2):
        torch.save({}, place / f"rng_state_{rank}.pth")
    (place / "trainer_state.json").write_text('{"global_step": 6}')
    [checkpoint] = find(tmp_path, "checkpoint-*")
    assert (checkpoint.format, checkpoint.step, checkpoint.problem) == ("hf", 6, None)
    (place / "global_step6" / "zero_pp_rank_1_mp_rank_00_model_states.pt").write_bytes(b"")
    [checkpoint] = find(tmp_path, "checkpoint-*")
    assert checkpoint.problem == "in global_step6, zero_pp_rank_1_mp_rank_00_model_states.pt is empty"


def test_only_weights_that_one_file_holds_are_a_module(tmp_path: Path) -> None:
    for stage in STAGES:
        contents = read_contents(save(tmp_path / str(stage), 6, stage))
        assert find_modules("deepspeed", contents) == ([] if stage == 3 else ["module"])
        assert not [name for name in contents if "ds_config" in name]
        shutil.rmtree(tmp_path / str(stage))
