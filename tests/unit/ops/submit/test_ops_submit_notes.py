"""Notes on what may go wrong with new runs: files, results that two runs would write to one place, the runs root."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.submit import load
from slurmtrain.ops.submit import notes as notes_module
from slurmtrain.ops.submit.notes import notes_on
from slurmtrain.system.locks import Mount

SPEC = "name: x\ncommand: {command}\nparams: {{a: 1}}\n"


def notes(workspace: Workspace, spec: Path, command: str, *, sweep: str = "", more: str = "") -> list[str]:
    """The notes on submitting this command here."""
    spec.write_text(SPEC.format(command=command) + more)
    runs = load(spec, (), [sweep] if sweep else ()).runs
    return notes_on(workspace, [planned.plan for planned in runs], "local")


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_file_that_the_command_names_and_that_is_not_there_is_noted(workspace: Workspace, spec: Path) -> None:
    command = "bash -c pass --data data/train.bin --config here.yaml --out out.json"
    (spec.parent / "here.yaml").touch()
    assert notes(workspace, spec, command) == [
        f"the command names a file that does not exist: {spec.parent}/data/train.bin (--data data/train.bin)"
    ]


@pytest.mark.parametrize("more", ["setup: [make data]\n", "slurm: {container: x}\n"])
def test_a_file_that_may_be_elsewhere_is_not_missed(workspace: Workspace, spec: Path, more: str) -> None:
    assert notes(workspace, spec, "bash -c pass --data data/train.bin", more=more) == []


def test_a_note_on_several_runs_is_one_line_with_their_number(workspace: Workspace, spec: Path) -> None:
    command = "bash -c pass --data ${params.a}.bin --config none.yaml"
    (spec.parent / "2.bin").touch()
    missing = "the command names a file that does not exist"
    assert notes(workspace, spec, command, sweep="params.a=1,2,3") == [
        f"2 of 3 runs: {missing}: {spec.parent}/1.bin (--data 1.bin), and 1 more like it",
        f"3 runs: {missing}: {spec.parent}/none.yaml (--config none.yaml)",
    ]


# --- results ----------------------------------------------------------------------------------------------------------


def test_a_sweep_whose_runs_write_to_one_directory_is_noted_once(workspace: Workspace, spec: Path) -> None:
    command = "bash -c pass --output_dir out --lr ${params.a}"
    expected = ["3 runs write to the same --output_dir out; '{run_dir}/out' keeps them apart"]
    assert notes(workspace, spec, command, sweep="params.a=1,2,3") == expected
    inside = "checkpoint: {glob: 'out/checkpoint-*'}\n"
    assert notes(workspace, spec, command, sweep="params.a=1,2,3", more=inside) == expected


@pytest.mark.parametrize("place", ["out/${params.a}", "{run_dir}/out", "{checkpoint_dir}"])
def test_a_sweep_whose_runs_are_kept_apart_is_not_noted(workspace: Workspace, spec: Path, place: str) -> None:
    assert notes(workspace, spec, f"bash -c pass --output_dir {place}", sweep="params.a=1,2,3") == []


def test_a_pattern_of_checkpoints_that_runs_share_is_noted(workspace: Workspace, spec: Path) -> None:
    more = "checkpoint: {glob: 'ckpt/*.pt'}\n"
    assert notes(workspace, spec, "bash -c ${params.a}", sweep="params.a=1,2", more=more) == [
        "2 runs write to the same checkpoint.glob ckpt/*.pt; write '{checkpoint_dir}/*.pt' there, and {checkpoint_dir} "
        "in the command"
    ]


# --- the runs root -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("root", "kind", "place"),
    [("/tmp", "ext4", "/tmp"), ("/", "tmpfs", "/mnt"), ("/", "ext4", None), ("/", "nfs4", None)],
)
def test_a_runs_root_on_the_machines_own_file_system_is_noted(
    root: str, kind: str, place: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notes_module, "mount_of", lambda _: Mount("/mnt", kind, "disk", frozenset()))
    noted = notes_module.notes_on_root(Path(root))
    assert [place in note for note in noted] == ([True] if place else []), noted
