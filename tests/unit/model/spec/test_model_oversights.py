"""What is hardly ever meant in a spec."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.simulated_run import make_test_plan

from slurmtrain.model.spec.oversights import find_oversights


def oversights(**keys: Any) -> list[tuple[str, str]]:
    return [(".".join(path), message) for path, message in find_oversights(make_test_plan(**keys).spec)]


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
    ],
)
def test_other_braces_are_left_alone(command: str) -> None:
    assert oversights(command=command, checkpoint={"glob": "*.pt"}) == []


@pytest.mark.parametrize("text", ["0.1,0.3", "1, 2,3", "1e-3,3e-4", "-1,.5"])
def test_numbers_with_commas_are_told_to_be_text(text: str) -> None:
    [(key, message)] = oversights(params={"model": {"lr": text}})
    assert key == "params.model.lr"
    assert f"--sweep params.model.lr={text}" in message
    assert f"for a list: [{text}]" in message


@pytest.mark.parametrize("text", ["0.1", "a,b", "1,2,x", "1,", "data/a,1"])
def test_other_texts_are_left_alone(text: str) -> None:
    assert oversights(params={"text": text}) == []
