"""The section `start_from`."""

from __future__ import annotations

from typing import Any

import pytest

from slurmtrain.model.spec.checkpoint import StartFromSpec
from slurmtrain.model.spec.kinds import Section

KIND = Section(StartFromSpec, nullable=True)


def read(value: object) -> tuple[StartFromSpec | None, list[str]]:
    mistakes: list[str] = []
    spec = KIND.read(value, ("start_from",), lambda at, message: mistakes.append(f"{'.'.join(at)}: {message}"))
    return spec, mistakes


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("pretrain", StartFromSpec(run="pretrain")),
        ("6am3shgnnj:40", StartFromSpec(run="6am3shgnnj", step=40)),
        ("pretrain:best", StartFromSpec(run="pretrain", step="best")),
        ({"run": "a", "step": 7, "load": "weights"}, StartFromSpec(run="a", step=7, load="weights")),
        ({"run": "a", "step": None}, StartFromSpec(run="a")),
    ],
)
def test_a_run_and_a_step_are_written_in_one_word_or_as_a_section(value: Any, expected: StartFromSpec | None) -> None:
    spec, mistakes = read(value)
    assert (spec, mistakes) == (expected, [])
    assert read(KIND.write(spec)) == (expected, [])


@pytest.mark.parametrize(
    ("value", "mistake"),
    [
        ("a:b:c", "start_from: 'a:b:c' is not RUN, RUN:STEP or RUN:best"),
        ("a b", "start_from: 'a b' is not RUN, RUN:STEP or RUN:best"),
        ("a:0", "a step is a positive whole number, or `best`"),
        ("a:last", "a step is a positive whole number, or `best`"),
        ({"run": "a", "step": True}, "a step is a positive whole number, or `best`"),
        ({"step": 3}, "start_from.run: this key is required"),
        ({"run": "a", "load": "optimizer"}, "start_from.load: "),
        ({"run": "a", "steps": 3}, "did you mean 'step'?"),
    ],
)
def test_anything_else_is_refused_where_it_stands(value: Any, mistake: str) -> None:
    assert any(mistake in each for each in read(value)[1]), read(value)[1]
