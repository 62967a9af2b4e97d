"""Durations, sizes and names in a spec."""

from __future__ import annotations

import pytest

from slurmtrain.model.experiment.values import (
    check_experiment_name,
    check_name,
    is_secret_variable,
    parse_duration,
    parse_memory,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("12:00:00", 43200),
        ("00:30:00", 1800),
        ("45", 2700),
        ("2-12", 216_000),
        ("1-02:30:15", 95_415),
        (30, 1800),
        ("100:00:00", 360_000),
    ],
)  # fmt: skip
def test_slurms_time_formats_are_read(text: object, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "value",
    [
        "", "soon", "1:2:3:4", "-5", "1d", "1-", "12:00:00h",
        0,
        "0", "0:00:00",
        -1,
        1.5,
        True,
        None,
        [],
    ],
)  # fmt: skip
def test_anything_but_a_time_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="time"):
        parse_duration(value)


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("4GB", 4096),
        ("4 GiB", 4096),
        ("512M", 512),
        ("1.5T", 1_572_864),
        ("2048K", 2),
        ("1kb", 1),
    ],
)  # fmt: skip
def test_memory_is_read_in_units_of_1024_and_rounded_up(text: str, mib: int) -> None:
    assert parse_memory(text) == mib


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("100GB", 100 << 30),
        ("1.5T", 3 << 39),
        ("512 MiB", 512 << 20),
        ("0.1K", 1 << 10),
    ],
)  # fmt: skip
def test_a_size_is_read_in_bytes_and_rounded_up_to_a_kib(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (100, "100 has no unit; write for example 100GB"),
        ("100", "'100' has no unit; write for example 100GB"),
        ("much", "'much' is not a size; write for example 100GB, 512MB or 1TB"),
        (None, r"expected a size, found nothing \(null\) \(None\); write for example 100GB"),
        ("0GB", "expected a size above zero, found '0GB'"),
        ("9" * 30 + "T", "is too much"),
    ],
)
def test_anything_but_a_size_is_refused(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_size(value)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("a/b", r"'/' cannot be used"),
        ("a\nb", r"'\\n' cannot be used"),
        ("a\n", r"'\\n' cannot be used"),
        ("a'b", r'"\'" cannot be used'),
        ("a b", r"' ' cannot be used"),
        ("naïve", r"'ï' cannot be used"),
        ("-x", r"must begin with a letter or a digit"),
        ("x" * 300, r"at most 64 characters, this one has 300"),
    ],
)  # fmt: skip
def test_a_name_that_is_unsafe_somewhere_is_refused_with_the_reason(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "API_TOKEN", "WANDB_API_KEY", "DB_PASSWORD", "aws_secret", "HF_TOKENS", "X_CREDENTIALS",
    ],
)  # fmt: skip
def test_a_secret_variable_is_recognised_by_its_name(name: str) -> None:
    assert is_secret_variable(name)


def test_an_experiment_may_have_any_name_of_500_characters() -> None:
    check_experiment_name("%/" * 250)
    with pytest.raises(ValueError, match="at most 500 characters, this one has 501"):
        check_experiment_name("x" * 501)
