"""Events as lines of journals."""

from __future__ import annotations

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.run.event import Event, encode

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text().filter(lambda key: key not in ("t", "kind")), plain, max_size=4))
def test_an_event_is_one_line_that_reads_back_as_itself(data: dict[str, object]) -> None:
    line = encode(1.5, "saved", data)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert json.loads(line) == {"t": 1.5, "kind": "saved", **data}


def test_numbers_that_json_does_not_have_are_written_as_null() -> None:
    line = encode(1.0, "saved", {"a": math.nan, "b": [math.inf, 2.0], "c": {"d": -math.inf}, "e": (1, math.nan)})
    assert b"NaN" not in line
    assert b"Infinity" not in line
    data = json.loads(line)
    assert (data["a"], data["b"], data["c"], data["e"]) == (None, [None, 2.0], {"d": None}, [1, None])


def test_a_time_is_kept_to_the_microsecond() -> None:
    assert json.loads(encode(1_700_000_000.1234567, "x", {}))["t"] == 1_700_000_000.123457


def test_events_sort_by_time_then_by_journal_then_by_place() -> None:
    events = [
        Event(2.0, "x", {}, "a", 0),
        Event(1.0, "x", {}, "b", 0),
        Event(1.0, "x", {}, "a", 9),
        Event(1.0, "x", {}, "a", 3),
    ]
    ordered = sorted(events, key=lambda event: event.order)
    assert [(event.time, event.source, event.offset) for event in ordered] == [
        (1.0, "a", 3),
        (1.0, "a", 9),
        (1.0, "b", 0),
        (2.0, "a", 0),
    ]
