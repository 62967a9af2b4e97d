"""What counts of the shell that submits a run: where the job goes, if the spec leaves that open, and nothing else."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from slurmtrain.model.environment.surroundings import (
    PLACES,
    describe,
    option_of,
    options,
    places,
    telling,
    without_effect,
)
from slurmtrain.model.experiment.slurm_options import OPTIONS


# By sbatch(1) of 22.05 to 25.11, where the name of the option is another than that of the variable.
@pytest.mark.parametrize(
    ("variable", "option"),
    [("SBATCH_TIMELIMIT", "time"), ("SBATCH_MEM_PER_NODE", "mem"), ("SBATCH_ARRAY_INX", "array"),
     ("SBATCH_BURST_BUFFER", "bb"), ("SBATCH_REQ_SWITCH", "switches"), ("SBATCH_WAIT4SWITCH", "switches"),
     ("SBATCH_CPU_FREQ_REQ", "cpu-freq"), ("SBATCH_SEGMENT_SIZE", "segment"), ("SBATCH_DEBUG", "verbose"),
     ("SBATCH_NO_REQUEUE", "no-requeue"), ("SBATCH_EXPORT", "export"), ("SLURM_ACCOUNT", ""), ("PATH", "")],
)  # fmt: skip
def test_a_variable_stands_for_an_option(variable: str, option: str) -> None:
    assert option_of(variable) == option


def test_every_variable_that_this_machines_sbatch_reads_stands_for_an_option_that_is_known() -> None:
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        pytest.skip("there is no sbatch on this machine")
    variables = {name.decode() for name in re.findall(rb"SBATCH_[A-Z0-9_]+(?=\0)", Path(sbatch).read_bytes())}
    assert len(variables) > 50
    assert {name for name in variables if option_of(name) not in OPTIONS} == set()


def test_where_a_job_goes_counts_unless_the_spec_says_it() -> None:
    shell = {
        "SBATCH_ACCOUNT": "mine",
        "SBATCH_PARTITION": "gpu",
        "SBATCH_QOS": "",
        "SBATCH_WCKEY": "a\nb",
        "HOME": "/h",
    }
    assert places(shell, ()) == {"SBATCH_ACCOUNT": "mine", "SBATCH_PARTITION": "gpu"}
    assert places(shell, {"partition": "spot"}) == {"SBATCH_ACCOUNT": "mine"}
    assert places(shell, ("account", "partition")) == {}
    assert options({"SBATCH_ACCOUNT": "mine", "PYTHONPATH": "/p"}) == {"account": "mine"}
    assert describe({"SBATCH_ACCOUNT": "mine", "PYTHONPATH": "/p"}) == "SBATCH_ACCOUNT=mine (--account), PYTHONPATH=/p"


def test_nothing_that_says_what_a_job_is_counts() -> None:
    others = {f"SBATCH_{option.upper().replace('-', '_')}": "1" for option in OPTIONS - PLACES}
    assert places(others, ()) == {}


@pytest.mark.parametrize(
    ("variable", "own", "proposal"),
    [
        ("SBATCH_TIMELIMIT", (), "write resources.time into the spec"),
        ("SBATCH_TIMELIMIT", ("resources.time",), ""),
        ("SBATCH_MEM_PER_CPU", (), "write resources.mem into the spec"),
        ("SBATCH_MEM_PER_CPU", ("resources.mem",), ""),
        ("SBATCH_GPUS", (), "write resources.gpus_per_node into the spec"),
        ("SBATCH_GRES", (), "write slurm.gres into the spec"),
        ("SBATCH_GRES", ("gres",), ""),
        ("SBATCH_EXCLUSIVE", (), "write slurm.exclusive into the spec"),
        ("SBATCH_CLUSTERS", (), "runs go to the cluster of this machine"),
        ("SLURM_CLUSTERS", (), "runs go to the cluster of this machine"),
        ("CUDA_VISIBLE_DEVICES", (), "Slurm chooses the GPUs"),
        ("SBATCH_EXPORT", (), ""),
        ("SBATCH_SIGNAL", (), ""),
        ("SBATCH_NO_REQUEUE", (), ""),
        ("SBATCH_ACCOUNT", (), ""),
        ("SBATCH_CPU_BIND_LIST", (), ""),
        ("SBATCH_OF_A_WRAPPER", (), ""),
    ],
)
def test_a_person_learns_of_a_variable_without_effect_if_the_spec_leaves_it_open(
    variable: str, own: tuple[str, ...], proposal: str
) -> None:
    named = list(without_effect({variable: "7", "PATH": "/bin"}, own, OPTIONS))
    assert [proposal in text and variable in text for text in named] == ([True] if proposal else [])


def test_what_decides_what_the_ranks_run_is_recorded_unless_the_spec_sets_it() -> None:
    shell = {"PYTHONPATH": "/p", "MKL_NUM_THREADS": "1", "PYTHONHOME": "", "LD_PRELOAD": "x.so", "PATH": "/bin"}
    assert telling(shell, {"LD_PRELOAD": "y.so"}) == {"PYTHONPATH": "/p", "MKL_NUM_THREADS": "1"}
