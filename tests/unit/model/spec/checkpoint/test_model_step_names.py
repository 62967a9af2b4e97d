"""Steps in names of checkpoints."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.spec.checkpoint import last_number, step_in_name


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("epoch=1-step=30-val_loss=4.66.ckpt", 30),
        ("step=30-val_loss=4e-05", 30),
        ("run7-epoch=2-step=300.pt", 300),
        ("global_step100", 100),
        ("iter_0000100", 100),
        ("checkpoint-500", 500),
        ("ckpt-10.pt", 10),
        ("model_0.35_200.pt", 200),
        ("0005000.pt", 5000),
        ("epoch3_100.pt", 100),
        ("ckpt-40.h5", 40),
        ("last.ckpt", None),
        ("last-v1.ckpt", None),
        ("latest.pt", None),
        ("epoch=3.ckpt", None),
        ("val_loss=4.66.ckpt", None),
        ("resnet50.pt", None),
        ("bf16.pt", None),
    ],
)
def test_a_word_says_which_number_is_the_step(name: str, step: int | None) -> None:
    assert step_in_name(name) == step


def test_names_without_a_step_sort_by_their_last_number() -> None:
    assert sorted(["epoch=10.ckpt", "epoch=9.ckpt"], key=lambda name: last_number(name) or 0)[-1] == "epoch=10.ckpt"
    assert last_number("val_loss=4.66.ckpt") is None


@given(st.integers(0, 10**9), st.floats(0, 100), st.integers(0, 1000))
def test_a_metric_is_never_taken_for_the_step(step: int, loss: float, epoch: int) -> None:
    assert step_in_name(f"epoch={epoch}-step={step}-val_loss={loss:.2f}.ckpt") == step
    assert step_in_name(f"epoch={epoch}-val_loss={loss:.2f}.ckpt") is None


@given(st.text(max_size=30))
def test_any_name_has_a_step_or_none(name: str) -> None:
    step = step_in_name(name)
    assert step is None or step >= 0
