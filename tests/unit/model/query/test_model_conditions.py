"""Conditions on runs: reading and evaluating them, and mistakes that only the runs show."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.errors import QueryError
from slurmtrain.model.query.conditions import check_condition, compare_texts, parse
from slurmtrain.model.query.fields import moment_of
from slurmtrain.model.query.measures import check_field

NOW = moment_of("2026-11-22T12:00:00Z")
RUN = {
    "id": "0123456789",
    "state": "completed",
    "cause": None,
    "job_id": "4711",
    "params": {"lr": 0.05, "opt": "adamw", "decay": "1e-3", "run": {"seed": 3}, "amp": True, "a b": 1},
    "metrics": {"val.loss": 0.25, "train/acc": 0.75, "broken": None},
    "tags": ["good", "paper"],
    "nodes": [],
    "note": "",
    "resources": {"time": "00:30:00", "mem": "4096M"},
    "submitted_at": "2026-11-20T10:00:00.000Z",
    "ended_at": None,
}


def holds(text: str, record: dict[str, Any] = RUN) -> bool:
    assert NOW is not None
    return parse(text, NOW).holds(record)


@pytest.mark.parametrize(
    "text",
    [
        "state=completed",
        "params.lr = 5e-2",
        "params.run.seed in (1, 2, 3)",
        "params.opt ~ adam* and not params.opt ~ adam",
        "params.opt !~ sgd*",
        "params.amp = true",
        "'params.a b' = 1",
        "'metrics.train/acc' >= 0.75",
        "metrics.train/acc >= 0.75",
        "(state = failed or state = completed) and params.lr < 1",
        "state = failed and params.lr < 1 or params.lr = 0.05",
        "NOT state = failed AND tags = good",
        'id >= "0" and id < "1"',
        # Text that is a number is compared as one, and text is neither smaller nor larger than a number.
        "params.decay = 0.001",
        "job_id > 999",
        "params.lr = '0.05'",
        "not params.opt < 3",
        "not params.lr < abc",
        "not params.amp > 0",
        "not params.decay = '0.001'",
        # Lengths of time and sizes are compared whatever their unit, and times with ages, days and moments.
        "resources.time < 1h",
        "resources.mem >= 4GB",
        "submitted_at > 3d",
        "submitted_at < 2d",
        "submitted_at > 2w and submitted_at <= 1d12h",
        "submitted_at = 2026-11-20",
        "submitted_at <= 2026-11-20 and submitted_at >= 2026-11-20",
        "submitted_at != 2026-11-19 and submitted_at > 2026-11-19 and submitted_at < 2026-11-21",
        "submitted_at = 2026-11-20T11:00:00+01:00",
        "submitted_at = '2026-11-20 10:00:00.000Z'",
        "submitted_at < 2026-11-20T10:01Z",
    ],
)
def test_a_condition_that_holds(text: str) -> None:
    assert holds(text)


@pytest.mark.parametrize("relation", ["=", "!=", "<", "<=", ">", ">=", "~", "!~"])
@pytest.mark.parametrize("name", ["cause", "metrics.broken", "metrics.none", "params.none.deeper", "ended_at"])
def test_a_comparison_with_a_missing_value_does_not_hold(name: str, relation: str) -> None:
    value = "crash" if name == "cause" else "1w"
    assert not holds(f"{name} {relation} {value}")
    assert not holds(f"{name} not in ({value})")
    assert holds(f"not {name} {relation} {value}")


def test_null_finds_what_is_missing_or_empty() -> None:
    for name in ("cause", "metrics.none", "nodes", "note"):
        assert holds(f"{name} = null")
        assert not holds(f"{name} != null")
    assert holds("cause in (crash, null) and tags != null and state != null")


def test_a_list_is_compared_item_by_item() -> None:
    assert holds("tags = good and good in tags and tags in (bad, paper) and tags ~ pap*")
    assert holds("bad not in tags and tags != bad and tags not in (bad, worse) and nodes != n1")
    assert not holds("tags != good")
    assert not holds("good not in tags")
    assert not holds("nodes = n1")


@pytest.mark.parametrize(
    ("text", "message", "caret"),
    [
        ("params.lr <", "expected a value after '<', not the end", 11),
        ("params.lr < 1 state = failed", "expected 'and' or 'or', not 'state'", 14),
        ("(state = failed", "expected ')', not the end", 15),
        ("state in (failed", "expected ')'", 16),
        ("state in ()", "expected a value", 9),
        ("state in (failed lost)", "expected 'and' or 'or', not 'lost'", 17),
        ("a < b < c", "expected 'and' or 'or', not '<'", 6),
        ("(a = b) = c", "expected a field", 0),
        ("a = b)", "expected 'and' or 'or', not ')'", 5),
        ("a = b and (c = d or e f)", "expected a comparison after 'e'", 22),
        ("state", "expected a comparison after 'state'", 5),
        ("state not failed", "expected 'in' after 'not'", 10),
        ("and state = failed", "expected a field, such as state or params.lr, not 'and'", 0),
        ("state = failed and or", "expected a field", 19),
        ("name = 'x", "a quotation mark is not closed", 7),
        ("state ! failed", "'!' is not allowed here", 6),
        ("state = complete", "there is no state 'complete'; did you mean 'completed'?", 8),
        ("cause in (crash, pre-empted)", "there is no cause 'pre-empted'; did you mean 'preempted'?", 17),
        ("submitted_at > yesterday", "'yesterday' is not a time; write 2026-11-22", 15),
        ("submitted_at > 2026-13-01", "'2026-13-01' does not exist in the calendar", 15),
        ("params.lr < null", "null cannot be compared with '<'", 12),
        ("モデル = '", "a quotation mark is not closed", 9),
        ("a\tb", "expected a comparison after 'a'", 2),
    ],
)
def test_a_mistake_is_shown_where_it_is(text: str, message: str, caret: int) -> None:
    with pytest.raises(QueryError) as error:
        holds(text)
    first, shown, pointer = str(error.value).split("\n")
    assert first.startswith(message)
    assert shown == f"  {text}".replace("\t", " ")
    assert pointer == " " * (2 + caret) + "^"


def test_empty_conditions_and_deep_nesting_are_refused_and_long_conditions_are_not() -> None:
    with pytest.raises(QueryError, match="the condition is empty"):
        holds("  ")
    for deep in ("(" * 10_000 + "state = failed" + ")" * 10_000, "not " * 10_000 + "state = failed"):
        with pytest.raises(QueryError, match="nested more than 50 levels deep"):
            holds(deep)
    assert holds(" or ".join(["state = failed"] * 2_000 + ["state = completed"]))


@given(
    st.one_of(
        st.text(),
        st.lists(
            st.sampled_from(["params.lr", "state", "(", ")", ",", "and", "or", "not", "in", "<", "=", "'", "1"])
        ).map(" ".join),
    )
)
def test_any_text_is_a_condition_or_refused(text: str) -> None:
    try:
        condition = parse(text, 0.0)
    except QueryError:
        return
    assert condition.holds(RUN) in (True, False)


RUNS: list[dict[str, Any]] = [
    {"id": "1", "state": "failed", "params": {"lr": 0.1, "seed": 1}, "metrics": {}, "checkpoint": None},
    {"id": "2", "state": "failed", "params": {"lr": 0.2, "optim": {"name": "sgd"}}, "metrics": {}, "checkpoint": None},
]


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("lr", "did you mean 'params.lr'?"),
        ("name", "did you mean 'params.optim.name'?"),
        ("params.lrr", "did you mean 'params.lr'?"),
        ("stat", "did you mean 'state'?"),
        ("params.lr.x", "did you mean 'params.lr'?"),
        ("zzzzzz", "'slurmtrain status --json' prints all fields"),
    ],
)
def test_a_field_that_no_run_has_is_refused_with_the_nearest(name: str, advice: str) -> None:
    with pytest.raises(QueryError) as error:
        check_field(name, RUNS)
    assert str(error.value) == f"none of these runs has a field {name!r}; {advice}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("params = 3", "'params' has several values, such as params.lr, params.seed, params.optim.name"),
        ("params.lr > 10%", "'params.lr' is a number, and '10%' is not"),
    ],
)
def test_what_cannot_be_compared_is_refused(text: str, message: str) -> None:
    text = f"state = failed and {text}"
    with pytest.raises(QueryError) as error:
        check_condition(parse(text, 0.0), text, RUNS)
    first, *rest = str(error.value).splitlines()
    assert first.startswith(message.removesuffix(".name"))
    assert rest == [f"  {text}", " " * 21 + "^"]
    fine = "params != null and checkpoint = null and params.lr = abc and id > a and metrics.acc < 1"
    check_condition(parse(fine, 0.0), fine, RUNS)
    check_field("params.lrr", [])


def test_values_of_options_are_text() -> None:
    assert compare_texts("params.lr", "=", ["0.05"], 0.0).holds(RUN)
    assert compare_texts("tags", "in", ["and", "good"], 0.0).holds(RUN)
    with pytest.raises(QueryError, match="there is no state 'done'; state is one of created, pending"):
        compare_texts("state", "in", ["done"], 0.0)
