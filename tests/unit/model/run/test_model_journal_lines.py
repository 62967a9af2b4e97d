"""Reading journals: in pieces or at once, torn, and with garbage in the middle."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.run.events.base import encode
from slurmtrain.model.run.journal_lines import Progress, events_of, points_of, read_lines, read_point

SOURCE = "journal/test.jsonl"


def is_record(line: bytes) -> bool:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and "t" in value


good_lines = st.builds(
    lambda time, data: encode(time, "saved", data)[:-1],
    st.floats(0, 2e9),
    st.dictionaries(st.sampled_from(["step", "path", "reason"]), st.integers() | st.text(), max_size=3),
)
bad_lines = st.one_of(
    st.binary(max_size=20).map(lambda data: data.replace(b"\n", b"")).filter(lambda line: not is_record(line)),
    st.sampled_from(
        [b"[1]", b"null", b"{}", b'{"t": "noon"}', b'{"kind": "saved"}', b"\x00" * 8, b"\xff\xfe", b'{"t": 1']
    ),
    st.just(b"[" * 5000),
)
lines = st.lists(good_lines | bad_lines, max_size=8)


def read_in_pieces(content: bytes, cuts: list[int]) -> tuple[list[Any], list[Any], int]:
    """As a reader does that comes back to a growing file, each time from its stored offset."""
    records: list[Any] = []
    garbage: list[Any] = []
    offset = 0
    for size in [*sorted(min(cut, len(content)) for cut in cuts), len(content)]:
        reading = read_lines(content[offset:size], offset, SOURCE)
        records += reading.records
        garbage += reading.garbage
        offset = reading.end
    return records, garbage, offset


@given(
    lines, st.binary(max_size=10).map(lambda tail: tail.replace(b"\n", b"")), st.lists(st.integers(0, 400), max_size=6)
)
def test_reading_in_pieces_gives_the_same_as_reading_at_once(
    written: list[bytes], torn: bytes, cuts: list[int]
) -> None:
    content = b"".join(line + b"\n" for line in written) + torn
    at_once = read_lines(content, 0, SOURCE)
    records, garbage, end = read_in_pieces(content, cuts)
    assert (tuple(records), tuple(garbage), end) == (at_once.records, at_once.garbage, at_once.end)
    assert at_once.end == len(content) - len(torn)


@given(st.lists(good_lines, min_size=1, max_size=5), bad_lines.filter(bytes.strip), st.integers(0, 4))
def test_garbage_in_the_middle_costs_nothing_but_itself(good: list[bytes], bad: bytes, place: int) -> None:
    place = min(place, len(good))
    written = [*good[:place], bad, *good[place:]]
    reading = read_lines(b"".join(line + b"\n" for line in written), 0, SOURCE)
    offset = sum(len(line) + 1 for line in good[:place])
    assert [(each.source, each.offset, each.line) for each in reading.garbage] == [(SOURCE, offset, bad[:1024])]
    assert reading.garbage[0].why.startswith("it ")
    assert [record for _, record in reading.records] == [json.loads(line) for line in good]


@pytest.mark.parametrize("line", [b'{"t": 1}', b'{"t": 1, "kind": 5}', b'{"t": 1, "kind": null, "x": 2}'])
def test_a_record_without_a_kind_is_garbage(line: bytes) -> None:
    good = encode(2.0, "end", {})
    events, garbage = events_of(read_lines(line + b"\n" + good, 0, SOURCE), SOURCE)
    assert [event.kind for event in events] == ["end"]
    assert [(bad.source, bad.offset) for bad in garbage] == [(SOURCE, 0)]


@pytest.mark.parametrize("time", ["NaN", "Infinity", "1" * 400, "1e999", "true"])
def test_a_time_that_is_no_moment_makes_the_line_garbage(time: str) -> None:
    line = b'{"t": %s, "kind": "saved"}' % time.encode()
    events, garbage = events_of(read_lines(line + b"\n" + encode(2.0, "end", {}), 0, SOURCE), SOURCE)
    assert [event.kind for event in events] == ["end"]
    assert [bad.offset for bad in garbage] == [0]


records = st.lists(
    st.fixed_dictionaries(
        {"t": st.floats(0, 1e9)},
        optional={
            "step": st.integers(0, 10**6) | st.just("no step"),
            "metrics": st.dictionaries(st.sampled_from(["loss", "lr"]), st.floats(0, 1)) | st.none(),
        },
    ),
    max_size=10,
)


def test_the_last_line_gives_the_step_and_each_metric_keeps_its_latest_value() -> None:
    lines: list[dict[str, Any]] = [
        {"t": 1.0, "step": 1, "metrics": {"loss": 0.5, "accuracy": 0.1}},
        {"t": 2.0, "step": 2, "metrics": {"loss": 0.4}},
        {"t": 3.0, "step": 3},
    ]
    assert Progress().advance(points_of(lines)) == Progress(3, 3.0, {"loss": 0.4, "accuracy": 0.1})


@pytest.mark.parametrize("value", ["0.5", None, True, [1.0], 10**400, {"a": 1.0}])
def test_a_value_that_is_no_number_is_left_out_and_reported(value: object) -> None:
    flaws: list[str] = []
    point = read_point({"t": 1.0, "step": 2, "metrics": {"loss": value, "lr": 0.1, "\ud800": 1.0}}, flaws)
    assert point == (2, 1.0, {"lr": 0.1})
    assert flaws == ["loss", "?"]
