"""Environments of runs: packages as text, and what differs."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.environment import (
    PLACES,
    Environment,
    Package,
    RankHardware,
    Software,
    changes_between,
    changes_in_words,
    compare_environments,
    describe_variables,
    elect_backend,
    kinds_of,
    option_of,
    package_changes,
    place_options,
    places,
    telling,
    without_effect,
)
from slurmtrain.model.experiment.slurm_options import OPTIONS

_WORD = st.text("abcXYZ019._+-", min_size=1)


@given(st.dictionaries(_WORD, st.builds(Package, _WORD, st.text("abc /,.09"))), _WORD)
def test_packages_come_back_from_their_text(packages: dict[str, Package], version: str) -> None:
    software = Software("/opt/a b/bin/python", version, packages)
    assert Software.from_text(software.to_text()) == software
    assert Software.from_text(software.to_text()).hash == software.hash


def test_a_text_of_a_version_that_kept_no_details_is_read() -> None:
    old = Software.from_text("# /venv/bin/python, Python 3.11.7\ntorch==2.12.0\n")
    assert (old.python, old.version, old.packages) == ("/venv/bin/python", "3.11.7", {"torch": Package("2.12.0")})
    new = Software("/venv/bin/python", "3.11.7", {"torch": Package("2.12.0", "abc")})
    assert package_changes(old, new) == {}
    assert Software.from_text("") == Software("", "", {})


def test_a_package_of_the_same_version_with_other_files_differs() -> None:
    first, other = (Software("p", "3", {"a": Package("1", detail), "b": Package("2")}) for detail in ("x", "y"))
    assert package_changes(first, other) == {"a": ("1 (x)", "1 (y)")}
    assert package_changes(first, first) == {}


def test_changes_are_said_in_a_few_words() -> None:
    changes = changes_between({"torch": "2.12", "numba": "1", "same": "0"}, {"torch": "2.13", "same": "0", "Foo": "3"})
    assert changes_in_words(changes) == "Foo 3 (new), numba removed (was 1), torch 2.12 -> 2.13"
    many = changes_between({}, {f"a{number}": "1" for number in range(7)})
    assert changes_in_words(many).endswith(", a4 1 (new) and 2 more")


def test_environments_are_compared_by_kind() -> None:
    machine = {"cpu": "EPYC", "cores": "4", "os": "Debian 12", "kernel": "6.1"}
    first = Environment(
        software=Software("/a/python", "3.11", {"torch": Package("2.12")}),
        versions={"python": "3.11", "torch": "2.12"},
        machines=kinds_of([machine, machine]),
        variables={"NCCL_DEBUG": "WARN"},
    )
    other = Environment(
        software=Software("/b/python", "3.11", {"torch": Package("2.13")}),
        versions={"python": "3.11", "torch": "2.13"},
        machines=kinds_of([machine, {**machine, "gpus": "8 x H100"}]),
        variables={},
    )
    assert compare_environments(first, first) == {}
    assert compare_environments(first, other) == {
        "python": {"python": ("/a/python", "/b/python")},
        "versions": {"torch": ("2.12", "2.13")},
        "packages": {"torch": ("2.12", "2.13")},
        "machines": {
            "nodes": (
                "2 x (EPYC, 4 cores, 6.1, Debian 12)",
                "1 x (EPYC, 4 cores, 6.1, Debian 12); 1 x (EPYC, 4 cores, 8 x H100, 6.1, Debian 12)",
            )
        },
        "variables": {"NCCL_DEBUG": ("WARN", None)},
    }


def test_what_a_run_of_an_older_version_did_not_note_does_not_differ() -> None:
    software = Software("/a/python", "3.11", {"torch": Package("2.12")})
    new = Environment(software=software, versions={"torch": "2.12"}, machines={"EPYC": 1}, variables={"OMP_X": "1"})
    assert compare_environments(Environment(software=software), new) == {}
    assert compare_environments(Environment(), new) == {}


def rank(
    host: str, name: str = "NVIDIA A100-SXM4-80GB", library: str = "NCCL", version: str = "2.27.5"
) -> RankHardware:
    return RankHardware(host=host, name=name, has_gpu=name != "CPU", library=library, version=version)


V100, NO_GPU = "Tesla V100-SXM2-16GB", ("CPU", "", "")


@pytest.mark.parametrize(
    ("ranks", "backend", "why"),
    [
        ([rank("n1"), rank("n2", V100)], "nccl", "all processes have NCCL 2.27.5"),
        ([rank("n1"), rank("n2", V100, version="2.21.5")], "gloo", "there is NCCL 2.27.5 on n1; NCCL 2.21.5 on n2"),
        # AMD's library has the same version numbers.
        ([rank("n1"), rank("n2", "AMD", "RCCL")], "gloo", "there is NCCL 2.27.5 on n1; RCCL 2.27.5 on n2"),
        ([rank("n1"), rank("n2", V100, "", "")], "gloo", "there is NCCL 2.27.5 on n1; no NCCL on n2"),
        ([rank("n1", V100, "", "")], "gloo", "torch is built without NCCL"),
        ([rank("n1"), rank("n2", *NO_GPU), rank("n2", *NO_GPU)], "gloo", "processes have no GPU on n2"),
        ([rank("n0"), *(rank(f"n{number}", *NO_GPU) for number in range(1, 8))], "gloo",
         "processes have no GPU on n1, n2, n3, n4 and 3 more"),
        ([rank("n1", *NO_GPU), rank("n2", *NO_GPU)], "gloo", "no process has a GPU"),
    ],
)  # fmt: skip
def test_nccl_needs_the_same_library_on_all_ranks(ranks: list[RankHardware], backend: str, why: str) -> None:
    elected = elect_backend(ranks)
    assert (elected.name, elected.why) == (backend, why)


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
    shell = {"SBATCH_ACCOUNT": "mine", "SBATCH_PARTITION": "gpu", "SBATCH_QOS": "", "SBATCH_WCKEY": "a\nb"}
    shell |= {f"SBATCH_{option.upper().replace('-', '_')}": "1" for option in OPTIONS - PLACES}
    assert places(shell, ()) == {"SBATCH_ACCOUNT": "mine", "SBATCH_PARTITION": "gpu"}
    assert places(shell, {"partition": "spot"}) == {"SBATCH_ACCOUNT": "mine"}
    assert places(shell, ("account", "partition")) == {}
    assert place_options({"SBATCH_ACCOUNT": "mine", "PYTHONPATH": "/p"}) == {"account": "mine"}
    assert (
        describe_variables({"SBATCH_ACCOUNT": "mine", "PYTHONPATH": "/p"})
        == "SBATCH_ACCOUNT=mine (--account), PYTHONPATH=/p"
    )


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
