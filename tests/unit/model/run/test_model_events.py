"""Events as lines of journals, whatever these lines hold."""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from helpers.journal_events import event, read_run
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmtrain.model.preflight.node_ledger import ledger_entries
from slurmtrain.model.run.events import agent_events, checkpoint_events, command_events, rank_events
from slurmtrain.model.run.events.base import RECORD_KEYS, UNUSABLE, AnyEvent, Payload, UnknownEvent, encode, layout
from slurmtrain.model.run.events.checkpoint_events import CheckpointRecord
from slurmtrain.model.run.fold import RunBuilder
from slurmtrain.model.run.journal_lines import payload_classes, read_event
from slurmtrain.model.run.run import RUN_STATES

_TEXT = st.text(st.characters(codec="utf-8"))
_WHOLE = st.integers(-(2**53), 2**53)
plain = st.recursive(
    st.none() | st.booleans() | _WHOLE | st.floats(allow_nan=False, allow_infinity=False) | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=8,
)
# What json.loads may give, also for lines that nobody should write.
junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("\ud800") | st.just(10**30),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
_NUMBER = st.floats(-(2.0**53), 2.0**53) | _WHOLE
_BY_ANNOTATION: dict[str, st.SearchStrategy[Any]] = {
    "str": _TEXT, "int": _WHOLE, "float": _NUMBER, "bool": st.booleans(), "Any": plain,
}  # fmt: skip


def _values(annotation: str) -> st.SearchStrategy[Any]:
    """What a field with this annotation may hold."""
    if annotation.endswith(" | None"):
        return st.none() | _values(annotation.removesuffix(" | None"))
    outer, _, inner = annotation.partition("[")
    if outer == "Sequence":
        return st.lists(_values(inner.removesuffix("]")), max_size=2)
    if outer == "Mapping":
        values = inner.removesuffix("]").partition(", ")[2]
        keys = st.integers(0, 99).map(str) if values in RECORD_KEYS else _TEXT
        return st.dictionaries(keys, _values(values), max_size=2)
    if annotation in RECORD_KEYS:
        required, optional = RECORD_KEYS[annotation]
        return st.fixed_dictionaries(
            {key: _values(value) for key, value in required.items()},
            optional={key: _values(value) for key, value in optional.items()},
        )
    if annotation == "CheckpointRecord":
        return payloads(CheckpointRecord)
    return _BY_ANNOTATION[annotation]


def payloads(cls: type[Payload]) -> st.SearchStrategy[Payload]:
    """Payloads of this class with anything that their types allow; optional fields may be left out."""
    declared = [each for each in fields(cls) if each.name != "extra"]
    optional = {each.name for each in declared if each.default is not MISSING or each.default_factory is not MISSING}
    values = {each.name: _values(str(each.type)) for each in declared}
    return st.fixed_dictionaries(
        {name: values[name] for name in values if name not in optional},
        optional={name: values[name] for name in optional},
    ).map(lambda values: cls(**values))


EVERY_KIND = pytest.mark.parametrize("cls", [pytest.param(cls, id=kind) for kind, cls in payload_classes().items()])
# Few of each kind: the kinds share most types of fields, so that each type still meets hundreds of examples.
few = settings(max_examples=settings.default.max_examples // 5)


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


# --- every kind ---------------------------------------------------------------------------------------------------


def test_every_class_of_an_event_is_among_the_kinds_and_each_kind_stands_once() -> None:
    modules = (command_events, agent_events, rank_events, checkpoint_events)
    classes = {
        cls
        for module in modules
        for cls in vars(module).values()
        if isinstance(cls, type) and issubclass(cls, Payload) and cls.__module__ == module.__name__
    }
    assert classes - {CheckpointRecord} == set(payload_classes().values())
    assert len({cls.KIND for cls in payload_classes().values()}) == len(payload_classes())


@EVERY_KIND
@few
@given(data=st.data())
def test_a_payload_reads_back_as_itself_with_keys_of_a_newer_version_and_all_but_what_cannot_be_used(
    cls: type[Payload], data: st.DataObject
) -> None:
    payload = data.draw(payloads(cls))
    right = payload.to_json()
    read = read_event(json.loads(encode(1.0, payload.kind, right)), "s", 0)
    assert read is not None
    assert read.payload == payload
    # Keys of a newer version are kept and change nothing.
    newer = {**right, "a key of a newer version": [1, {"b": None}]}
    read = cls.from_json(newer)
    assert read is not None
    assert read.to_json() == newer
    assert {**read.to_json(), **right} == newer
    # Every value that cannot be used is reported, and no other.
    wrong = data.draw(st.sampled_from([each.key for each in layout(cls)] or ["no key"]))
    flaws: list[str] = []
    cls.from_json(right, flaws)
    assert flaws == []
    cls.from_json({**right, wrong: [math.nan]}, flaws)
    assert flaws == [wrong] * any(each.key == wrong for each in layout(cls))


@EVERY_KIND
@few
@given(data=st.data())
def test_whatever_a_line_holds_reading_never_raises_and_gives_only_values_of_the_right_type(
    cls: type[Payload], data: st.DataObject
) -> None:
    names = [each.key for each in layout(cls)]
    record = data.draw(st.dictionaries(st.sampled_from([*names, "other"]), junk | plain))
    read = cls.from_json(record)
    if read is None:
        assert any(each.is_required for each in layout(cls))
        return
    assert cls.from_json(read.to_json()) == read
    for each in layout(cls):
        left_out: list[object] = []
        assert each.read(getattr(read, each.name), left_out) is not UNUSABLE
        assert left_out == []


def test_an_event_of_an_unknown_kind_is_kept_as_it_is() -> None:
    read = read_event({"t": 1.0, "kind": "of a newer version", "a": [1], "name": 5}, "s", 0)
    assert read is not None
    assert isinstance(read.payload, UnknownEvent)
    assert (read.kind, read.payload.to_json()) == ("of a newer version", {"a": [1], "name": 5})


# --- lines that nobody should write -------------------------------------------------------------------------------


@st.composite
def _junk_events(draw: st.DrawFn) -> list[AnyEvent]:
    """Events of any kind whose values have any type, or the right one."""
    events = []
    for offset in range(draw(st.integers(0, 6))):
        kind = draw(st.sampled_from(sorted(payload_classes())))
        cls = payload_classes()[kind]
        annotations = {each.name: str(each.type) for each in fields(cls)}
        record = {each.key: draw(_values(annotations[each.name]) | junk) for each in layout(cls)}
        source = draw(st.sampled_from(("attempts/7.0/node-0.jsonl", "attempts/7.0/rank-0.jsonl", "journal/a.jsonl")))
        read = read_event({**record, "t": float(draw(st.integers(0, 99))), "kind": kind}, source, offset)
        if read is not None:
            events.append(read)
    return events


@given(_junk_events())
def test_no_line_of_a_journal_keeps_a_run_from_being_read(events: list[AnyEvent]) -> None:
    submitted = [
        event(1.0, "submitting", {"submission": 1, "attempt": 1, "executor": "local", "requeue": {}}, "journal/b", 0),
        event(2.0, "submitted", {"submission": 1, "job_id": "7"}, "journal/b", 1),
        event(3.0, "agent", {"host": "n0"}, "attempts/7.0/node-0.jsonl", 90),
    ]
    run = read_run("RUN", [*submitted, *events], {})
    assert run.state in RUN_STATES
    ledger_entries("RUN", events, {})
    builder = RunBuilder("RUN")
    builder.add(events)
    json.dumps(builder.to_dict())


# --- lines of earlier versions ---------------------------------------------------------------------------------

GOLDEN = Path(__file__).resolve().parents[3] / "golden" / "events.jsonl"
GOLDEN_LINES = GOLDEN.read_text().splitlines()


@pytest.mark.parametrize("line", [pytest.param(line, id=json.loads(line)["kind"]) for line in GOLDEN_LINES])
def test_a_line_that_an_earlier_version_has_written_is_read_as_it_was(line: str) -> None:
    record = json.loads(line)
    read = read_event(record, "journal/a.jsonl", 0)
    assert read is not None
    assert (read.time, read.kind, read.payload.extra) == (record.pop("t"), record.pop("kind"), {})
    written = read.payload.to_json()
    # A key that was null may be left out now, and one that is new may have joined.
    assert {key: written.get(key) for key in record} == record


def test_there_is_a_line_of_every_kind_by_an_earlier_version() -> None:
    kinds = {json.loads(line)["kind"] for line in GOLDEN_LINES}
    assert kinds == set(payload_classes())
