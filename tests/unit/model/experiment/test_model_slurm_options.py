"""The section `slurm`: which options are passed on, and how; and the patterns of the key `log`."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from slurmtrain.model.experiment.slurm_options import (
    OPTIONS,
    SLURM_OPTIONS,
    SLURM_SECTION,
    Option,
    check_log,
    check_sbatch_option,
    fill_log,
    long_option,
    named_options,
    refused_options,
    repeated_options,
    unknown_srun_options,
)


def mistakes(slurm: object) -> list[str]:
    """What is said of a section ``slurm``, each with its key."""
    messages: list[str] = []
    SLURM_SECTION.read(slurm, ("slurm",), lambda at, message: messages.append(f"{'.'.join(at)}: {message}"))
    return messages


def unknown_options(slurm: dict[str, object], read: Callable[[str], frozenset[str]]) -> list[tuple[str, str]]:
    return [(at[0], message) for at, message in refused_options(slurm, read, None)]


def refusals(slurm: dict[str, object], nodes: int | None = 1) -> list[str]:
    """What is said of a section ``slurm`` where there is no sbatch, each with its key."""
    read = SLURM_SECTION.read(slurm, ("slurm",), lambda at, message: pytest.fail(f"{at}: {message}"))
    return [f"{'.'.join(at)}: {message}" for at, message in refused_options(read, nothing, nodes)]


def nothing(_: str) -> frozenset[str]:
    return frozenset()


def plugins(_: str) -> frozenset[str]:
    """The options of a site with pyxis, whose sbatch has most of the usual ones."""
    return (OPTIONS - {"segment"}) | {"container-image", "container-mounts", "zz-note"}


IN_LIST = "an option that a plug-in of your cluster adds goes into the list slurm.sbatch: "


@pytest.mark.parametrize(
    ("site", "name", "message"),
    [
        (nothing, "partitoin", "sbatch has no option --partitoin; did you mean 'partition'?"),
        # Where there is no sbatch, it may be one of a plug-in.
        (nothing, "container_image", "sbatch has no option --container-image; did you mean 'container-id'?; "
                                     f"{IN_LIST}'--container-image=1'"),
        (nothing, "xyzzy_plugh", f"sbatch has no option --xyzzy-plugh; {IN_LIST}'--xyzzy-plugh=1'"),
        (plugins, "container_image", None),
        (plugins, "zz-note", None),
        (plugins, "container-imag",
         "this site's sbatch has no option --container-imag; did you mean 'container-image'?"),
        (plugins, "partitoin", "this site's sbatch has no option --partitoin; did you mean 'partition'?"),
        (plugins, "xyzzy", "this site's sbatch has no option --xyzzy; 'sbatch --help' lists all"),
    ],
)  # fmt: skip
def test_an_unknown_option_is_told_with_the_nearest_of_sbatch_and_of_the_sites_plug_ins(
    site: Callable[[str], frozenset[str]], name: str, message: str | None
) -> None:
    assert unknown_options({name: 1}, site) == ([] if message is None else [(name, message)])


def test_a_slip_in_the_list_for_srun_is_told_where_there_is_an_srun() -> None:
    slurm = {"srun": ["--mpi=none", "--container-imag=x"]}
    srun = frozenset({"mpi", "container-image", "pty"})
    assert list(unknown_srun_options(slurm, lambda _: srun)) == [
        "srun has no option --container-imag here; did you mean 'container-image'?"
    ]
    assert list(unknown_srun_options(slurm, nothing)) == []


@pytest.mark.parametrize("name", ["a b", "a\nb", "", "--", "a=b", "ä", 5, None, True])
def test_what_cannot_name_an_option_is_refused(name: object) -> None:
    message = (
        "cannot be the name of an sbatch option"
        if isinstance(name, str)
        else "expected the long name of an sbatch option"
    )
    with pytest.raises(ValueError, match=message):
        check_sbatch_option(name)
    check_sbatch_option("mail_type")


# --- every option -----------------------------------------------------------------------------------------------------

# Options whose value decides.
BY_VALUE = {"gres": "shard:1", "cpu-bind": "x", "gpu-bind": "single:1", "mem-bind": "x", "tres-bind": "x"}


def value_of(option: Option) -> str | bool:
    return BY_VALUE.get(option.name, "v1" if option.takes_value else True)


def test_each_option_under_slurm_is_passed_on_or_refused_with_what_to_write_instead() -> None:
    for option in SLURM_OPTIONS.values():
        value = value_of(option)
        for name in {option.name, option.name.replace("-", "_")}:
            messages = refusals({name: value})
            if option.sbatch == "":
                assert messages == []
                assert named_options({name: value}) == {option.name: value}
            elif option.sbatch is not None:
                assert messages == [f"{name}: --{option.name} is not passed on: {option.sbatch}"]
            elif option.srun:
                assert messages == [f"{name}: sbatch has no option --{option.name}; {option.srun}"]
            else:
                [message] = messages
                typed = message.partition("write '")[2].partition("'")[0]
                assert refusals({"srun": [typed]}) == [], name


@pytest.mark.parametrize("program", ["sbatch", "srun"])
def test_each_option_in_a_list_is_passed_on_or_refused_however_it_is_typed(program: str) -> None:
    for option in SLURM_OPTIONS.values():
        advice, value = option.advice(program), value_of(option)
        long = f"--{option.name}" if value is True else f"--{option.name}={value}"
        typed = [long]
        if option.takes_value == "=":
            typed.append(f"--{option.name} {value}")
        if option.letter and advice is not None:
            short = f"-{option.letter}"
            typed += [f"{short}{value}", f"{short} '{value}'"] if option.takes_value else [short]
        for text in typed if advice is not None else ():
            assert long_option(program, text) == long
            messages = refusals({program: [text]})
            assert messages == ([f"{program}.0: --{option.name} is not passed on: {advice}"] if advice else [])
        if advice is None:
            assert refusals({program: typed[:1]}) != [], option.name


@pytest.mark.parametrize(
    ("slurm", "nodes", "instead"),
    [
        ({"gres": "gpu:4"}, 1, "use 'resources.gpus_per_node: 4'"),
        ({"gres": "gpu:h100:4"}, 1, "use 'resources.gpus_per_node: h100:4'"),
        ({"gres": "lscratch:10,gpu:a100:2"}, 1, "use 'resources.gpus_per_node: a100:2', beside 'gres: lscratch:10'"),
        ({"gres": "gpu:a100:2,gpu:v100:1"}, 1, "use 'resources.gpus_per_node' for one type"),
        ({"gpus": 8}, 2, "use 'resources.gpus_per_node: 4'"),
        ({"gpus": 8}, 3, "use 'resources.gpus_per_node', also with a type: 'h100:4'"),
        ({"gpus_per_node": "a:2"}, 3, "use 'resources.gpus_per_node: a:2'"),
        ({"sbatch": ["-G a40:2"]}, 2, "use 'resources.gpus_per_node: a40:1'"),
        ({"sbatch": ["--gres=gpu:2"]}, 2, "use 'resources.gpus_per_node: 2'"),
        ({"srun": ["--gres=gpu:2"]}, 2, "use 'resources.gpus_per_node: 2'"),
    ],
)  # fmt: skip
def test_gpus_are_refused_with_the_value_that_gives_as_many_ranks(
    slurm: dict[str, object], nodes: int | None, instead: str
) -> None:
    [message] = refusals(slurm, nodes)
    assert message.endswith(instead)


@pytest.mark.parametrize(
    ("typed", "bind"),
    [
        ("--cpu-bind=verbose,cores", "cores"),
        ("--gpu-bind=closest", "gpu"),
        ("--cpu-bind=ldoms", "numa"),
        ("--mem-bind=local", "numa"),
    ],
)  # fmt: skip
def test_a_binding_of_tasks_is_refused_with_that_of_ranks(typed: str, bind: str) -> None:
    [message] = refusals({"srun": [typed]})
    assert message.endswith(f"use 'resources.bind: {bind}'")


@pytest.mark.parametrize("value", ["none", "no", "quiet,none", "verbose"])
def test_a_binding_that_binds_nothing_is_passed_on(value: str) -> None:
    assert refusals({"srun": [f"--cpu-bind={value}", f"--gpu-bind={value}"], "gpu_bind": value}) == []


@pytest.mark.parametrize(
    ("slurm", "message"),
    [
        ({"sbatch": ["--outp=x"]}, "--outp is not an option of sbatch: did you mean '--output'?"),
        ({"srun": ["--cpu_bind=cores"]}, "--cpu-bind is not passed on"),
        ({"sbatch": ["--partition"]}, "--partition needs a value: write '--partition=...'"),
        ({"p": "spot"}, "p: -p is the short form; did you mean 'partition'?"),
        ({"array": None, "quiet": False}, None),
    ],
)  # fmt: skip
def test_what_getopt_would_take_for_an_option_is_not_passed_on(slurm: dict[str, object], message: str | None) -> None:
    messages = refusals(slurm)
    assert messages == [] if message is None else message in messages[0]
    assert len(messages) <= 1


# --- options as they are typed ----------------------------------------------------------------------------------------

PYXIS = ["--container-image=nvcr.io#nvidia/pytorch:26.09-py3", "--container-mount-home"]


def test_options_of_plug_ins_are_kept_as_they_are_typed() -> None:
    slurm = {"partition": "a", "sbatch": PYXIS, "srun": PYXIS[:1]}
    assert mistakes(slurm) == []
    assert mistakes({"srun": "--a"}) == ["slurm.srun: expected a list, found text ('--a')"]
    read = SLURM_SECTION.read(slurm, ("slurm",), lambda *_: None)
    assert SLURM_SECTION.write(read) == slurm
    image = "nvcr.io#nvidia/pytorch:26.09-py3"
    assert named_options(read) == {"partition": "a", "container-image": image, "container-mount-home": True}


@pytest.mark.parametrize(
    ("key", "option", "message"),
    [
        ("sbatch", "container-image=x", "expected an option such as '--container-image=...'"),
        ("sbatch", "-Y x", "sbatch has no option -Y"),
        ("sbatch", "-p=spot", "write '--partition=...'"),
        ("sbatch", "-Hv", "write '--hold'"),
        ("sbatch", 5, "expected an option such as"),
        ("sbatch", "--comment=a\nb", "cannot hold a line break"),
    ],
)  # fmt: skip
def test_a_listed_option_that_cannot_be_passed_on_is_a_mistake(key: str, option: object, message: str) -> None:
    [mistake] = mistakes({key: [option]})
    assert mistake.startswith(f"slurm.{key}.0: ")
    assert message in mistake


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


@pytest.mark.parametrize(
    ("pattern", "message", "proposal"),
    [
        ("train.log", "because it lacks the job's id; write train-%j.log", "train-%j.log"),
        ("%x-%A.out", "write %x-%A-%j.out", "%x-%A-%j.out"),
        ("%j-%s.out", "%s is not supported here", "%j.out"),
        ("%j/", "expected the path of a file, such as logs/%x-%j.out", "logs/%x-%j.out"),
        ("a\\%j", "leave the backslash out", "a%j"),
        ("a\n%j", "control character", "a%j"),
    ],
)  # fmt: skip
def test_what_cannot_be_expressed_is_refused_with_what_can(pattern: str, message: str, proposal: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check_log(pattern)
    check_log(proposal)


FACTS = {"x": "digits", "j": "123", "A": "120", "a": "3", "u": "ann", "N": "n0", "n": "0", "t": "0"}


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("logs/%x-%j.out", "logs/digits-123.out"),
        ("/scratch/%u/%A_%a.log", "/scratch/ann/120_3.log"),
        ("%N-%5j-%%j.%n%t", "n0-00123-%j.00"),
    ],
)
def test_a_pattern_stands_for_the_path_that_sbatch_would_write(pattern: str, path: str) -> None:
    check_log(pattern)
    assert fill_log(pattern, FACTS) == path
