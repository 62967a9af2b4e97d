"""Names that a spec may use, and names of secrets."""

from __future__ import annotations

import pytest

from slurmtrain.model.spec.values import check_experiment_name, check_name, is_secret_variable


@pytest.mark.parametrize("name", ["a", "digits-ddp", "0", "A.b_c-d", "x" * 64])
def test_a_name_that_is_safe_everywhere_is_accepted(name: str) -> None:
    check_name(name)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("a/b", r"'/' cannot be used"),
        ("a\nb", r"'\\n' cannot be used"),
        ("a\n", r"'\\n' cannot be used"),
        ("a'b", r'"\'" cannot be used'),
        ('a"b', r"'\"' cannot be used"),
        ("a b", r"' ' cannot be used"),
        ("naïve", r"'ï' cannot be used"),
        ("-x", r"must begin with a letter or a digit"),
        (".hidden", r"must begin with a letter or a digit"),
        ("x" * 300, r"at most 64 characters, this one has 300"),
    ],
)
def test_a_name_that_is_unsafe_somewhere_is_refused_with_the_reason(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_name(name)


def test_an_experiment_may_have_any_name_of_500_characters() -> None:
    check_experiment_name("%/" * 250)
    with pytest.raises(ValueError, match="at most 500 characters, this one has 501"):
        check_experiment_name("x" * 501)


@pytest.mark.parametrize(
    "name", ["API_TOKEN", "WANDB_API_KEY", "DB_PASSWORD", "aws_secret", "HF_TOKENS", "X_CREDENTIALS"]
)
def test_a_secret_variable_is_recognised_by_its_name(name: str) -> None:
    assert is_secret_variable(name)


@pytest.mark.parametrize("name", ["PATH", "TOKENIZERS_PARALLELISM", "KEYBOARD", "OMP_NUM_THREADS"])
def test_other_variables_are_not_secret(name: str) -> None:
    assert not is_secret_variable(name)
