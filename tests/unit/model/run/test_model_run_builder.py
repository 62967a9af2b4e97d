"""A run is the same however its events arrive: in any order, in any batches, and with the builder kept in between."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from helpers.journal_events import event
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmtrain.model.run.events.base import AnyEvent
from slurmtrain.model.run.fold import RunBuilder, fold
from slurmtrain.model.run.journal_lines import Progress
from slurmtrain.model.run.run import Run

_PATHS = st.sampled_from(("checkpoints/step-5", "checkpoints/step-10", "checkpoints/step-15"))
_STEPS = st.sampled_from((5, 10, 15))
_SAVED_AT = st.sampled_from((10.0, 20.0, 30.0))
_RECORDS = st.fixed_dictionaries(
    {"path": _PATHS, "step": _STEPS, "saved_at": _SAVED_AT},
    optional={"seconds": st.just(1.0), "stall_s": st.just(0.5), "why": st.sampled_from(("steps", "stop", "end"))},
)
_NODE = st.sampled_from(("attempts/7.0/node-0.jsonl", "attempts/7.1/node-0.jsonl", "attempts/7.0/node-1.jsonl"))
_RANK = st.sampled_from(("attempts/7.0/rank-0.jsonl", "attempts/7.1/rank-0.jsonl", "attempts/9.0/rank-0.1.jsonl"))
_COMMAND = st.sampled_from(("journal/a.jsonl", "journal/b.jsonl"))
_TAGS = st.lists(st.sampled_from(("good", "bad")), max_size=2)
_JOB = {"job_id": st.just("7"), "restart": st.integers(0, 2)}
# For each kind what may be in its events, and where they stand.
_KINDS = {
    "agent": (st.fixed_dictionaries({"host": st.just("n0"), "executor": st.sampled_from(("local", "slurm"))}), _NODE),
    "session": (st.fixed_dictionaries({"step": _STEPS}), _RANK),
    "total": (st.just({"total_steps": 99}), _RANK),
    "restart": (st.fixed_dictionaries({"round": st.just(1), "reached": _STEPS}), _NODE),
    "saved": (_RECORDS, _RANK),
    "save_failed": (st.fixed_dictionaries({"step": _STEPS, "reason": st.just("full")}), _RANK),
    "restored": (_RECORDS, _RANK),
    "rejected": (st.fixed_dictionaries({"path": _PATHS, "aside": st.just("checkpoints/damaged")}), _RANK),
    "interval": (st.fixed_dictionaries({"seconds": _SAVED_AT}), _RANK),
    "pruned": (st.fixed_dictionaries({"path": _PATHS}), _RANK | _COMMAND),
    "verified": (st.fixed_dictionaries({"path": _PATHS, "reason": st.none() | st.just("bad")}), _COMMAND),
    "found": (_RECORDS, _NODE),
    "hang": (st.just({"ranks": [{"idle_s": 3.0}]}), _NODE),
    "requeue": (st.fixed_dictionaries({"cause": st.just("preempted"), "exclude": st.just(["n1"])}), _NODE),
    "end": (st.fixed_dictionaries({"cause": st.sampled_from(("crash", "completed", "preflight"))}), _NODE),
    "observed": (
        st.fixed_dictionaries(
            {**_JOB, "state": st.sampled_from(("PENDING", "PREEMPTED", "CANCELLED", "gone"))},
            optional={"checkpoints": st.lists(_RECORDS, max_size=2)},
        ),
        _COMMAND,
    ),
    "replaced": (st.fixed_dictionaries(_JOB), _COMMAND),
    "requeue_failed": (st.fixed_dictionaries({**_JOB, "reason": st.just("no")}), _COMMAND),
    "created": (st.fixed_dictionaries({"params": st.just({"lr": 0.1}), "sweep": st.just("s")}), _COMMAND),
    "submitting": (
        st.fixed_dictionaries(
            {"submission": st.integers(1, 2), "attempt": st.just(1), "executor": st.just("slurm")},
            optional={"command": st.sampled_from(("a", "b")), "params": st.sampled_from(({}, {"lr": 0.2}))},
        ),
        _COMMAND,
    ),
    "tags": (st.fixed_dictionaries({}, optional={"add": _TAGS, "remove": _TAGS}), _COMMAND),
    "note": (st.fixed_dictionaries({"text": st.sampled_from(("", "a", "b"))}), _COMMAND),
    "archived": (st.fixed_dictionaries({"archived": st.booleans()}), _COMMAND),
    "delete": (st.fixed_dictionaries({"bytes": st.integers(0, 9)}), _COMMAND),
    "deleted": (st.just({}), _COMMAND),
    "submitted": (st.just({"submission": 1, "job_id": "7"}), _COMMAND),
    "cancel": (st.just({}), _COMMAND),
    "of a newer version": (st.just({"a": 1}), _RANK),
}


@st.composite
def _stories(draw: st.DrawFn) -> list[AnyEvent]:
    """Events of a run in the order in which they arrive; their times say otherwise."""
    events = []
    for offset in range(draw(st.integers(0, 12))):
        kind = draw(st.sampled_from(sorted(_KINDS)))
        records, sources = _KINDS[kind]
        events.append(event(float(draw(st.integers(1, 60))), kind, draw(records), draw(sources), offset))
    return events


PROGRESS = {"7.0": Progress(12, 40.0, {"loss": 1.0}), "7.1": Progress(16, 60.0, {})}


def built(events: Sequence[AnyEvent], cuts: Sequence[int], *, keep: bool) -> Run:
    """The run of these events, added in batches that end at ``cuts``; ``keep``: by a new builder for each batch."""
    builder = RunBuilder("RUN")
    bounds = [0, *sorted(cut for cut in cuts if cut < len(events)), len(events)]
    for begin, end in pairwise(bounds):
        if keep:
            record = json.loads(json.dumps(builder.to_dict()))
            earlier = events[:end]
            builder = RunBuilder.from_dict("RUN", record, lambda earlier=earlier: earlier)  # type: ignore[misc]
        builder.add(events[begin:end])
        builder.build(PROGRESS)
    return builder.build(PROGRESS)


@given(_stories(), st.lists(st.integers(0, 12), max_size=4), st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=4 * settings.default.max_examples)
def test_batches_in_any_order_give_the_run_that_all_events_at_once_give(
    events: list[AnyEvent], cuts: list[int], keep: bool, random: object
) -> None:
    expected = fold("RUN", sorted(events, key=lambda each: each.order), PROGRESS)
    random.shuffle(events)  # type: ignore[attr-defined]
    assert built(events, cuts, keep=keep) == expected


def test_the_events_of_before_are_only_asked_for_where_a_checkpoint_turns_up_late() -> None:
    rank = "attempts/7.0/rank-0.jsonl"
    saved = event(10.0, "saved", {"path": "checkpoints/step-5", "step": 5}, rank, 0)
    builder = RunBuilder("RUN")
    builder.add([saved])
    record = builder.to_dict()
    later = RunBuilder.from_dict("RUN", record, lambda: pytest.fail("nothing is late"))
    later.add([event(20.0, "pruned", {"path": "checkpoints/step-5"}, rank, 90)])
    [checkpoint] = later.build({}).checkpoints
    assert checkpoint.pruned_at == 20.0
    late = event(5.0, "pruned", {"path": "checkpoints/step-5"}, "journal/a.jsonl", 0)
    earlier = RunBuilder.from_dict("RUN", record, lambda: [saved, late])
    earlier.add([late])
    [checkpoint] = earlier.build({}).checkpoints
    assert checkpoint.on_disk
