"""What is hardly ever meant in a spec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.simulated_run import make_test_plan

from slurmtrain.model.experiment.command_words import NUMBERS, PLACEHOLDERS, find_oversights
from slurmtrain.model.experiment.launcher import NodePlace, NodeRanks
from slurmtrain.model.run.layout import RunDir
from slurmtrain.runtime.environment.ranks import facts_for_command


def oversights(**keys: Any) -> list[tuple[str, str]]:
    return [(".".join(path), message) for path, message in find_oversights(make_test_plan(**keys).content)]


def test_braces_without_a_dollar_sign_around_a_key_of_the_spec_are_told() -> None:
    messages = oversights(
        command="python x.py --lr {params.lr} --lr {params.lr}", params={"lr": 0.1, "d": "{resources.mem}"}
    )
    assert messages == [
        ("command", "{params.lr} is passed on as it is; ${params.lr} is replaced by the value of that key"),
        ("params.d", "{resources.mem} is passed on as it is; ${resources.mem} is replaced by the value of that key"),
    ]


@pytest.mark.parametrize(
    "command",
    [
        "python x.py --resume {resume_from}",
        "python x.py --format {params.missing}",
        "python x.py --json {a.b}",
        "python x.py --lr ${oc.env:LR}",
        # Braces of the script or of slurmtrain, and what is quoted.
        "python x.py --name {epoch}-{val_loss}",
        "torchrun x.py --n {nodes} {run_dir}",
        "bash -c 'python a.py && python b.py | tee $LOG'",
        "python a.py --sep '|' --re '^a$' --cost '$5'",
        "grep -c 'a;' b",
        'echo "a\\""',
        "echo it\\'s",
    ],
)
def test_other_braces_and_what_is_quoted_are_left_alone(command: str) -> None:
    assert oversights(command=command, checkpoint={"glob": "*.pt"}) == []


@pytest.mark.parametrize(
    ("command", "meant"),
    [
        ("python x.py --lr {lr}", "${params.lr} is replaced by the value of that parameter"),
        ("python x.py --out {run_dri}", "did you mean {run_dir}?"),
        ("python x.py --n {node}", "did you mean {nodes}?"),
    ],
)
def test_braces_that_are_a_slip_are_told_with_what_is_meant(command: str, meant: str) -> None:
    [(key, message)] = oversights(command=command, params={"lr": 0.1})
    assert (key, message.partition("; ")[2]) == ("command", meant)


def test_the_placeholders_are_those_that_are_filled_in() -> None:
    place = NodePlace(
        node_rank=0, ranks=NodeRanks((1,)), interface="", address="", master_addr="", master_port=1, hostfile=""
    )
    assert {*facts_for_command(RunDir(Path("/x")), 1, None, place)} == {*PLACEHOLDERS}


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("python a.py && python b.py", "'&&'"),
        ("python a.py | tee log", "'|'"),
        ("python a.py > log", "'>'"),
        ("python a.py 2>&1", "'2>&1'"),
        ("python a.py; python b.py", "'a.py;'"),
        ("python a.py --lr $LR", "$LR"),
        ('python a.py --lr "$LR"', "$LR"),
        ("python a.py --data ~/data", "'~/data'"),
    ],
)
def test_what_only_a_shell_understands_is_told_once(command: str, shown: str) -> None:
    [(key, message)] = oversights(command=command)
    assert key == "command"
    assert message.startswith(f"no shell runs the command, and {shown} is passed on as it is; ")


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("cd there; python a.py", "'cd' is no program, but a command of the shell"),
        ("source activate x", "'source' is no program, but a command of the shell"),
        ("A=1 python x.py", "'A=1' sets a variable, which only a shell does"),
    ],
)
def test_a_command_that_begins_with_a_word_of_the_shell_is_told_in_a_shell(command: str, why: str) -> None:
    [(_, message)] = oversights(command=command)
    assert message == f"no shell runs the command: {why}; write bash -c '{command}', or a script"


@pytest.mark.parametrize(
    ("name", "env", "is_now"),
    [
        ("DATA", {}, True),
        ("UNSET", {}, False),
        ("SLURM_TMPDIR", {}, False),
        ("LOCAL_RANK", {}, False),
        ("DATA", {"DATA": "/elsewhere"}, False),
        ("HF_TOKEN", {}, False),
    ],
)
def test_a_variable_is_told_to_be_replaced_now_only_if_it_is_set_now_and_the_same_in_the_job(
    name: str, env: dict[str, str], is_now: bool
) -> None:
    plan = make_test_plan(command=f"python x.py --d ${name}", env=env)
    variables = {"DATA", "SLURM_TMPDIR", "LOCAL_RANK", "HF_TOKEN"}
    [(_, message)] = find_oversights(plan.content, variables)
    assert f"write bash -c 'python x.py --d ${name}' for its value in the job" in message
    assert ("${oc.env:" in message) == is_now


@pytest.mark.parametrize("text", ["0.1,0.3", "1, 2,3", "1e-3,3e-4", "-1,.5"])
def test_numbers_with_commas_are_told_to_be_text_and_no_other_texts(text: str) -> None:
    [(key, message)] = oversights(params={"model": {"lr": text}})
    assert key == "params.model.lr"
    assert f"--sweep params.model.lr={text}" in message
    assert f"for a list: [{text}]" in message
    assert oversights(params=dict(zip("abcde", ("0.1", "a,b", "1,2,x", "1,", "data/a,1"), strict=True))) == []


def test_a_very_long_number_is_read_only_once() -> None:
    # If each of its digits were tried as the end of the number, this would take hours.
    assert not NUMBERS.fullmatch("1" * 100_000)
    assert NUMBERS.fullmatch("1," + "1" * 100_000)
