"""The kinds of values: what each accepts, and its message for anything else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import pytest

from slurmtrain.model.experiment import kinds
from slurmtrain.model.experiment.kinds import (
    REQUIRED,
    Entries,
    Items,
    Nullable,
    Positive,
    Scalar,
    Section,
    level,
    whole_number,
)


class Reports(list[tuple[str, str]]):
    """Collects what a kind reports."""

    def __call__(self, at: tuple[str, ...], message: str) -> None:
        self.append((".".join(at), message))


def read(kind: kinds.Kind, value: object) -> tuple[Any, Reports]:
    reports = Reports()
    return kind.read(value, ("key",), reports), reports


def refusal(kind: kinds.Kind, value: object) -> str:
    _, reports = read(kind, value)
    assert len(reports) == 1, reports
    assert reports[0][0] == "key"
    return reports[0][1]


@pytest.mark.parametrize("value", [1, 7, 10])
def test_a_whole_number_within_its_bounds_is_read(value: int) -> None:
    assert read(kinds.whole_number(1, 10), value) == (value, [])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (True, "expected a whole number, found true/false (True)"),
        (1.0, "expected a whole number, found a number (1.0)"),
        ("2", "expected a whole number, found text ('2')"),
        (None, "expected a whole number, found nothing (null) (None)"),
        (0, "expected a whole number from 1 to 10, found 0"),
        (11, "expected a whole number from 1 to 10, found 11"),
    ],
)
def test_what_is_no_whole_number_within_bounds_is_refused(value: object, message: str) -> None:
    assert refusal(kinds.whole_number(1, 10), value) == message


def test_a_number_out_of_bounds_is_told_what_the_bounds_are_for() -> None:
    kind = kinds.whole_number(1, why="somebody must be there")
    assert refusal(kind, 0) == "expected a whole number of at least 1, found 0: somebody must be there"
    assert refusal(kind, "x") == "expected a whole number, found text ('x')"


def test_bounds_without_a_maximum_are_named_as_a_minimum() -> None:
    assert refusal(kinds.whole_number(3), 2) == "expected a whole number of at least 3, found 2"
    assert kinds.whole_number(3).text == "whole number of at least 3"


@pytest.mark.parametrize("value", [0, 0.5, 10**9])
def test_a_number_may_be_whole_or_not(value: float) -> None:
    assert read(kinds.finite_number(0), value) == (value, [])


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), 10**400, True, "1", None, [1]])
def test_what_is_no_finite_number_is_refused(value: object) -> None:
    assert refusal(kinds.finite_number(0), value).startswith("expected a number")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (5, "expected a name, found a whole number (5); put it in quotes"),
        (None, "expected a name, found nothing (null) (None)"),
        ("", "expected a name, found a blank text"),
        (" \t\n", "expected a name, found a blank text"),
        ("a\0b", "a NUL character cannot be used here"),
    ],
)
def test_what_is_no_text_is_refused(value: object, message: str) -> None:
    assert refusal(kinds.text("a name"), value) == message


def test_a_text_is_checked_by_the_given_function() -> None:
    def check(value: str) -> None:
        raise ValueError(f"{value} is not nice")

    assert refusal(kinds.text("text", check), "x") == "x is not nice"


def test_a_wrong_word_is_answered_with_the_words_and_the_nearest_one() -> None:
    assert refusal(kinds.choice("local", "slurm"), "slrum") == (
        "expected one of local, slurm, found 'slrum'; did you mean 'slurm'?"
    )
    assert refusal(kinds.choice("local", "slurm"), 3) == "expected one of local, slurm, found 3"


def test_an_optional_value_may_be_null_and_is_written_as_null() -> None:
    kind = Nullable(kinds.whole_number(1))
    assert read(kind, None) == (None, [])
    assert kind.write(None) is None
    assert kind.text == "whole number of at least 1, or null"
    assert refusal(kind, 0).startswith("expected a whole number")


def test_each_wrong_item_of_a_list_is_reported_with_its_place() -> None:
    _, reports = read(Items(kinds.whole_number(0), "numbers"), [1, "a", 2, None])
    assert [at for at, _ in reports] == ["key.1", "key.3"]


@pytest.mark.parametrize("value", [{}, "text", 1, None])
def test_what_is_no_list_is_refused(value: object) -> None:
    assert refusal(Items(kinds.whole_number(0), "numbers"), value).startswith("expected a list, found ")


def refuse_x(name: object) -> None:
    if name == "x":
        raise ValueError("x is taken")


def test_a_wrong_name_in_a_mapping_is_reported_and_left_out() -> None:
    entries, reports = read(Entries(kinds.whole_number(0), "numbers", refuse_x), {"x": 1, "y": 2, "z": -1})
    assert entries["y"] == 2
    assert "x" not in entries
    assert reports == [("key.x", "x is taken"), ("key.z", "expected a whole number of at least 0, found -1")]


def test_a_mapping_may_be_left_empty() -> None:
    assert read(Entries(kinds.whole_number(0), "numbers", refuse_x), None) == ({}, [])


Names = Annotated[dict[str, int], Entries(whole_number(0), "numbers", refuse_x)]


@dataclass(frozen=True)
class Inner:
    depth: Positive = 1


@dataclass(frozen=True)
class Outer:
    size: Annotated[int, whole_number(1), REQUIRED] = 2
    inner: Inner = Inner()
    names: Names = field(default_factory=dict)

    def conflicts(self) -> Any:
        if self.size == 13:
            yield "size", "thirteen is unlucky"


def test_a_section_fills_in_defaults() -> None:
    section, reports = read(Section(Outer), {"size": 3})
    assert (section, reports) == (Outer(3, Inner(1), {}), [])


def test_all_mistakes_of_a_section_are_reported_in_one_reading() -> None:
    _, reports = read(Section(Outer), {"sise": 1, "inner": {"dept": 2, "depth": 0}, "names": 3})
    assert reports == [
        ("key.sise", "unknown key; did you mean 'size'?"),
        ("key.inner.dept", "unknown key; did you mean 'depth'?"),
        ("key.inner.depth", "expected a whole number of at least 1, found 0"),
        ("key.names", "expected a mapping (name: value), found a whole number (3)"),
    ]


def test_a_conflict_is_reported_at_its_key() -> None:
    assert read(Section(Outer), {"size": 13})[1] == [("key.size", "thirteen is unlucky")]


def test_a_section_that_is_no_mapping_is_refused() -> None:
    _, reports = read(Section(Inner), [1])
    assert reports == [("key", "expected a section (key: value), found a list ([1])")]


def test_a_section_that_is_no_mapping_does_not_lack_keys_besides() -> None:
    section, reports = read(Section(Outer), "x")
    assert reports == [("key", "expected a section (key: value), found text ('x')")]
    assert section == Outer()


@dataclass(frozen=True)
class Short(Inner):
    SHORTHAND: ClassVar = "depth"


@pytest.mark.parametrize("value", [7, {"depth": 7}])
def test_a_value_alone_stands_for_the_section_with_this_one_key(value: object) -> None:
    assert read(Section(Short), value) == (Short(7), [])
    assert Section(Short).write(Short(7)) == {"depth": 7}


def test_a_mistake_in_a_value_alone_is_one_of_the_section() -> None:
    assert read(Section(Short), 0)[1] == [("key", "expected a whole number of at least 1, found 0")]
    assert read(Section(Short), {"depth": 0})[1] == [("key.depth", "expected a whole number of at least 1, found 0")]
    assert read(Section(Short), [1])[1] == [("key", "expected a section (key: value), found a list ([1])")]


@dataclass(frozen=True)
class Strict:
    SHORTHAND: ClassVar = "power"
    power: Annotated[str, level("off", "low")] = "low"


@pytest.mark.parametrize(("value", "power"), [("off", "off"), (True, "low"), (False, "off"), ({"power": "off"}, "off")])
def test_a_level_may_stand_for_its_section(value: object, power: str) -> None:
    assert read(Section(Strict), value) == (Strict(power), [])


def test_a_section_may_be_left_out_as_a_whole() -> None:
    kind = Section(Inner, nullable=True)
    assert read(kind, None) == (None, [])
    assert read(kind, {}) == (Inner(1), [])
    assert (kind.write(None), kind.write(Inner(4))) == (None, {"depth": 4})
    assert kind.text == "section, or null"


def test_two_sections_do_not_share_a_default_mapping() -> None:
    first, _ = read(Section(Outer), {"size": 1})
    first.names["y"] = 1
    assert read(Section(Outer), {"size": 1})[0].names == {}


def test_a_written_section_reads_back_as_itself() -> None:
    section = Outer(4, Inner(9), {"a": 1})
    assert read(Section(Outer), Section(Outer).write(section)) == (section, [])


def test_a_suggestion_is_made_only_for_a_near_word() -> None:
    assert kinds.suggestion("nodse", ["nodes", "time"]) == "; did you mean 'nodes'?"
    assert kinds.suggestion("quark", ["nodes", "time"]) == ""


def test_a_scalar_without_a_writer_is_written_unchanged() -> None:
    assert Scalar("text", str).write("x") == "x"
