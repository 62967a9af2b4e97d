"""What the policy decides holds for any history of a run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.experiment.sections import RequeueSpec
from slurmtrain.model.interruption.policy import MAX_DELAY_S, Decision, PriorEnd, decide, past_failures
from slurmtrain.model.run.run import CAUSES

# --- any history ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Life:
    """An attempt before it is placed in a history: what it added to what it went on from."""

    cause: str
    saved: int
    lost: int | None
    where: str
    foreign: bool
    in_place: bool


LIVES = st.builds(
    Life,
    cause=st.sampled_from([*CAUSES, "unheard-of"]),
    saved=st.sampled_from([0, 0, 1, 7]),
    lost=st.none() | st.integers(0, 3),
    where=st.sampled_from(["", "ValueError: nan", "OSError"]),
    foreign=st.booleans(),
    in_place=st.booleans(),
)
REQUEUES = st.builds(
    RequeueSpec,
    max_failures=st.integers(0, 6),
    max_node_failures=st.integers(0, 6),
    backoff_s=st.sampled_from([0.0, 1.0, 30.0, 5000.0]),
)


def history(lives: list[Life]) -> list[PriorEnd]:
    """The lives one after the other, each going on from the newest checkpoint of those before."""
    step, pasts = 0, []
    for index, life in enumerate(lives):
        saved = step + life.saved
        reached = None if life.lost is None else saved + life.lost
        pasts.append(
            PriorEnd(
                cause=life.cause, at=float(index), began_at_step=step, committed=saved, reached=reached,
                where=life.where, foreign=life.foreign, in_place=life.in_place,
            )
        )  # fmt: skip
        step = saved
    return pasts


def lived(lives: list[Life], requeue: RequeueSpec) -> tuple[list[PriorEnd], Decision | None]:
    """How far a run comes that is started again only as long as it is to be, and the last decision."""
    pasts, decided = history(lives), None
    for index in range(len(pasts)):
        decided = decide(pasts[: index + 1], requeue)
        if not decided.again:
            return pasts[: index + 1], decided
    return pasts, decided


@given(
    st.lists(
        st.builds(
            PriorEnd,
            cause=st.sampled_from([*CAUSES, "", "?"]),
            at=st.floats(),
            began_at_step=st.integers(),
            committed=st.integers(),
            reached=st.none() | st.integers(),
            where=st.text(max_size=3),
            foreign=st.booleans(),
            in_place=st.booleans(),
        ),
        max_size=8,
    ),
    REQUEUES,
)
def test_any_history_gets_a_decision_and_always_the_same(pasts: list[PriorEnd], requeue: RequeueSpec) -> None:
    decision = decide(pasts, requeue)
    assert decision == decide(tuple(pasts), requeue)
    assert 0 <= decision.delay_s <= MAX_DELAY_S
    assert decision.why
    assert not decision.why.endswith(".")
    if pasts and pasts[-1].cause in ("completed", "cancelled", "oom"):
        assert not decision.again
    if pasts and pasts[-1].cause == "preempted":
        assert decision == Decision("requeue", decision.why)


@given(st.lists(LIVES, max_size=20), REQUEUES)
def test_no_run_is_started_again_after_more_failures_than_it_may_have(lives: list[Life], requeue: RequeueSpec) -> None:
    pasts, last = lived(lives, requeue)
    restarts = past_failures(pasts) - int(last is not None and not last.again and pasts[-1].cause in ("crash", "hang"))
    assert restarts <= requeue.max_failures


@given(st.lists(LIVES, min_size=1, max_size=10), REQUEUES, st.data())
def test_a_new_checkpoint_never_ends_a_run_that_would_continue_without_it(
    lives: list[Life], requeue: RequeueSpec, data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, len(lives) - 1))
    more = [*lives[:index], replace(lives[index], saved=lives[index].saved + 1), *lives[index + 1 :]]
    if decide(history(lives), requeue).again:
        assert decide(history(more), requeue).again
