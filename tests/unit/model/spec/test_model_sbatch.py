"""Which options of sbatch a spec may set."""

from __future__ import annotations

import pytest

from slurmtrain.model.spec.sbatch import (
    OPTIONS,
    OWNED,
    SLURM_OPTIONS,
    canonical_option,
    check_sbatch_option,
    named_options,
    repeated_options,
    runs_in_container,
    unknown_options,
    unknown_srun_options,
)


def mistakes(slurm: object) -> list[str]:
    """What is said of a section ``slurm``, each with its key."""
    messages: list[str] = []
    SLURM_OPTIONS.read(slurm, ("slurm",), lambda at, message: messages.append(f"{'.'.join(at)}: {message}"))
    return messages


@pytest.mark.parametrize("name", ["partition", "mail-type", "mail_type", "qos", "gres", "mem-per-cpu", "no_kill"])
def test_an_option_may_be_written_with_dashes_or_underscores(name: str) -> None:
    check_sbatch_option(name)


def nothing(_: str) -> frozenset[str]:
    return frozenset()


def plugins(_: str) -> frozenset[str]:
    """The options of a site with pyxis, whose sbatch has most of the usual ones."""
    return (OPTIONS - {"segment"}) | {"container-image", "container-mounts", "zz-note"}


@pytest.mark.parametrize(
    ("name", "near"), [("partitoin", "partition"), ("acount", "account"), ("mail_typ", "mail-type")]
)
def test_an_unknown_option_is_told_with_the_nearest_known_one(name: str, near: str) -> None:
    assert list(unknown_options({name: "x"}, nothing)) == [
        (name, f"sbatch has no option --{canonical_option(name)}; did you mean '{near}'?")
    ]


def test_an_option_of_a_plug_in_is_known_where_the_sites_own_sbatch_has_it() -> None:
    assert list(unknown_options({"container_image": "x", "zz-note": "y"}, plugins)) == []


def test_a_misspelt_option_is_told_with_the_nearest_of_sbatch_and_of_the_sites_plug_ins() -> None:
    assert list(unknown_options({"container-imag": "x", "partitoin": "y", "xyzzy": 1}, plugins)) == [
        ("container-imag", "this site's sbatch has no option --container-imag; did you mean 'container-image'?"),
        ("partitoin", "this site's sbatch has no option --partitoin; did you mean 'partition'?"),
        ("xyzzy", "this site's sbatch has no option --xyzzy; 'sbatch --help' lists all"),
    ]


def test_where_there_is_no_sbatch_an_option_that_may_be_of_a_plug_in_is_told_where_those_go() -> None:
    [(_, message)] = unknown_options({"container_image": "x"}, nothing)
    assert message.endswith(
        "did you mean 'container-id'?; one that a plug-in of your site adds goes into the list slurm.sbatch, as it is "
        "typed"
    )


def test_the_site_is_looked_up_only_for_options_that_no_version_of_slurm_has() -> None:
    looked_up: list[str] = []

    def read(option: str) -> frozenset[str]:
        looked_up.append(option)
        return frozenset({option})

    slurm = {"partition": "a", "segment": 4, "sbatch": ["--x=1"], "srun": ["--y"], "container_image": "b"}
    assert list(unknown_options(slurm, read)) == []
    assert looked_up == ["container-image"]


def test_a_slip_in_the_list_for_srun_is_told_where_there_is_an_srun() -> None:
    slurm = {"srun": ["--mpi=none", "--container-imag=x"]}
    srun = frozenset({"mpi", "container-image", "pty"})
    assert list(unknown_srun_options(slurm, lambda _: srun)) == [
        "srun has no option --container-imag here; did you mean 'container-image'?"
    ]
    assert list(unknown_srun_options(slurm, nothing)) == []


@pytest.mark.parametrize("name", ["a b", "a\nb", "", "--", "a=b", "ä"])
def test_what_cannot_name_an_option_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot name an option of sbatch"):
        check_sbatch_option(name)


@pytest.mark.parametrize(
    "slurm",
    [{"container": "x"}, {"container_image": "x"}, {"srun": ["--container-image=x"]}, {"sbatch": ["--container=x"]}],
)
def test_options_that_start_a_container_are_recognized(slurm: dict[str, object]) -> None:
    assert runs_in_container(slurm)
    assert not runs_in_container({"partition": "a", "srun": ["--mpi=none"]})


@pytest.mark.parametrize("name", sorted(OWNED))
def test_an_option_that_slurmtrain_sets_is_refused_with_the_place_to_say_it(name: str) -> None:
    with pytest.raises(ValueError, match="slurmtrain sets this option itself: "):
        check_sbatch_option(name)


def test_an_owned_option_is_never_suggested() -> None:
    for read in (nothing, plugins):
        [(_, message)] = unknown_options({"node": 2}, read)
        assert "has no option --node" in message
        assert "'nodes'" not in message


@pytest.mark.parametrize("name", [5, None, True])
def test_a_name_that_is_no_text_is_refused(name: object) -> None:
    with pytest.raises(ValueError, match="expected the long name of an sbatch option"):
        check_sbatch_option(name)


def test_all_names_are_written_as_sbatch_writes_them() -> None:
    assert {canonical_option(name) for name in OPTIONS} == OPTIONS
    assert OWNED.keys() <= OPTIONS
    assert canonical_option("--mail_type") == "mail-type"


# --- options as they are typed ----------------------------------------------------------------------------------------

PYXIS = ["--container-image=nvcr.io#nvidia/pytorch:26.09-py3", "--container-mount-home"]


def test_an_unknown_option_without_a_near_one_is_told_where_those_of_plug_ins_go() -> None:
    assert list(unknown_options({"xyzzy_plugh": 1}, nothing)) == [
        (
            "xyzzy_plugh",
            "sbatch has no option --xyzzy-plugh; one that a plug-in of your site adds goes into the list slurm.sbatch, "
            "as it is typed",
        )
    ]


def test_options_of_plug_ins_are_kept_as_they_are_typed() -> None:
    slurm = {"partition": "a", "sbatch": PYXIS, "srun": PYXIS[:1]}
    assert mistakes(slurm) == []
    read = SLURM_OPTIONS.read(slurm, ("slurm",), lambda *_: None)
    assert SLURM_OPTIONS.write(read) == slurm
    assert named_options(read) == {
        "partition": "a",
        "container-image": "nvcr.io#nvidia/pytorch:26.09-py3",
        "container-mount-home": True,
    }


@pytest.mark.parametrize(
    ("key", "option", "message"),
    [
        ("sbatch", "container-image=x", "expected an option such as '--container-image=...'"),
        ("sbatch", "-p", "expected an option such as"),
        ("sbatch", "--a b", "expected an option such as"),
        ("sbatch", 5, "expected an option such as"),
        ("sbatch", "--comment=a\nb", "cannot hold a line break"),
        ("sbatch", "--output=x", "slurmtrain sets --output itself: logs are kept in the run directory"),
        ("srun", "--kill-on-bad-exit=1", "slurmtrain sets --kill-on-bad-exit itself"),
    ],
)
def test_a_listed_option_that_cannot_be_passed_on_is_a_mistake(key: str, option: object, message: str) -> None:
    [mistake] = mistakes({key: [option]})
    assert mistake.startswith(f"slurm.{key}.0: ")
    assert message in mistake


def test_a_list_that_is_none_is_a_mistake() -> None:
    assert mistakes({"srun": "--a"}) == ["slurm.srun: expected a list, found text ('--a')"]


@pytest.mark.parametrize(
    ("slurm", "pairs"),
    [
        ({"mail-type": "END", "mail_type": "FAIL"}, [("mail-type", "mail_type")]),
        ({"qos": "a", "sbatch": ["--qos=b"]}, [("qos", "--qos=b")]),
        ({"qos": "a", "sbatch": PYXIS, "srun": PYXIS}, []),
    ],
)
def test_an_option_that_is_given_twice_is_found(slurm: dict[str, object], pairs: list[tuple[str, str]]) -> None:
    assert list(repeated_options(slurm)) == pairs
