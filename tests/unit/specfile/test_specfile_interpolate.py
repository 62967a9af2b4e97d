"""Interpolations."""

from __future__ import annotations

import pytest
from helpers.specfiles import BASE, SWEPT, Load, Mistakes, only_run


def test_interpolations_follow_overrides_and_the_environment(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHO", "me")
    run = only_run(load(SWEPT + "env: {USER_NAME: '${oc.env:WHO}'}\n", "params.lr=5"))
    assert run.plan.spec.command == "python train.py --lr 5"
    assert run.plan.spec.env == {"USER_NAME": "me"}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("${params.nope}", "the interpolation ${params.nope} refers to a key that does not exist"),
        ("${HOME}", "for an environment variable write ${oc.env:HOME}"),
        ("${params.x}", "ecursive"),
        ("'${'", ""),
        ("${oc.env:SURELY_NOT_SET_ANYWHERE}", "SURELY_NOT_SET_ANYWHERE"),
        ("${no.such.resolver:x}", "no.such.resolver"),
        ("???", "'???' marks a value that must be given"),
    ],
)
def test_an_invalid_interpolation_is_refused_at_its_line(mistakes: Mistakes, value: str, message: str) -> None:
    [(line, key, explanation)] = mistakes(BASE + f"params:\n  y: 1\n  x: {value}\n")
    assert (line, key) == ("4", "params.x")
    assert message in explanation


def test_setup_lines_belong_to_the_shell(load: Load) -> None:
    text = BASE + "setup:\n  - export A=${B:-c} ${D}\n  - 'x=\"$(date)\"'\n  - '???'\n"
    assert only_run(load(text)).plan.spec.setup == ("export A=${B:-c} ${D}", 'x="$(date)"', "???")
