"""Lines that are read all at once, compared with the same lines read one by one."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.metrics.columns import Block, block_of, read_plain_lines
from slurmtrain.model.run.journal_lines import Progress, points_of, read_lines

names = st.sampled_from(["loss", "epoch", "größe", "lr:x", "[0]", "}"])
values = st.one_of(
    st.floats(), st.integers(-3, 3), st.just(2**60), st.just(10**400), st.none(), st.booleans(), st.just({"a": [1]})
)
ordinary = st.dictionaries(st.sampled_from(["loss", "lr"]), st.floats() | st.integers(0, 9), max_size=2)
times = st.floats(0, 2e9) | st.sampled_from([math.nan, math.inf, 1e12, 7, None])
records = st.one_of(
    st.fixed_dictionaries({"t": st.floats(0, 2e9), "step": st.integers(0, 2**53), "metrics": ordinary}),
    st.fixed_dictionaries({"t": times, "step": st.integers(0, 2**64) | st.none() | st.just(1.0)}),
    st.fixed_dictionaries({"t": times, "step": st.just(1), "metrics": st.dictionaries(names, values, max_size=3)}),
    st.fixed_dictionaries({"t": times, "step": st.just(1), "metrics": st.none() | ordinary, "more": values}),
)
# What only looks like the lines of a record each when all are joined.
odd_lines = st.sampled_from(
    [
        b'{"t":1.0,"step":1,"metrics":{}},{"t":1.0,"step":1,"metrics":{}}',
        b'{"t":1.0,"step":1,"metrics":{"a":1.0}',
        b'{"b":1.0}}',
        b'{"t":1.0,"step":1,"metrics":{"x}',
        b'{y":1.0}}',
        b'{"t":1.0,"step":1,"metrics":{"x":"}',
        b'{"}}',
        b'{"t":1.0,"step":1,"metrics":[{}',
        b"{}]}",
        b"{}",
        b"",
        b"  ",
        b'{"t":1.0,"step":1,"metrics":{"loss":1.0}}\r',
        b' {"t":1.0,"step":1,"metrics":{"loss":1.0}}',
        b"{\xff}",
        b"{" * 5000 + b"}",
        b'{"t":1.0,"step":1,"metrics":{"loss":2.0,"loss":' + b'{"a":' * 70 + b"1" + b"}" * 70 + b"}}",
    ]
)
texts = st.one_of(
    st.lists(records.map(json.dumps).map(str.encode), max_size=6),
    st.lists(records.map(json.dumps).map(str.encode) | odd_lines, max_size=6),
)


def content(block: Block) -> object:
    columns = {name: (list(each.values), each.rows and list(each.rows)) for name, each in block.columns.items()}
    return repr((list(block.steps), list(block.times), columns))


@given(texts)
def test_lines_read_at_once_are_those_read_one_by_one(lines: list[bytes]) -> None:
    text = b"".join(line + b"\n" for line in lines)
    plain = read_plain_lines(text)
    if plain is not None:
        reading = read_lines(text, 0, "metrics.jsonl")
        points = points_of(record for _, record in reading.records)
        assert not reading.garbage
        assert len(points) == len(lines)
        block, newest = plain
        assert content(block) == content(block_of(points))
        assert repr(Progress().advance([newest])) == repr(Progress().advance(points))


@pytest.mark.parametrize(
    "metrics", [[{"loss": 0.5, "epoch": 3}] * 2, [{"loss": 0.5}, {"loss": 0.25, "accuracy": math.inf}], [{}, {}]]
)
def test_what_sessions_write_is_read_at_once(metrics: list[dict[str, float]]) -> None:
    lines = [json.dumps({"t": 1.5e9 + step, "step": step, "metrics": each}) for step, each in enumerate(metrics)]
    assert read_plain_lines("".join(line + "\n" for line in lines).encode()) is not None
