"""The kinds of values: what each accepts, and its message for anything else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import pytest

from slurmtrain.model.experiment import kinds
from slurmtrain.model.experiment.kinds import REQUIRED, Entries, Positive, Section, whole_number


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


def refuse_x(name: object) -> None:
    if name == "x":
        raise ValueError("x is taken")


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


def test_all_mistakes_of_a_section_are_reported_in_one_reading() -> None:
    _, reports = read(Section(Outer), {"sise": 1, "inner": {"dept": 2, "depth": 0}, "names": 3})
    assert reports == [
        ("key.sise", "unknown key; did you mean 'size'?"),
        ("key.inner.dept", "unknown key; did you mean 'depth'?"),
        ("key.inner.depth", "expected a whole number of at least 1, found 0"),
        ("key.names", "expected a mapping (name: value), found a whole number (3)"),
    ]


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
