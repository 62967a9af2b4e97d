"""Durations, sizes and names in a spec."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.experiment.values import (
    check_experiment_name,
    check_name,
    is_secret_variable,
    parse_duration,
    parse_memory,
    parse_size,
    write_duration,
    write_size,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("12:00:00", 43200),
        ("00:30:00", 1800),
        ("90:00", 5400),
        ("45", 2700),
        ("2-12", 216_000),
        ("1-2:30", 95_400),
        ("1-02:30:15", 95_415),
        (" 1:00:00 ", 3600),
        (30, 1800),
        ("100:00:00", 360_000),
    ],
)
def test_slurms_time_formats_are_read(text: object, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "value", ["", "soon", "1:2:3:4", "-5", "1d", "1-", "12:00:00h", 0, "0", "0:00:00", -1, 1.5, True, None, []]
)
def test_anything_but_a_time_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="time"):
        parse_duration(value)


def test_a_number_that_yaml_made_of_an_unquoted_time_is_explained() -> None:
    with pytest.raises(ValueError, match=r"43200 is what YAML makes of an unquoted 12:00:00 .* write it in quotes"):
        parse_duration(43200)


@given(st.integers(min_value=1, max_value=10**9))
def test_a_written_time_reads_back_as_itself(seconds: int) -> None:
    assert parse_duration(write_duration(seconds)) == seconds


@pytest.mark.parametrize(
    ("text", "mib"),
    [("4GB", 4096), ("4G", 4096), ("4 GiB", 4096), ("512M", 512), ("1.5T", 1_572_864), ("2048K", 2), ("1kb", 1)],
)
def test_memory_is_read_in_units_of_1024_and_rounded_up(text: str, mib: int) -> None:
    assert parse_memory(text) == mib


@pytest.mark.parametrize("value", [4, 4.5, "4", "4.5"])
def test_memory_without_a_unit_is_refused_with_an_example(value: object) -> None:
    with pytest.raises(ValueError, match=rf"has no unit; write for example {value}GB"):
        parse_memory(value)


@pytest.mark.parametrize("value", ["", "lots", "4PB", "-4GB", "4 G B", "0GB", None, True, [], "1.2.3GB"])
def test_anything_but_an_amount_of_memory_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="memory"):
        parse_memory(value)


def test_an_amount_of_memory_beyond_all_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="memory"):
        parse_memory("9" * 400 + "GB")


@pytest.mark.parametrize(
    ("text", "count"),
    [("100GB", 100 << 30), ("1.5T", 3 << 39), ("512 MiB", 512 << 20), ("3k", 3 << 10), ("0.1K", 1 << 10)],
)
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
        ("9" * 30 + "T", "is more than there is"),
    ],
)
def test_anything_but_a_size_is_refused(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_size(value)


@given(st.integers(1, 1 << 50))
def test_a_written_size_reads_back_as_itself(kib: int) -> None:
    assert parse_size(write_size(kib << 10)) == kib << 10


@pytest.mark.parametrize(("count", "text"), [(100 << 30, "100GB"), (1536 << 20, "1536MB"), (1 << 40, "1TB")])
def test_a_size_is_written_in_the_largest_unit_without_a_remainder(count: int, text: str) -> None:
    assert write_size(count) == text


@given(st.one_of(st.text(), st.integers(), st.floats(), st.none(), st.booleans(), st.lists(st.integers())))
def test_times_memory_and_sizes_raise_nothing_but_value_errors(value: object) -> None:
    for parse in (parse_duration, parse_memory, parse_size):
        try:
            parsed = parse(value)
        except ValueError:
            continue
        assert parsed > 0


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
