"""Environments of runs: packages as text, and what differs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.environment.attempt_environment import Environment, compare, kinds_of
from slurmtrain.model.environment.changes import changes_between, describe
from slurmtrain.model.environment.software import Package, Software, package_changes

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
    assert describe(changes) == "Foo 3 (new), no numba any more (was 1), torch 2.12 -> 2.13"
    assert describe(changes, most=1) == "Foo 3 (new), and 2 more"


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
    assert compare(first, first) == {}
    assert compare(first, other) == {
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
    assert compare(Environment(software=software), new) == {}
    assert compare(Environment(), new) == {}
