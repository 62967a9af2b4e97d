"""The options of the site's own sbatch and srun."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.fakeslurm import SlurmCommands

from slurmtrain.slurm.slurm_commands import read_options

HELP = """\
Usage: sbatch [OPTIONS(0)...] [ : [OPTIONS(N)]] script(0) [args(0)...]

Parallel run options:
  -a, --array=indexes         job array index values
  -A, --account=name          charge job to specified account
      --bb=<spec>             burst buffer specifications
      --gres-flags=opts       flags related to GRES management
                              see also --never of the manual
  -H, --hold                  submit job in held state
Options provided by plugins:
      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH
                              [pyxis] the image to use
      --zz-note=TEXT          a note
"""
OPTIONS = {"array", "account", "bb", "gres-flags", "hold", "container-image", "zz-note"}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmCommands:
    fake = SlurmCommands(tmp_path / "bin")
    monkeypatch.setenv("PATH", fake.on_path())
    fake.replies("sbatch", HELP)
    fake.replies("srun", "      --mpi=type   type of MPI being used\n")
    return fake


def test_they_are_those_of_its_help_and_of_its_plug_ins(slurm: SlurmCommands) -> None:
    assert read_options("zz-note") == OPTIONS
    assert slurm.calls("sbatch")[0].args == ["--help"]


def test_a_known_option_is_asked_for_once_and_an_unknown_one_each_time(slurm: SlurmCommands) -> None:
    for _ in range(3):
        assert "zz-note" in read_options("zz-note")
        assert read_options("mpi", "srun") == {"mpi"}
    assert len(slurm.calls("srun")) == 1
    assert len(slurm.calls("sbatch")) == 1
    assert "zz-new" not in read_options("zz-new")
    slurm.replies("sbatch", HELP + "      --zz-new=TEXT\n")
    assert "zz-new" in read_options("zz-new")
    assert len(slurm.calls("sbatch")) == 3


@pytest.mark.parametrize("change", ["sbatch", "SLURM_CONF"])
def test_another_sbatch_or_another_cluster_is_asked_again(
    slurm: SlurmCommands, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    read_options("zz-note")
    if change == "sbatch":
        (slurm.path / "sbatch").write_bytes((slurm.path / "sbatch").read_bytes() + b"#\n")
    else:
        monkeypatch.setenv("SLURM_CONF", "/elsewhere/slurm.conf")
    read_options("zz-note")
    assert len(slurm.calls("sbatch")) == 2


def test_an_sbatch_that_fails_or_is_missing_has_none(slurm: SlurmCommands) -> None:
    slurm.replies("sbatch", stderr="sbatch: fatal: no configuration\n", code=1)
    assert read_options("zz-note") == frozenset()
    (slurm.path / "sbatch").unlink()
    assert read_options("zz-note") == frozenset()
