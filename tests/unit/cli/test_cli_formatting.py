"""Times for people."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

import pytest
from helpers.time_zone import time_zone

from slurmtrain.cli.formatting import calendar, localized, when

# A Sunday evening in Berlin, at UTC+1.
NOW = datetime.fromisoformat("2026-11-22T17:00:00Z").timestamp()


@pytest.fixture(autouse=True)
def berlin() -> Iterator[None]:
    with time_zone("CET-1CEST,M3.5.0,M10.5.0/3"):
        yield


@pytest.mark.parametrize(
    ("moment", "text"),
    [
        (None, "-"),
        ("2026-11-22T16:59:48.500Z", "11 s ago"),
        ("2026-11-22T16:56:00Z", "4 min ago"),
        ("2026-11-22T17:00:00.001Z", "in 1 min"),
        ("2026-11-22T17:59:00Z", "in 59 min"),
        ("2026-11-22T16:00:00.000Z", "today 17:00"),
        ("2026-11-21T23:00:00Z", "today 00:00"),
        ("2026-11-21T22:59:59Z", "Sat 23:59"),
        ("2026-11-16T08:05:00Z", "Mon 09:05"),
        ("2026-11-15T08:05:00Z", "2026-11-15 09:05"),
        ("2026-11-24T08:05:00Z", "Tue 09:05"),
        ("2027-01-01T08:05:00Z", "2027-01-01 09:05"),
        ("2027-07-01T12:00:00Z", "2027-07-01 14:00"),
        ("9999-12-31T23:59:59.000Z", "9999-12-31T23:59:59.000Z"),
    ],
)
def test_a_time_is_relative_while_it_is_near_and_local_otherwise(moment: str | None, text: str) -> None:
    assert when(moment, NOW) == text


def test_a_time_of_a_period_is_never_relative() -> None:
    assert calendar("2026-11-22T16:59:48Z", NOW) == "today 17:59"
    assert calendar("2026-11-22T16:59:48.9Z", NOW, seconds=True) == "today 17:59:48"


def test_times_in_a_sentence_become_local_and_all_else_stays() -> None:
    reason = "waiting for priority; estimated start 2026-11-22T20:30:00.000Z; node2026-11 is v1.2Z"
    assert localized(reason, NOW) == "waiting for priority; estimated start today 21:30; node2026-11 is v1.2Z"
