"""The sections `checkpoint` and `start_from`, and steps in the names of checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.experiment.checkpoint import (
    StartFromSpec,
    check_step,
    last_number,
    step_by_pattern,
    step_in_name,
    step_key,
)
from slurmtrain.model.experiment.kinds import Section
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.experiment.spec import read_spec, write_spec


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("step=(", r"'step=\(' is not a regular expression: missing \)"),
        (r"step-\d+", r"has 0 groups; it must have one for the digits of the step.* a key .* as 'iter_num'"),
        (r"(\d+)-(\d+)", "has 2 groups"),
    ],
)
def test_a_pattern_that_cannot_name_a_step_is_refused_with_what_is_wrong(pattern: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_step(pattern)


def test_the_group_of_a_pattern_is_the_step() -> None:
    assert step_by_pattern(r"part-(\d+)", "/out/part-007-of-9") == 7
    assert step_by_pattern(r"part-(\w+)", "/out/part-x") is None
    assert step_by_pattern(r"part-(\d+)", "/out/last.pt") is None
    assert step_by_pattern(r"epoch=(\d+)-step=(?P<step>\d+)", "/out/epoch=3-step=70.pt") == 70


@pytest.mark.parametrize("text", ["iter_num", "trainer.global_step", r"(\d+)", r"(\d+)-(?P<step>\d+)"])
def test_keys_and_patterns_that_name_the_step_are_accepted(text: str) -> None:
    check_step(text)
    assert (step_key(text) is not None) == ("(" not in text)


def test_a_plan_from_before_there_were_formats_means_what_it_meant() -> None:
    spec = read_spec({"command": "x", "name": "n", "checkpoint": {"glob": "*.pt"}}, lambda at, message: None)
    plain = write_spec(spec)
    del plain["checkpoint"]["format"], plain["checkpoint"]["step"]
    data = {"schema": 1, "spec": plain, "workdir": "/w", "python": "p", "template": {}}
    assert Plan.from_json(data).spec == spec


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
    ],
)  # fmt: skip
def test_a_run_and_a_step_are_written_in_one_word_or_as_a_section(value: Any, expected: StartFromSpec | None) -> None:
    spec, mistakes = read(value)
    assert (spec, mistakes) == (expected, [])
    assert read(KIND.write(spec)) == (expected, [])


@pytest.mark.parametrize(
    ("value", "mistake"),
    [
        ("a:b:c", "start_from: 'a:b:c' is not RUN, RUN:STEP or RUN:best"),
        ("a:0", "a step is a positive whole number, or `best`"),
        ({"run": "a", "step": True}, "a step is a positive whole number, or `best`"),
        ({"step": 3}, "start_from.run: this key is required"),
        ({"run": "a", "load": "optimizer"}, "start_from.load: "),
    ],
)  # fmt: skip
def test_anything_else_is_refused_where_it_stands(value: Any, mistake: str) -> None:
    assert any(mistake in each for each in read(value)[1]), read(value)[1]


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("epoch=1-step=30-val_loss=4.66.ckpt", 30),
        ("step=30-val_loss=4e-05", 30),
        ("run7-epoch=2-step=300.pt", 300),
        ("iter_0000100", 100),
        ("checkpoint-500", 500),
        ("model_0.35_200.pt", 200),
        ("0005000.pt", 5000),
        ("epoch3_100.pt", 100),
        ("ckpt-40.h5", 40),
        ("last.ckpt", None),
        ("epoch=3.ckpt", None),
        ("resnet50.pt", None),
    ],
)  # fmt: skip
def test_a_word_says_which_number_is_the_step(name: str, step: int | None) -> None:
    assert step_in_name(name) == step


@given(st.integers(0, 10**9), st.floats(0, 100), st.integers(0, 1000))
def test_a_metric_is_never_taken_for_the_step(step: int, loss: float, epoch: int) -> None:
    assert step_in_name(f"epoch={epoch}-step={step}-val_loss={loss:.2f}.ckpt") == step
    assert step_in_name(f"epoch={epoch}-val_loss={loss:.2f}.ckpt") is None


def test_names_without_a_step_sort_by_their_last_number() -> None:
    assert sorted(["epoch=10.ckpt", "epoch=9.ckpt"], key=lambda name: last_number(name) or 0)[-1] == "epoch=10.ckpt"
    assert last_number("val_loss=4.66.ckpt") is None
