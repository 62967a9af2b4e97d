"""Checkpoints in the layout of DeepSpeed 0.19: names of files and keys are those that its engine wrote."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slurmtrain.runtime.checkpoint.external import ExternalCheckpoint, Search, find_all
from slurmtrain.runtime.checkpoint.formats.lookup import find_modules, read_contents

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
    return find_all(Search(pattern=str(directory / pattern) if pattern else str(directory), ranks=2))


def damaged(tag: Path) -> Iterator[str]:
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
    wrong = [what for what in damaged(tag) if [each.step for each in find(tmp_path) if each.complete] != [3]]
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
